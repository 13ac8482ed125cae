"""Everything is killed at once, while experts move: the service comes back by itself and serves the
table that was committed last.

Once with Ray alive, which restarts the controller; once with Ray itself killed, under `up --keep`;
once with that killed as well, as by a machine that fails. Nobody does anything but start the same
command again, and that only in the last case, as a supervisor would.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moe_serve.bootstrap.local_ray import LocalRay
from moe_serve.controller.journal_rows import image_of
from moe_serve.controller.journal_store import STATE_FILE, StateStore
from moe_serve.errors import MoeServeError
from moe_serve.shard.faults import FaultPoints
from placement.engine import RebalanceEngine
from placement.engine.state import SlotUse
from placement.messages.history import SlotFreed
from tests.chaos.faults import Faults
from tests.chaos.history import NEEDED, Deeds, check_history, read_history
from tests.cli_process import ROOT, Shell
from tests.marker_checkpoint import (
    EXPERTS,
    LAYERS,
    TOP_K,
    marker_oracle,
    marker_rows,
    write_marker_checkpoint,
)
from tests.service_cluster import (
    Locations,
    Service,
    locations,
    part_pids,
    running,
    service_config,
    wait_until,
)
from tests.traffic import TOLERANCE, Source, Traffic, Workload, draw

BAR_S = 60.0
"""Until everything is served again; printed beside what was measured."""
BACK_WAIT_S = 240.0
SLOW_COPIES = FaultPoints(delay_copy_s=5.0)
"""Ordered from every shard that is to die: time enough to be caught copying."""
HOT = 4
"""Experts that most calls ask for, so that there is something to move."""


def workload() -> Workload:
    """Most rows go to few experts of the first layer."""

    def make(rng: np.random.Generator) -> Any:
        hot = rng.random() < 0.8
        layer, hidden, ids, gates = draw(
            rng, marker_rows, layers=LAYERS, experts=HOT if hot else EXPERTS, top_k=TOP_K
        )
        return 0 if hot else layer, hidden, ids, gates

    return Workload(make, marker_oracle)


def committed(state_dir: Path) -> Locations:
    """What a journal says is listed: (layer, expert) -> (rank, slot), in order."""
    store = StateStore(state_dir, state_dir.name)
    try:
        image = image_of(store.rows, store.meta(), 0.0, dropped_tail=store.dropped_tail)
    finally:
        store.close()
    assert image.snapshot is not None
    engine = RebalanceEngine.restore(
        image.snapshot.engine,
        image.transitions,
        term=image.intended_term + 1,
        first_epoch=image.epoch + 1,
        start_s=image.last_at_s,
    )
    found: Locations = {}
    for rank in engine.state.ranks:
        for index, slot in enumerate(rank.slots):
            if slot.use is SlotUse.LISTED:
                found.setdefault(divmod(slot.key, EXPERTS), []).append((rank.rank, index))
    return {key: sorted(places) for key, places in sorted(found.items())}


# -- Ray alive -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def service(
    ray_cluster: LocalRay, tmp_path_factory: pytest.TempPathFactory, history: Path
) -> Iterator[Service]:
    scratch = tmp_path_factory.mktemp("everything")
    config = service_config(
        "everything",
        str(write_marker_checkpoint(scratch / "marker")),
        scratch / "everything",
        slots=8,
        rebalance={"drain_wait_s": 1.0, "floor": 1},
    )
    with running(config, history_dir=history) as deployed:
        # Only what is asked for moves; the pause has to survive as well.
        deployed.admin.pause("the test moves experts itself")
        yield deployed


def copying(service: Service) -> bool:
    with contextlib.suppress(MoeServeError):
        return any(step.state == "COPYING" for step in service.admin.steps())
    return False


def kill_everything(service: Service, deeds: Deeds) -> Locations:
    """End controller, shards and routers as `kill -9` does; what the journal had committed then."""
    controller = service.controller_pid()
    parts = part_pids(service.placement())
    assert controller > 0
    assert all(parts.values())
    began_s = time.monotonic()
    os.kill(controller, signal.SIGSTOP)  # so that what is read is what it leaves
    state_dir = Path(str(service.config.state_dir))
    aside = state_dir.with_name("aside") / state_dir.name
    shutil.copytree(state_dir, aside)
    deeds.paused.append((controller, began_s, time.monotonic()))
    for pid in (*parts.values(), controller):
        deeds.kill(pid)
        os.kill(pid, signal.SIGKILL)
    return committed(aside)


def test_every_actor_killed_while_experts_move(service: Service, history: Path) -> None:
    deeds = Deeds()
    placement = service.wait_quiet()
    first, faults = locations(placement), Faults(service)
    for rank in placement.ranks:
        faults.order_shard(f"rank {rank.rank}", SLOW_COPIES)
    sources = [Source(a, stream) for a in service.routers for stream in (False, True)]
    with Traffic(sources, workload()) as traffic:
        plan = wait_until(
            "a plan that moves something",
            lambda: (found := service.admin.compute_plan("", 0)).moves and found,
        )
        service.admin.apply_plan(plan.plan_id, False)
        wait_until("an expert is being copied", lambda: copying(service))
        term = service.placement().term
        began_s = time.monotonic()
        table = kill_everything(service, deeds)
        service.close()
        placement = service.wait(
            "every expert is listed by a controller of a higher term",
            lambda p: p.term > term and not p.missing and 0 not in part_pids(p).values(),
            BACK_WAIT_S,
        )
        listed_s = time.monotonic() - began_s
        answered = traffic.requests
        traffic.more(20, BACK_WAIT_S)
        placement = service.wait_quiet(BACK_WAIT_S)
    now = locations(placement)
    print(
        f"every actor killed while {len(plan.moves)} moves were under way: all experts listed "
        f"again after {listed_s:.1f} s (bar {BAR_S:g} s), term {term} -> {placement.term}; "
        f"{answered} calls answered by then, {traffic.failed} failed meanwhile"
    )
    assert len(table) == LAYERS * EXPERTS
    assert {key: places for key, places in table.items() if not set(places) <= set(now[key])} == {}
    assert sum(map(len, table.values())) >= sum(map(len, first.values()))
    assert traffic.worst <= TOLERANCE
    assert all("Unavailable" in failure for failure in traffic.failures), traffic.failures
    # Nothing need have been released by then.
    need = [kind for kind in NEEDED if kind is not SlotFreed]
    assert check_history(read_history(history), deeds, need=need) == []


# -- Ray killed as well ----------------------------------------------------------------------------


@dataclass
class Keeper:
    """`moe-serve up --keep` as a process, and the service that it keeps."""

    shell: Shell
    file: Path
    runs: int = 0
    process: subprocess.Popen[bytes] | None = field(default=None, init=False)

    def start(self) -> dict[str, Any]:
        """Start the command; the record it prints once the service is up."""
        self.runs += 1
        command = [sys.executable, "-m", "moe_serve", "up", "-f", str(self.file)]
        with self.out.open("wb") as out, self.err.open("wb") as err:
            self.process = subprocess.Popen(
                [*command, "--keep", "-o", "json"],
                env=self.shell.environment,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
            )
        return self.record(1)

    @property
    def out(self) -> Path:
        return self.shell.folder / f"keep-{self.runs}.out"

    @property
    def err(self) -> Path:
        return self.shell.folder / f"keep-{self.runs}.err"

    def record(self, number: int) -> dict[str, Any]:
        """The record that it prints at its start number `number`."""
        assert self.process is not None
        process = self.process

        def printed() -> list[str]:
            assert process.poll() is None, self.err.read_text()
            lines = self.out.read_text().splitlines(keepends=True)
            return lines[number - 1 : number] if lines and lines[-1].endswith("\n") else []

        (line,) = wait_until(f"record {number}", printed, BACK_WAIT_S)
        found: dict[str, Any] = json.loads(line)
        return found

    def killed(self, *, itself: bool) -> None:
        """End everything that this user started, as `kill -9` does."""
        assert self.process is not None
        for pid in self.shell.processes():
            if itself or pid != self.process.pid:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        if itself:
            self.process.wait()


@pytest.fixture
def keeper(tmp_path: Path) -> Iterator[Keeper]:
    checkpoint = write_marker_checkpoint(tmp_path / "marker")
    tree = json.loads(
        service_config("kept", str(checkpoint), tmp_path / "journal", slots=8).model_dump_json()
    )
    # One node, which `up` starts.
    group = {**tree["fleet"]["ranks"][0], "count": 4, "node_labels": {}}
    tree["fleet"]["ranks"] = [{**group, "failure_domain_label": ""}]
    file = tmp_path / "kept.yaml"
    file.write_text(json.dumps(tree))
    (tmp_path / "user").mkdir()
    with Shell(tmp_path / "user").cleaned() as shell:
        yield Keeper(shell, file)


def table_of(status: dict[str, Any]) -> list[list[tuple[int, int]]]:
    return [
        [(slot["layer"], slot["expert"]) for slot in rank["slots"] if slot["state"] == "LISTED"]
        for rank in status["ranks"]
    ]


def await_table(shell: Shell, table: list[list[tuple[int, int]]], began_s: float) -> float:
    """Wait until it is served again; seconds since `began_s`."""

    def back() -> bool:
        done = shell.cli("status", "-o", "json")
        found = json.loads(done.stdout) if done.returncode == 0 else {}
        return bool(found) and not found["missing"] and found["state"] == "paused"

    wait_until("all experts are listed", back, BACK_WAIT_S)
    took_s = time.monotonic() - began_s
    assert table_of(shell.data("status")) == table
    return took_s


def calls_are_right(record: dict[str, Any]) -> int:
    with Traffic([Source(a, False) for a in record["router_addresses"]], workload()) as traffic:
        traffic.more(20)
    assert (traffic.failures, traffic.worst <= TOLERANCE) == ([], True)
    return traffic.requests


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ray_killed_as_well(keeper: Keeper) -> None:
    shell, first = keeper.shell, keeper.start()
    shell.data("pause", "--reason", "the test moves experts itself")
    # A table that nobody would come to by filling empty ranks.
    shell.cli("drain", "1")
    wait_until("rank 1 is empty", lambda: not table_of(shell.data("status"))[1], 90.0)
    assert shell.cli("undrain", "1").returncode == 0
    table = table_of(shell.data("status"))

    began_s = time.monotonic()
    keeper.killed(itself=False)
    second = keeper.record(2)
    by_itself_s = await_table(shell, table, began_s)
    assert set(second["ray_pids"]) & set(first["ray_pids"]) == set()
    assert not Path(first["ray_temp_dir"]).exists()
    assert calls_are_right(second) >= 20

    began_s = time.monotonic()
    keeper.killed(itself=True)
    third = keeper.start()
    again_s = await_table(shell, table, began_s)
    assert not Path(second["ray_temp_dir"]).exists()
    assert calls_are_right(third) >= 20

    # Only the keeper is killed: the next one finds the service running and looks after it.
    assert keeper.process is not None
    keeper.process.kill()
    keeper.process.wait()
    assert keeper.start()["ray_pids"] == third["ray_pids"]
    assert "is running already; it is looked after" in keeper.err.read_text()

    keeper.process.terminate()
    assert keeper.process.wait(120.0) == 0, keeper.err.read_text()
    print(
        f"Ray killed with everything: the same table served after {by_itself_s:.1f} s by --keep, "
        f"{again_s:.1f} s by starting it again (bar {BAR_S:g} s)"
    )
    assert shell.left() == {}
    assert not Path(third["ray_temp_dir"]).exists()
    assert shell.cli("status").returncode == 3
    assert (shell.folder.parent / "journal" / STATE_FILE).exists()
