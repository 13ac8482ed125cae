"""What moving experts costs those who call, and whether it loses anything: under full load.

    python -m benchmarks.migrating --json FILE

First every expert moves at least once while a service notes its history, and the history is
checked: every contribution added exactly once. Then, on a service that notes nothing, blocks with
and without moves take turns, beside pairs of blocks without: p99 of calls, processor seconds of the
service a call.

One rank of four holds few experts at any time. A block with moves takes most of another one's, so
layouts before and after a block are alike, and calls have rows for all four ranks all the time: an
empty rank that fills would add a sub-call to each of them, which is no cost of moving.

Responsible for the order of the parts, the table and the file. A missed bar is printed and written,
and the program still exits 0; it raises where an output is wrong or a call fails. About ten
minutes.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.environment import record, use_one_thread, write_json

if TYPE_CHECKING:
    from benchmarks.migrating_load import Answers, Shape
    from moe_serve.config import ServiceConfig
    from tests.service_cluster import Service

EXPERTS, HIDDEN, LAYERS, RANKS = 64, 64, 2, 4
SLOTS = 46
"""Three ranks hold some 39 of the 128 experts each, and have free slots to receive into."""
FEW = 12
"""Slots that a rank keeps when experts are taken from it, one of them empty: five or six of 64
experts a layer, so 32 rows of two have some for it in 498 of 500 calls."""
COPY_BYTES_PER_S = 300_000
"""Into each rank; an expert is 49,152 bytes, so 27 of them take about four seconds into one."""
ROWS, AUDIT_ROWS, OPEN_CALLS = 32, 128, 3
CONTRIBUTIONS_LEAST = 1_000_000
ROUNDS = 20
BLOCK_S = 4.0
TIMES_BAR = 1.25
DEVIATION_MAX = 1e-5
TICK_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Block:
    """moving: whether experts moved. cpu_s: processor seconds of the service's processes."""

    moving: bool
    from_s: float
    to_s: float
    cpu_s: float
    moves: int


def main(arguments: list[str] | None = None) -> int:
    """Run, print, and write the JSON file if asked."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.migrating", description=__doc__)
    parser.add_argument("--json", type=Path, help="write results to this file")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--contributions", type=int, default=CONTRIBUTIONS_LEAST)
    options = parser.parse_args(arguments)

    use_one_thread()  # before anything below imports numpy
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    from tests.service_cluster import local_cluster

    environment = record("migrating", options.seed)
    _say(*environment.lines())
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="moe-mig-") as name, local_cluster():
        folder = Path(name)
        results["audit"] = _audit(folder, options.seed, options.contributions)
        results["blocks"] = _blocks(folder, options.seed, options.rounds)
    results["load_average_at_end"] = os.getloadavg()
    _say(f"  load at the end {', '.join(f'{one:.1f}' for one in os.getloadavg())}")
    if options.json:
        write_json(options.json, environment, results)
    return 0


def _say(*lines: str) -> None:
    for line in lines:
        print(line)
    sys.stdout.flush()


def _shape(rows: int = ROWS) -> Shape:
    from benchmarks.migrating_load import Shape
    from tests.marker_checkpoint import TOP_K

    return Shape(LAYERS, EXPERTS, TOP_K, HIDDEN, rows, OPEN_CALLS)


def _config(folder: Path, name: str) -> ServiceConfig:
    from tests.marker_checkpoint import write_marker_checkpoint
    from tests.service_cluster import service_config

    checkpoint = folder / "marker"
    if not checkpoint.exists():
        write_marker_checkpoint(checkpoint, experts=EXPERTS, hidden=HIDDEN)
    return service_config(
        name,
        str(checkpoint),
        folder / name,
        slots=SLOTS,
        rebalance={"drain_wait_s": 1.0, "floor": 1, "wave_adds_per_rank": 4},
        limits={"copy_bytes_per_s": COPY_BYTES_PER_S},
    )


# -- moves -----------------------------------------------------------------------------------------


class Mover:
    """Takes experts from one rank after another: all, or most of them."""

    def __init__(self, service: Service) -> None:
        self._service = service
        service.wait_quiet()
        service.admin.pause("the benchmark moves experts itself")
        self._slot_bytes = int(service.placement().slot_bytes)
        self._rank = RANKS - 1

    def empty_next(self) -> None:
        """The next rank is left with nothing until the one after it is."""
        self._service.admin.undrain(self._rank)
        self._rank = rank = (self._rank + 1) % RANKS
        self._service.admin.drain(rank)
        self._service.wait(
            f"rank {rank} is empty",
            lambda p: not any(slot.layer >= 0 for slot in p.ranks[rank].slots),
            120.0,
        )

    def thin_next(self) -> None:
        """The next rank is left with few: its experts go where room is, most of them to the one
        that held few. By a smaller budget, which is given back at once."""
        from tests.chaos.marker_service import nothing_moves

        self._rank = rank = (self._rank + 1) % RANKS
        for slots in (FEW, SLOTS):
            self._service.admin.set_budget(rank, slots * self._slot_bytes)
            self._service.wait(
                f"rank {rank} has {slots} slots, and nothing moves",
                lambda p, slots=slots: p.ranks[rank].num_slots == slots and nothing_moves(p),
                120.0,
            )

    def stay(self) -> None:
        """Nothing moves for a block; the placement is looked at as often as while it does."""
        from tests.service_cluster import POLL_S

        until_s = time.monotonic() + BLOCK_S
        while time.monotonic() < until_s:
            self._service.placement()
            time.sleep(POLL_S)


def _moves_done(service: Service) -> int:
    done = service.placement().moves_done
    return int(done.get("migrate", 0)) + int(done.get("replicate", 0))


# -- nothing lost ----------------------------------------------------------------------------------


def _audit(folder: Path, seed: int, contributions: int) -> dict[str, Any]:
    """Every expert moves, and at least so many contributions are checked."""
    from benchmarks.migrating_load import load
    from tests.chaos.history import check_history, read_history
    from tests.service_cluster import locations, running

    where, shape = folder / "history", _shape(AUDIT_ROWS)
    with running(_config(folder, "mig-audit"), history_dir=where) as service:
        mover = Mover(service)
        moved: dict[tuple[int, int], int] = dict.fromkeys(locations(service.placement()), 0)
        with load(service.routers, shape, seed) as front_end:
            while not all(moved.values()) or front_end.answered * shape.pairs < contributions:
                before = locations(service.placement())
                mover.empty_next()
                after = locations(service.placement())
                for key in after:
                    moved[key] += bool(set(after[key]) - set(before[key]))
            answers = front_end.stop()
        _check(answers)
        facts = read_history(where)
    broken = check_history(facts)
    kept = len(answers.took_s) * shape.pairs
    _say(
        f"history: {kept} contributions asked for and answered while {sum(moved.values())} moves "
        f"took place, every one of {len(moved)} experts at least {min(moved.values())} times; "
        f"greatest deviation {answers.worst:.1e}; promises broken: {broken or 'none'}"
    )
    if broken:
        raise AssertionError(broken)
    return {"contributions": kept, "moves": sum(moved.values()), "broken": broken}


def _check(answers: Answers) -> None:
    if answers.failures:
        raise AssertionError(f"{len(answers.failures)} calls failed: {answers.failures[:3]}")
    if not answers.worst <= DEVIATION_MAX:
        raise AssertionError(f"an output is wrong by {answers.worst}")


# -- what it costs ---------------------------------------------------------------------------------


def cpu_seconds(pids: Sequence[int]) -> float:
    """Processor seconds that these processes have used, by the kernel's count."""
    total = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
        total += int(fields[11]) + int(fields[12])
    return total / TICK_S


def _blocks(folder: Path, seed: int, rounds: int) -> dict[str, Any]:
    """Rounds of a pair with and without moves, in turns which comes first, and a pair without."""
    from benchmarks.migrating_load import load
    from tests.service_cluster import running

    blocks: list[Block] = []
    with running(_config(folder, "mig-blocks")) as service:
        mover = Mover(service)
        mover.thin_next()
        pids = [*service.pids().values(), service.controller_pid()]
        with load(service.routers, _shape(), seed) as front_end:
            time.sleep(BLOCK_S)  # first calls are slower
            for number in range(rounds):
                first = bool(number % 2)
                order = (first, not first, False, False)
                blocks += [_block(service, mover, pids, moving=moving) for moving in order]
            answers = front_end.stop()
    _check(answers)
    return _table(blocks, answers)


def _block(service: Service, mover: Mover, pids: Sequence[int], *, moving: bool) -> Block:
    moves, cpu_s, from_s = _moves_done(service), cpu_seconds(pids), time.monotonic()
    if moving:
        mover.thin_next()
    else:
        mover.stay()
    to_s = time.monotonic()
    cpu_s = cpu_seconds(pids) - cpu_s
    return Block(moving, from_s, to_s, cpu_s, _moves_done(service) - moves)


def _table(blocks: Sequence[Block], answers: Answers) -> dict[str, Any]:
    import numpy as np

    from benchmarks.dataplane_figures import ratios

    def p99(block: Block) -> float:
        return float(np.quantile(answers.within(block.from_s, block.to_s), 0.99))

    def cpu(block: Block) -> float:
        return block.cpu_s / len(answers.within(block.from_s, block.to_s))

    rounds = [blocks[i : i + 4] for i in range(0, len(blocks), 4)]
    still = [next(b for b in one[:2] if not b.moving) for one in rounds]
    moving = [next(b for b in one[:2] if b.moving) for one in rounds]
    calls = [len(answers.within(b.from_s, b.to_s)) for b in blocks]
    _say(
        f"blocks: {len(blocks)} of {min(calls)} to {max(calls)} calls, "
        f"{sum(b.moves for b in moving)} moves in {sum(b.to_s - b.from_s for b in moving):.0f} s; "
        f"p99 without {1e3 * float(np.median([p99(b) for b in still])):.1f} ms, "
        f"with {1e3 * float(np.median([p99(b) for b in moving])):.1f} ms (medians)"
    )
    results: dict[str, Any] = {"blocks": [asdict(b) for b in blocks], "calls": calls}
    for name, of in (("p99", p99), ("processor seconds a call", cpu)):
        with_moves = ratios([of(b) for b in moving], [of(b) for b in still])
        alike = ratios([of(one[3]) for one in rounds], [of(one[2]) for one in rounds])
        _say(
            f"{name}: with / without moves {with_moves.text()}, alike / alike {alike.text()}, "
            f"{with_moves.blocks} pairs each, coverage {with_moves.coverage:.3f}"
        )
        results[name] = {"with_moves": asdict(with_moves), "alike": asdict(alike)}
    upper, bar = results["p99"]["with_moves"]["high"], results["p99"]["alike"]["high"] * TIMES_BAR
    holds = bool(upper <= bar)
    _say(f"p99: upper end {upper:.3f} against {bar:.3f}: {'holds' if holds else 'missed'}")
    return results | {"bar": bar, "holds": holds}


if __name__ == "__main__":
    sys.exit(main())
