"""What a starting controller takes over and what it must not: parts that an older one created
behind its back, shards of other weights; and what remains to be ended where the journal tells
nothing. Over a fleet in memory."""

from __future__ import annotations

from pathlib import Path

import pytest

from moe_serve.controller.adoption import adopt, find_late
from moe_serve.controller.journal import Journal, open_journal
from moe_serve.controller.journal_rows import Starts, epoch_row, part_row, snapshot_row
from moe_serve.controller.journal_store import STATE_FILE
from moe_serve.controller.names import INCARNATIONS_PER_TERM
from moe_serve.controller.service import ControllerService
from moe_serve.controller.settings import ControllerSettings, JournalLimits
from moe_serve.errors import StaleTerm, StartRefused
from placement.messages.events import PauseAsked
from tests.fakes.controller import controller, make_cluster, make_settings, shards, until
from tests.fakes.fleet import FakeCluster, FakeFleet

LATE = INCARNATIONS_PER_TERM + 77
"""A life that the controller of term 1 may give."""


class CreatesBehind(FakeFleet):
    """An older controller creates a part after the new one looked and before its claim holds."""

    def __init__(self, cluster: FakeCluster, name: str, rank: int, incarnation: int) -> None:
        super().__init__(cluster)
        self._late = name, rank, incarnation
        self.claims = 0

    async def claim_term(self, term: int) -> bool:
        self.claims += 1
        if self.claims == 1:
            await self.create_shard(*self._late)
        return await super().claim_term(term)


@pytest.mark.asyncio
async def test_a_part_that_an_older_controller_created_behind_ones_back_is_ended(
    tmp_path: Path,
) -> None:
    cluster, name = make_cluster(), f"tiny:shard:1:{LATE}"
    async with controller(make_settings(tmp_path), cluster) as first:
        await first.ready()
        before = set(cluster.living())
    fleet = CreatesBehind(cluster, name, 1, LATE)
    async with controller(make_settings(tmp_path), cluster, fleet=fleet) as second:
        assert fleet.claims == 1
        await until(lambda: name in cluster.killed)
        await second.ready()
        assert set(cluster.living()) == before, "those it knew of live on"


@pytest.mark.asyncio
async def test_what_a_newer_controller_created_is_not_ours_to_end() -> None:
    cluster = make_cluster()
    fleet = FakeFleet(cluster)
    adopted = await adopt(fleet, "tiny", (), patience_s=0.1)
    for term in (1, 2, 3):
        life = term * INCARNATIONS_PER_TERM + 1
        await fleet.create_shard(f"tiny:shard:0:{life}", 0, life)
    await find_late(adopted, fleet, "tiny", term=2)
    assert adopted.to_end == [f"tiny:shard:0:{INCARNATIONS_PER_TERM + 1}"]


@pytest.mark.asyncio
async def test_of_what_lives_the_newest_life_that_the_journal_names_is_taken_over() -> None:
    """Of each place: a life that it does not name is a stranger's, and one before the newest was
    being replaced."""
    cluster = make_cluster()
    for life in (5, 6, 7):
        await FakeFleet(cluster).create_shard(f"tiny:shard:0:{life}", 0, life)
        await FakeFleet(cluster).create_router(f"tiny:router:r:{life}", "r", life)
    named = [f"tiny:{place}:{life}" for place in ("shard:0", "router:r") for life in (5, 6)]
    adopted = await adopt(FakeFleet(cluster), "tiny", named, patience_s=0.1)
    assert [str(part.name) for part in adopted.shards] == ["tiny:shard:0:6"]
    assert [str(part.name) for part in adopted.routers] == ["tiny:router:r:6"]
    ended = {f"tiny:{place}:{life}" for place in ("shard:0", "router:r") for life in (5, 7)}
    assert sorted(adopted.to_end) == sorted(ended)
    nothing_named = await adopt(FakeFleet(cluster), "tiny", None, patience_s=0.1)
    assert [str(part.name) for part in nothing_named.shards] == ["tiny:shard:0:7"]
    assert nothing_named.to_end == [], "whose they are is not known"


# -- other weights ---------------------------------------------------------------------------------


@pytest.mark.asyncio
async def test_a_shard_of_other_weights_is_replaced_whatever_its_slots_are_called(
    tmp_path: Path,
) -> None:
    cluster = make_cluster()
    async with controller(make_settings(tmp_path), cluster) as first:
        await first.ready()
    other = cluster.shard(1)
    assert other is not None
    other.weights_version = "v0"
    kept = {s.name for s in shards(cluster)} - {other.name}
    async with controller(make_settings(tmp_path), cluster) as second:
        await until(lambda: other.name in cluster.killed)
        await second.ready()
        assert any("held weights v0" in text for text in second.service.sight().problems)
        assert kept < {s.name for s in shards(cluster)}
        tables = [t for t in cluster.tables if t.order[0] == second.state.term]
        lives = {a.incarnation for table in tables for a in table.ranks}
        assert tables
        assert other.incarnation not in lives, "no table of this controller ever named it"


@pytest.mark.asyncio
async def test_without_a_trusted_journal_parts_of_other_weights_refuse_the_start(
    tmp_path: Path,
) -> None:
    cluster = make_cluster()
    async with controller(make_settings(tmp_path), cluster, owner="there") as first:
        await first.ready()
    for shard in shards(cluster):
        shard.weights_version = "v0"
    living = cluster.living()
    service = ControllerService(
        make_settings(tmp_path), FakeFleet(cluster), owner="here", serve_admin=False
    )
    with pytest.raises(StartRefused, match="parts of another model or fleet are running"):
        await service.start()
    await service.stop()
    assert cluster.living() == living


# -- the journal -----------------------------------------------------------------------------------


async def owned(settings: ControllerSettings, term: int) -> Journal:
    journal, image = await open_journal(settings.state_dir, "tiny", JournalLimits())
    assert image.snapshot is not None
    await journal.intend_term(term)
    await journal.open_term(term, snapshot_row(image.snapshot), owner="here", starts=Starts())
    return journal


@pytest.mark.asyncio
async def test_a_fenced_controller_notes_no_port_any_more(tmp_path: Path) -> None:
    cluster, settings = make_cluster(), make_settings(tmp_path)
    async with controller(settings, cluster) as made:
        await made.ready()
    first = await owned(settings, 11)
    await first.note_router_port("router-0", 4001)
    second = await owned(settings, 12)
    await second.note_router_port("router-0", 4002)
    await second.note_admin_port(4003)
    for late in (first.note_router_port("router-0", 1), first.note_admin_port(1)):
        with pytest.raises(StaleTerm) as caught:
            await late
        assert caught.value.term == 12
    await first.close()
    await second.close()
    journal, image = await open_journal(settings.state_dir, "tiny", JournalLimits())
    await journal.close()
    assert (image.router_ports, image.admin_port) == ({"router-0": 4002}, 4003)


@pytest.mark.asyncio
@pytest.mark.parametrize("damaged", ["", "journal", "folder"])
async def test_what_is_ended_without_a_life_is_what_the_journal_names_and_what_lives(
    tmp_path: Path, damaged: str
) -> None:
    cluster, settings = make_cluster(), make_settings(tmp_path / "state")
    async with controller(settings, cluster) as made:
        await made.ready()
        # Journalled before it is created, as every part is; it was not listed as alive yet.
        await made.service.life.journal.commit([part_row("tiny:shard:2:1000099", 1.0)])
    if damaged == "journal":
        (tmp_path / "state" / STATE_FILE).write_bytes(b"none " * 1000)
        (tmp_path / "state" / f"{STATE_FILE}-wal").unlink(missing_ok=True)
    elif damaged == "folder":
        (tmp_path / "state").rename(tmp_path / "away")
        (tmp_path / "state").write_text("a file in its place")
    living = cluster.living()
    assert len(living) == 4
    service = ControllerService(settings, FakeFleet(cluster), owner="here", serve_admin=False)
    if damaged == "journal":
        with pytest.raises(StartRefused, match="is damaged"):
            await service.start()
    names = await service.down(0.1)
    assert cluster.living() == []
    assert set(living) <= set(cluster.killed) & set(names)
    assert ("tiny:shard:2:1000099" in names) is not bool(damaged)


@pytest.mark.asyncio
async def test_numbers_of_a_journal_that_is_set_aside_are_not_used_again(tmp_path: Path) -> None:
    """Also where no part lives that would know them: clients hold tables of these epochs."""
    cluster = make_cluster()
    async with controller(make_settings(tmp_path), cluster, owner="there") as first:
        await first.ready()
        await first.service.life.journal.commit([epoch_row(70, 1.0)])
    for name in cluster.living():
        cluster.die(name)
    async with controller(make_settings(tmp_path), cluster, owner="here") as second:
        await second.ready()
        assert second.state.epoch > 70
        assert second.state.term > 1


@pytest.mark.asyncio
async def test_load_windows_are_numbered_on_after_a_restart(tmp_path: Path) -> None:
    cluster = make_cluster()
    async with controller(make_settings(tmp_path), cluster) as first:
        await first.ready()
        await until(lambda: first.service.book.window is not None)
        await until(lambda: first.state.history.windows[-1].index >= 10)
        before = first.state.history.windows[-1].index
        await first.service.life.driver.ask(  # which a snapshot follows
            lambda n: PauseAsked(at_s=0.0, request_id=n)
        )
    async with controller(make_settings(tmp_path), cluster) as second:
        await until(lambda: second.service.book.window is not None)
        window = second.service.book.window
        assert window is not None
        assert window.index > before
