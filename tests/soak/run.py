"""An hour of faults under load: `make soak MINUTES=60 SEED=0`.

A service of its own on a local cluster, calls without pause whose every answer is compared with an
oracle, popularity that shifts so that the controller moves experts by itself, and a fault every 15
seconds, drawn from the seed. Prints a line a fault and a table at the end; 0 where every promise
was kept, else 1.

Responsible for the order of things and for words.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

EVERY_S = 15.0
REST_MAX_S = 90.0
MOVES_A_MINUTE = 1.0
"""Fewer moves than this, and the soak has not shown what it is for."""
CALLS_A_MINUTE = 60.0
ADDRESS = re.compile(r"[0-9.]+:[0-9]+|after [0-9.]+ s")
"""What is left out where violations are counted that are alike."""


@dataclass
class Result:
    """What a soak came to. violations: in words; none where every promise was kept."""

    seed: int
    minutes: float
    deeds: list[Any] = field(default_factory=list)
    excused: list[Any] = field(default_factory=list)
    growths: list[Any] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)

    def as_json(self) -> str:
        return json.dumps(
            {
                "seed": self.seed,
                "minutes": self.minutes,
                "figures": self.figures,
                "violations": self.violations,
                "faults": [
                    {
                        "fault": str(deed.act),
                        "kind": deed.act.kind.value,
                        "began_s": deed.began_s,
                        "lasted_s": deed.ended_s - deed.began_s,
                        "healed_s": deed.healed_s,
                        "notes": deed.notes,
                        "violations": deed.violations,
                    }
                    for deed in self.deeds
                ],
                "excused": [
                    {"fault": str(one.deed.act), **asdict(one.failure)} for one in self.excused
                ],
                "growth": [asdict(growth) for growth in self.growths],
            },
            indent=1,
        )


def say(line: str) -> None:
    """One line, at once."""
    print(line, flush=True)


@contextlib.contextmanager
def rig(folder: Path, *, history: bool) -> Iterator[Any]:
    """The running service: (faults, nodes). Ended at the end, and nothing of it is left."""
    from moe_serve.bootstrap.drill import Drill
    from tests.chaos.cluster import more_nodes
    from tests.chaos.faults import Faults
    from tests.chaos.proxy import Proxy
    from tests.service_cluster import local_cluster, running
    from tests.soak.rig import soak_config

    with local_cluster() as cluster, more_nodes(cluster) as nodes, Proxy() as proxy:
        drill = Drill(socks_proxy=proxy.address)
        where = str(folder / "history") if history else ""
        if where:
            Path(where).mkdir()
        with running(soak_config(folder), drill=drill, history_dir=where) as service:
            faults = Faults(service, proxy)
            try:
                yield faults, nodes
            finally:
                faults.end_all()


def soak(result: Result, kinds: tuple[Any, ...], folder: Path, *, history: bool) -> None:
    """Live through it; what was found is added to the result."""
    from tests.soak.health import Sampler, ailments
    from tests.soak.load import Load
    from tests.soak.verdict import judge_failures
    from tests.traffic import Source

    with rig(folder, history=history) as (faults, nodes):
        service = faults.service
        service.wait("every part is up", lambda placement: not ailments(placement), 150.0)
        load = Load(
            [Source(a, stream, pause_s=0.1) for a in service.routers for stream in (False, True)],
            result.seed,
        )
        sampler = Sampler(service)
        load.start()
        sampler.start()
        began_s = time.monotonic()
        try:
            _faults(result, kinds, faults, nodes, load)
            _rest(result, faults, load, sampler)
        finally:
            faults.end_all()
            sampler.stop()
        seconds = time.monotonic() - began_s
        result.excused, guilty = judge_failures(load.failures, result.deeds)
        result.violations += guilty
        if load.failed > len(load.failures):
            result.violations.append(f"{load.failed - len(load.failures)} failures were not kept")
        _figures(result, load, sampler, seconds)
    if history:
        _history(result, folder, faults)


def _faults(result: Result, kinds: tuple[Any, ...], faults: Any, nodes: Any, load: Any) -> None:
    from tests.soak.acts import Hands
    from tests.soak.dice import draw_schedule

    hands = Hands(faults, nodes, load)
    count = int(result.minutes * 60 / EVERY_S) + 1
    began_s = time.monotonic()
    for act in draw_schedule(result.seed, count, kinds):
        due_s = began_s + act.number * EVERY_S
        time.sleep(max(0.0, due_s - time.monotonic()))
        if time.monotonic() - began_s >= result.minutes * 60:
            break
        answered, failed, kept = load.answered, load.failed, len(load.failures)
        load.take_slowest()
        deed = hands.do(act)
        result.deeds.append(deed)
        notes = "".join(f"; {note}" for note in deed.notes)
        say(
            f"{deed.began_s - began_s:7.1f} s  {act}: healed {deed.healed_s:.1f} s after it ended; "
            f"{load.answered - answered} answered, {load.failed - failed} failed, slowest "
            f"{load.take_slowest():.2f} s{notes}"
        )
        for text in sorted({f"{one.code} {one.text}" for one in load.failures[kept:]})[:3]:
            say(f"           failed: {text}")
        for violation in deed.violations:
            say(f"  VIOLATION {violation}")
            result.violations.append(f"{act}: {violation}")


def _rest(result: Result, faults: Any, load: Any, sampler: Any) -> None:
    """No more faults and no more calls: everything must come to rest and be in its place."""
    from tests.service_cluster import wait_until
    from tests.soak.health import ailments, stray_memory, stray_parts, stray_slots

    service = faults.service
    time.sleep(EVERY_S)
    load.stop()
    service.wait("the controller answers", lambda _p: True)
    service.admin.pause("the soak is over")
    began_s = time.monotonic()
    last: list[str] = []

    def at_rest() -> bool:
        placement = service.placement()
        last[:] = [*ailments(placement), *stray_slots(placement), *stray_parts(service)]
        if placement.state != "paused":
            last.append(f"state {placement.state}")
        last.extend([] if last else stray_memory(service, placement))
        return not last

    try:
        wait_until("everything is in its place", at_rest, REST_MAX_S)
    except AssertionError:
        result.violations += [f"at rest: {what}" for what in last]
    result.figures["rest_s"] = round(time.monotonic() - began_s, 1)
    result.figures["moves"] = float(sampler.moves)


def _figures(result: Result, load: Any, sampler: Any, seconds: float) -> None:
    from tests.soak.slopes import growth_of

    result.growths = [growth_of(life) for life in sampler.lives.values()]
    result.violations += [leak for one in result.growths for leak in one.leaks]
    minutes = seconds / 60
    result.figures |= {
        "seconds": round(seconds, 1),
        "answered": float(load.answered),
        "failed": float(load.failed),
        "excused": float(len(result.excused)),
        "worst_deviation": load.worst,
        "processes": float(len(result.growths)),
    }
    for what, seen, least in (
        ("moves", sampler.moves, MOVES_A_MINUTE * minutes),
        ("answered calls", load.answered, CALLS_A_MINUTE * minutes),
    ):
        if seen < least:
            result.violations.append(f"only {seen} {what} in {minutes:.1f} minutes: nothing shown")


def _history(result: Result, folder: Path, faults: Any) -> None:
    from tests.chaos.history import check_history, read_history

    began_s = time.monotonic()
    facts = read_history(folder / "history")
    broken = check_history(facts, faults.deeds)
    result.violations += [f"history: {what}" for what in broken]
    result.figures["facts"] = float(len(facts))
    say(f"history: {len(facts)} facts checked in {time.monotonic() - began_s:.1f} s")


def tell(result: Result) -> None:
    """The table at the end."""
    from tests.soak.slopes import COUNTS_LIFE_S
    from tests.soak.verdict import table_of_faults, table_of_growth

    say("")
    say(table_of_faults(result.deeds, result.excused))
    say("")
    say(table_of_growth(result.growths, COUNTS_LIFE_S))
    say("")
    for one in result.excused[:20]:
        say(f"excused by {one.deed.act}: {one.failure.code} {one.failure.text}")
    say(f"load average {os.getloadavg()[0]:.1f}; {result.figures}")
    alike = Counter(ADDRESS.sub("#", violation) for violation in result.violations)
    for violation, times in alike.items():
        say(f"VIOLATION {f'({times} times) ' if times > 1 else ''}{violation}")
    say(
        f"{len(result.violations)} violations in {len(result.deeds)} faults; again with: "
        f"make soak MINUTES={result.minutes:g} SEED={result.seed}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="file for the results as JSON")
    parser.add_argument("--only", default="", help="kinds of faults, separated by commas")
    parser.add_argument("--schedule", action="store_true", help="print the schedule and do nothing")
    parser.add_argument("--no-history", action="store_true", help="do not note and check facts")
    chosen = parser.parse_args(arguments)
    from tests.soak.dice import Kind, draw_schedule

    kinds = tuple(Kind(word) for word in chosen.only.split(",") if word) or tuple(Kind)
    if chosen.schedule:
        for act in draw_schedule(chosen.seed, int(chosen.minutes * 60 / EVERY_S), kinds):
            say(f"{act.number * EVERY_S:7.1f} s  {act}")
        return 0
    # Ray reads the mode once, when it is first imported.
    os.environ.setdefault("RAY_AUTH_MODE", "token")
    result = Result(chosen.seed, chosen.minutes)
    folder = Path(tempfile.mkdtemp(prefix="moe-soak-"))
    try:
        soak(result, kinds, folder, history=not chosen.no_history)
    finally:
        tell(result)
        if chosen.out is not None:
            chosen.out.write_text(result.as_json())
        shutil.rmtree(folder, ignore_errors=True)
    return int(bool(result.violations))


if __name__ == "__main__":
    sys.exit(main())
