"""Parts of the demo that need no service: ledgers joined, the placement it compares with, the
terminal."""

from __future__ import annotations

import sys
from importlib import resources
from pathlib import Path

import numpy as np
import pytest

from moe_serve.bootstrap.parts import moe_spec
from moe_serve.config import ServiceConfig, load_config
from moe_serve.demo.front_end import TextLine
from moe_serve.demo.ledgers import audit_pages
from moe_serve.demo.options import DemoOptions
from moe_serve.demo.report import Check
from moe_serve.demo.run import run_demo
from moe_serve.demo.screen import Screen
from moe_serve.demo.static_layout import static_layout
from moe_serve.demo.watch import Seen
from moe_serve.errors import MoeServeError, StartRefused
from moe_serve.ports import Cause
from moe_serve.router.ledger import CombinedEntry, Entry, LedgerPage, RequestEntry
from moe_serve.rpc import placement_pb2 as pb
from moe_serve.rpc.codec import pack_bits
from moe_serve.shard.executed import LedgerEntry

# -- ledgers -------------------------------------------------------------------------------------

REQUEST = RequestEntry(
    request_key=7,
    layer=1,
    rows=3,
    top_k=2,
    pair_valid=pack_bits(np.array([[1, 1], [0, 0], [1, 0]], bool)),
)
"""Row 1 is padding, row 2 has one expert: three contributions are wanted."""


def page(*entries: Entry, forgotten: int = 0) -> LedgerPage:
    return LedgerPage("router-0", 1, entries, forgotten)


def added(*rows: int, call_id: int = 4) -> CombinedEntry:
    return CombinedEntry(7, 1, call_id, 0, 0, np.array(rows, "<i4").tobytes())


def executed(cause: Cause = Cause.FIRST, call_id: int = 4) -> LedgerEntry:
    row, k = (np.array(values, np.int32) for values in ([0, 0, 2], [0, 1, 0]))
    return LedgerEntry("router-0", call_id, 0, 7, 1, cause, row, k)


def test_ledgers_of_shards_and_routers_agree_pair_by_pair() -> None:
    found = audit_pages([(executed(),), ()], [page(REQUEST, added(0, 2))])
    assert (found.demand_pairs, found.executed_pairs, found.combined_pairs) == (3, 3, 3)
    assert (found.lost, found.doubled, found.unknown) == (0, 0, 0)


def test_a_row_that_no_router_added_is_lost_and_one_added_of_two_calls_is_doubled() -> None:
    assert audit_pages([(executed(),)], [page(REQUEST, added(0))]).lost == 1
    twice = [(executed(),), (executed(Cause.HEDGE, 5),)]
    found = audit_pages(twice, [page(REQUEST, added(0, 2), added(2, call_id=5))])
    assert (found.hedged, found.doubled, found.lost) == (3, 1, 0)


def test_a_router_that_forgot_entries_proves_nothing() -> None:
    with pytest.raises(MoeServeError, match=r"router-0 forgot 3 .* raise limits.ledger_rows_max"):
        audit_pages([(executed(),)], [page(REQUEST, added(0, 2), forgotten=3)])


# -- the placement that the demo compares with ---------------------------------------------------


@pytest.fixture(scope="module")
def config() -> ServiceConfig:
    return load_config(Path(str(resources.files("moe_serve.demo").joinpath("demo.yaml"))))


def test_the_static_placement_fills_the_same_slots_but_for_the_spare_one(
    config: ServiceConfig,
) -> None:
    spec, _ = moe_spec(config)
    layout = static_layout(config, spec)
    assert not layout.missing()
    assert layout.num_ranks == config.fleet.num_ranks
    slots = [39] * 4
    used = [int((layout.slots[rank] >= 0).sum()) for rank in range(4)]
    spare = config.core_rebalance().staging_slots
    assert used == [n - spare for n in slots]
    hosts = [layout.ranks_of(0, expert)[0] for expert in range(spec.num_experts)]
    assert hosts == sorted(hosts), "experts lie one after the other"


# -- the terminal --------------------------------------------------------------------------------


def test_what_a_model_writes_is_shown_as_it_is_and_not_at_all_where_quiet(
    capsys: pytest.CaptureFixture[str],
) -> None:
    line = TextLine(at_s=0.0, tokens=3, domain="code", prompt="a\n[bold]", text="[/] x[0]\n[red]")
    Screen(False, sys.stdout).text(line)
    assert "a⏎[bold][/] x[0]⏎[red]" in capsys.readouterr().out
    Screen(True, sys.stdout).text(line)
    assert capsys.readouterr().out == ""


def test_where_a_program_reads_the_figures_the_talk_is_on_stderr(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Screen(True, sys.stderr).note("starting")
    assert capsys.readouterr() == ("", "» starting\n")


def test_moves_that_ended_are_shown_with_their_reason_and_other_decisions_are_not(
    capsys: pytest.CaptureFixture[str],
) -> None:
    screen = Screen(False, sys.stdout)
    for rule, outcome in (("migrate", "done"), ("migrate", "started"), ("in_balance", "done")):
        screen.record(pb.DecisionRecord(rule=rule, outcome=outcome, detail=f"{rule} {outcome}"))
    assert capsys.readouterr().out.split() == ["migrate", "migrate", "done"]


def test_the_live_line_waits_for_a_placement_and_comes_seldom(
    capsys: pytest.CaptureFixture[str],
) -> None:
    screen, seen = Screen(False, sys.stdout), Seen(imbalance=0.25)
    screen.live(seen)
    assert capsys.readouterr().out == ""
    seen.placement = pb.GetPlacementResponse(epoch=3, state="moving", moves_done={"migrate": 2})
    screen.live(seen)
    screen.live(seen)
    shown = capsys.readouterr().out.splitlines()
    assert shown == ["-- imbalance 0.25 | epoch 3 | moving | moves: migrate 2"]


def test_a_summary_names_every_bar_that_was_missed(capsys: pytest.CaptureFixture[str]) -> None:
    found = {"lost": 1, "imbalance": 0.123456, "seed": 1}
    reached = Check(name="imbalance", bar="<= 0.2", holds=True)
    missed = Check(name="lost", bar="= 0", holds=False)
    Screen(True, sys.stdout).summary(found, [reached, missed])
    shown = capsys.readouterr().out
    assert "missed: lost" in shown
    assert "0.1235" in shown
    Screen(True, sys.stdout).summary(found, [reached])
    assert "every bar reached" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["", "missing/figures.json"])
def test_figures_that_cannot_be_written_are_refused_before_anything_starts(
    name: str, tmp_path: Path
) -> None:
    with pytest.raises(StartRefused, match=r"--json .* cannot be written"):
        run_demo(DemoOptions(json_file=tmp_path / name))
