"""Plant each bug into a copy of the tree and see which test catches it: `make planted`.

Each bug meets the same tests, listed here by package: those of `moe_serve`, and for a bug in
`placement`, on which all rests, those of `placement` first. No list knows a bug. The run of a bug
ends with the first test that fails, fails again alone, and passes alone without the bug. First of
all the tests run without a bug, for where they fail anyway they catch nothing (`--no-baseline`
leaves that out).
"""

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

from tests.planted.copies import copy_tree, drop_caches, files_of
from tests.planted.patches import ROOT, BadPatch, Planted, all_patches, apply

LIMIT_S = 900.0
"""Longest run of a bug's tests; one that is not caught by then counts as not caught."""
SEEDS = 8
"""Simulated worlds of each bug."""
LISTS = {
    "placement": (
        "transitions/test_step_machines",
        "unit/placement/test_routing",
        "unit/placement/test_layout",
        "unit/placement/test_load",
        "unit/placement/test_split",
        "unit/placement/test_admission",
        "unit/placement/test_shard_role",
        "unit/placement/test_shard_role_lives",
        "unit/placement/test_roles_assignment",
        "unit/placement/test_roles_router",
        "unit/placement/test_roles_second_tries",
        "unit/placement/test_retry_budget",
        "unit/placement/test_rank_ejection",
        "unit/placement/test_latency",
        "unit/placement/test_planner",
        "unit/placement/test_policy_repair",
        "unit/placement/test_engine_admin",
        "unit/placement/test_engine_decision",
        "unit/placement/test_engine_edges",
        "unit/placement/test_engine_floor",
        "unit/placement/test_engine_journal",
        "unit/placement/test_engine_lives",
        "unit/placement/test_engine_recalls",
        "unit/placement/test_engine_recover",
        "unit/placement/test_engine_restore",
        "unit/placement/test_engine_routers",
        "unit/placement/test_engine_runs",
        "unit/placement/test_engine_source",
        "unit/placement/test_engine_stall",
        "unit/placement/test_engine_wishes",
        "property/test_combine_property",
        "property/test_split_property",
        "simulation/test_parts",
        "simulation/test_seeds",
    ),
    "moe_serve": (
        "unit/moe_serve/test_router_dispatch",
        "unit/moe_serve/test_router_parts",
        "unit/moe_serve/test_router_blame",
        "unit/moe_serve/test_router_promises",
        "unit/moe_serve/test_router_replies",
        "unit/moe_serve/test_router_permits",
        "unit/moe_serve/test_router_storm",
        "unit/moe_serve/test_work_queue",
        "unit/moe_serve/test_slot_pool",
        "unit/moe_serve/test_shard_core",
        "unit/moe_serve/test_shard_fence",
        "unit/moe_serve/test_shard_amends",
        "unit/moe_serve/test_shard_commands",
        "unit/moe_serve/test_shard_full",
        "unit/moe_serve/test_shard_memory",
        "unit/moe_serve/test_stall",
        "unit/moe_serve/test_host_cache",
        "unit/moe_serve/test_wire_codec",
        "unit/moe_serve/test_rpc",
        "unit/moe_serve/test_queue_to_forecast",
        "unit/moe_serve/test_journal",
        "unit/moe_serve/test_journal_first",
        "unit/moe_serve/test_journal_torn",
        "unit/moe_serve/test_controller",
        "unit/moe_serve/test_controller_disk",
        "unit/moe_serve/test_controller_executor",
        "unit/moe_serve/test_controller_fence",
        "unit/moe_serve/test_controller_kills",
        "unit/moe_serve/test_controller_parts",
        "unit/moe_serve/test_controller_routers",
        "loopback/test_shard_copy",
        "loopback/test_shard_hang",
        "loopback/test_shard_over_wire",
        "loopback/test_wire_server",
        "loopback/test_router_over_shards",
        "loopback/test_router_service",
        "loopback/test_controller_admin",
        "loopback/test_demand_s18_audit",
    ),
}
"""Test files by package, quick and general ones first."""
FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+\.py::.*?)(?: - .*)?$", re.MULTILINE)


@dataclass(frozen=True)
class Outcome:
    """What became of a bug. `said`: the test that caught it, or why none did."""

    name: str
    caught: bool
    said: str
    seconds: float


def files_in(which: str) -> list[str]:
    """The test files of a list, in its order."""
    return [f"tests/{name}.py" for name in LISTS[which]]


def lists_of(planted: Planted) -> tuple[str, ...]:
    """Which lists a bug meets."""
    core = any(file.startswith("placement/") for file in planted.files)
    return ("placement", "moe_serve") if core else ("moe_serve",)


def environment(tree: Path) -> dict[str, str]:
    """So that the copy's packages are imported, and not those that are installed."""
    one = {"OMP_NUM_THREADS": "1", "NUMBA_NUM_THREADS": "1"}
    return os.environ | one | {"PYTHONPATH": str(tree)}


def check_imports(tree: Path) -> None:
    """Raises SystemExit where Python would import the packages from elsewhere."""
    code = "import placement, moe_serve; print(placement.__file__, moe_serve.__file__, sep='\\n')"
    command = [sys.executable, "-P", "-c", code]
    got = subprocess.run(
        command, cwd=tree, env=environment(tree), capture_output=True, text=True, check=True
    )
    wrong = [file for file in got.stdout.split() if not Path(file).is_relative_to(tree)]
    if wrong:
        raise SystemExit(f"a copy in {tree} would test {', '.join(wrong)}")


def run_tests(
    tree: Path, tests: Sequence[str], limit_s: float, without: Sequence[str] = ()
) -> tuple[int | None, str]:
    """Exit status of pytest (None where it ran into the limit) and what it said."""
    options = ["-q", "-x", "--maxfail=1", "--tb=no", "-rfE", "-p", "no:randomly"]
    options += [f"--deselect={test}" for test in without]
    options += ["-p", "no:cacheprovider", "-m", "not slow", f"--seeds={SEEDS}"]
    process = subprocess.Popen(
        [sys.executable, "-m", "pytest", *options, *tests],
        cwd=tree,
        env=environment(tree),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        text, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # also what its tests started
        text, _ = process.communicate()
        return None, text
    return process.returncode, text


def verdict(name: str, rc: int | None, text: str, seconds: float) -> Outcome:
    """A bug is caught where a test failed: not where nothing could be tested."""
    if rc is None:
        return Outcome(name, False, "NOT CAUGHT in its time", seconds)
    if rc == 0:
        return Outcome(name, False, "NOT CAUGHT", seconds)
    failed = FAILED.findall(text)
    if rc == 1 and failed:
        return Outcome(name, True, failed[0], seconds)
    last = text.strip().splitlines()[-1:] or [""]
    return Outcome(name, False, f"cannot be tested, pytest ended with {rc}: {last[0]}", seconds)


class Campaign:
    """Runs of many bugs on copies of one state of the tree, itself a copy: nobody changes it."""

    def __init__(self, state: Path, limit_s: float) -> None:
        self._state = state
        self._limit_s = limit_s
        copy_tree(ROOT, files_of(ROOT), state)
        check_imports(state)

    def plant(self, planted: Planted) -> Outcome:
        """Plant one bug and run its tests."""
        began_s = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="planted-") as folder:
            tree = Path(folder).resolve() / "tree"
            shutil.copytree(self._state, tree)
            try:
                apply(planted, tree)
            except BadPatch as bad:
                return Outcome(planted.name, False, str(bad), time.monotonic() - began_s)
            drop_caches(tree, planted.files)
            check_imports(tree)
            return self._meet(planted, tree, began_s)

    def _meet(self, planted: Planted, tree: Path, began_s: float) -> Outcome:
        """One list after the other. A test that failed must fail again, alone, and pass without
        the bug: else it was not the bug that it failed for, and the others go on."""
        unsteady: list[str] = []
        outcome = Outcome(planted.name, False, "NOT CAUGHT", 0.0)
        for which in lists_of(planted):
            tests = files_in(which)
            while tests:
                rc, text = run_tests(tree, tests, self._left_s(began_s), without=unsteady)
                outcome = verdict(planted.name, rc, text, time.monotonic() - began_s)
                if not outcome.caught:
                    break
                again, _text = run_tests(tree, [outcome.said], self._left_s(began_s))
                healthy, _text = run_tests(self._state, [outcome.said], self._left_s(began_s))
                if again != 0 and healthy == 0:
                    return outcome
                unsteady.append(outcome.said)
                print(f"{planted.name}: {outcome.said} failed, but not for the bug", flush=True)
                tests = tests[tests.index(outcome.said.split("::")[0]) :]
            if rc != 0:
                break
        return outcome

    def _left_s(self, began_s: float) -> float:
        return max(1.0, self._limit_s - (time.monotonic() - began_s))

    def baseline(self, which: str) -> str:
        """What fails without a bug, and again alone; "" where nothing does."""
        tests, unsteady = files_in(which), list[str]()
        while True:
            rc, text = run_tests(self._state, tests, self._limit_s, without=unsteady)
            if rc == 0:
                return ""
            found = verdict(which, rc, text, 0.0)
            if not found.caught or run_tests(self._state, [found.said], self._limit_s)[0] != 0:
                return found.said
            unsteady.append(found.said)
            print(f"without any bug: {found.said} failed, and then passed", flush=True)
            tests = tests[tests.index(found.said.split("::")[0]) :]


def table_of(outcomes: Iterable[Outcome], planted: Sequence[Planted]) -> str:
    """One row a bug: what it breaks, who caught it, seconds."""
    breaks = {one.name: one.breaks for one in planted}
    width = max(len(name) for name in breaks)
    rows = [f"{'bug':{width}}  breaks    seconds  caught by"]
    rows += [
        f"{one.name:{width}}  {breaks[one.name]:6} {one.seconds:10.1f}  {one.said}"
        for one in sorted(outcomes, key=lambda one: one.name)
    ]
    return "\n".join(rows)


def passes(campaign: Campaign, planted: Sequence[Planted]) -> bool:
    """Whether the lists that these bugs meet pass without any."""
    for which in sorted({which for one in planted for which in lists_of(one)}):
        failed = campaign.baseline(which)
        if failed:
            print(f"without any bug the tests of {which} do not pass: {failed}")
            return False
        print(f"without any bug the tests of {which} pass", flush=True)
    return True


def main(arguments: Sequence[str] | None = None) -> int:
    """0 where every bug was caught."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", default=[], help="a bug's name; may be repeated")
    parser.add_argument("--jobs", type=int, default=max(1, len(os.sched_getaffinity(0)) // 2))
    parser.add_argument("--limit-s", type=float, default=LIMIT_S)
    parser.add_argument("--no-baseline", action="store_true")
    given = parser.parse_args(arguments)
    planted = [one for one in all_patches() if not given.only or one.name in given.only]
    unknown = set(given.only) - {one.name for one in planted}
    if unknown:
        print(f"no planted bug is called {', '.join(sorted(unknown))}")
        return 2
    with tempfile.TemporaryDirectory(prefix="planted-") as folder:
        campaign = Campaign(Path(folder).resolve() / "tree", given.limit_s)
        if not given.no_baseline and not passes(campaign, planted):
            return 1
        outcomes = []
        with ThreadPoolExecutor(given.jobs) as pool:
            for done in as_completed([pool.submit(campaign.plant, one) for one in planted]):
                outcomes.append(done.result())
                one = outcomes[-1]
                print(f"{one.name}: {one.said} ({one.seconds:.0f} s)", flush=True)
    caught = sum(one.caught for one in outcomes)
    print(f"\n{table_of(outcomes, planted)}\n\n{caught} of {len(outcomes)} caught")
    return 0 if caught == len(outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
