"""Many seeds of the simulation: lived through, counted, printed.

`make sim SEEDS=200 FIRST_SEED=0`. A seed that breaks a promise is printed with the command that
replays it, and the others go on. Responsible for processes, wall time and words; what a seed is,
and whether it holds, is `placement.sim`'s to say.
"""

import argparse
import multiprocessing
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from placement.sim.checks import InvariantBroken
from placement.sim.coverage import REFUSALS, STATES, Coverage
from placement.sim.faults import FaultKind
from placement.sim.runner import Outcome, run

EVENTS_A_SECOND = 10_000
EVENTS_A_SEED = 2_000
SECONDS_FOR_200 = 240.0
COMPLETE_FROM = 200
"""Seeds in a row from which on every pair and refusal must have been met."""


@dataclass
class Summary:
    """What came of some seeds. `busy_s`: seconds of processor time."""

    outcomes: list[Outcome] = field(default_factory=list)
    broken: list[str] = field(default_factory=list)
    met: Coverage = field(default_factory=Coverage)
    busy_s: float = 0.0
    wall_s: float = 0.0

    @property
    def events(self) -> int:
        return sum(o.events for o in self.outcomes)

    def take(self, lived: "Lived") -> None:
        self.busy_s += lived.busy_s
        if isinstance(lived.result, str):
            self.broken.append(lived.result)
        else:
            self.outcomes.append(lived.result)
            self.met.add(lived.result.met)


@dataclass
class Lived:
    """One seed: its outcome, or what it broke."""

    result: Outcome | str
    busy_s: float


def live(seed: int) -> Lived:
    """Live through one seed."""
    began_s = time.process_time()
    try:
        result: Outcome | str = run(seed)
    except InvariantBroken as broken:
        result = str(broken)
    return Lived(result, time.process_time() - began_s)


def campaign(seeds: Sequence[int], jobs: int = 1, *, loud: bool = False) -> Summary:
    """Live through the seeds, in `jobs` processes."""
    summary, began_s = Summary(), time.monotonic()
    for number, lived in enumerate(_all(seeds, jobs), start=1):
        summary.take(lived)
        if loud and isinstance(lived.result, str):
            print(f"BROKEN {lived.result}", flush=True)
        if loud and number % 100 == 0:
            print(f"{number} of {len(seeds)} seeds, {len(summary.broken)} broken", flush=True)
    summary.wall_s = time.monotonic() - began_s
    return summary


def _all(seeds: Sequence[int], jobs: int) -> Iterable[Lived]:
    if jobs <= 1:
        yield from map(live, seeds)
        return
    with multiprocessing.get_context("spawn").Pool(jobs) as pool:
        yield from pool.imap_unordered(live, seeds, chunksize=5)


def table_of(met: Coverage) -> str:
    """How often each fault met each step state: one row a fault."""
    short = [state.replace("remove.", "rm.") for state in STATES]
    lines = ["how often a fault met a step in a state (0 must not occur over 200 seeds):"]
    lines.append(f"{'':18}" + "".join(f"{name:>13}" for name in short) + f"{'struck':>9}")
    for kind in FaultKind:
        counts = [met.pairs[f"{state} x {kind.value}"] for state in STATES]
        struck = met.faults[kind.value]
        row = "".join(f"{count:>13}" for count in counts)
        lines.append(f"{kind.value:18}{row}{struck:>9}")
    return "\n".join(lines)


def refusals_of(met: Coverage) -> str:
    """How often each typed refusal was given."""
    lines = ["typed refusals:"]
    lines += [f"  {name:24}{met.refusals[name]:>8}" for name in REFUSALS]
    return "\n".join(lines)


def figures_of(summary: Summary) -> str:
    """Figures of a campaign, simulated ones named so."""
    outcomes = summary.outcomes
    requests: Counter[str] = Counter()
    moves: Counter[str] = Counter()
    for outcome in outcomes:
        requests.update(outcome.requests)
        moves.update(outcome.moves)
    healed = sorted(o.healed_s for o in outcomes) or [0.0]
    rate = summary.events / max(summary.busy_s, 1e-9)
    least = min((o.events for o in outcomes), default=0)
    return "\n".join(
        [
            f"seeds lived through       {len(outcomes)}, broken {len(summary.broken)}",
            f"simulated events          {summary.events}, least a seed {least} "
            f"(bar {EVENTS_A_SEED})",
            f"events a second           {rate:.0f} of processor time (bar {EVENTS_A_SECOND}), "
            f"{summary.events / max(summary.wall_s, 1e-9):.0f} of wall time",
            f"wall time                 {summary.wall_s:.1f} s (bar for 200 seeds "
            f"{SECONDS_FOR_200:.0f} s), processor time {summary.busy_s:.1f} s",
            f"facts checked             {sum(o.facts for o in outcomes)}, events of the engine "
            f"replayed {sum(o.engine_events for o in outcomes)}",
            f"contributions checked     {sum(o.contributions for o in outcomes)}",
            f"requests (simulated)      {dict(sorted(requests.items()))}",
            f"moves (simulated)         {dict(sorted(moves.items()))}",
            f"healed after (simulated)  median {healed[len(healed) // 2]:.1f} s, "
            f"longest {healed[-1]:.1f} s",
        ]
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="make sim", description=__doc__)
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=0, help="processes; 0 = one a processor")
    chosen = parser.parse_args(arguments)
    seeds = range(chosen.first_seed, chosen.first_seed + chosen.seeds)
    jobs = min(chosen.jobs or len(os.sched_getaffinity(0)), len(seeds))
    summary = campaign(seeds, jobs, loud=True)
    print(table_of(summary.met))
    print(refusals_of(summary.met))
    print(figures_of(summary))
    missing = [*summary.met.missing()[0], *summary.met.missing()[1]]
    failed = bool(summary.broken)
    if len(seeds) >= COMPLETE_FROM:
        failed |= bool(missing)
        print(f"never met: {', '.join(missing) or 'nothing'}")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
