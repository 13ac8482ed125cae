"""The data path in ratios of one run: wire to Ray calls, stream to unary, bytes, overhead.

    python -m benchmarks.dataplane --json FILE

Responsible for the order of the parts, the table and the file. A missed bar is printed and written,
and the program still exits 0; it raises where an output is wrong. About three minutes.
"""

from __future__ import annotations

import argparse
import os
import sys
from concurrent.futures import Executor, ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.environment import record, use_one_thread, write_json

if TYPE_CHECKING:
    from benchmarks.dataplane_client import PathTimes
    from benchmarks.dataplane_fleet import Fleet
    from benchmarks.dataplane_model import TokenBatch
    from benchmarks.dataplane_report import Report

TOP_K = 4

BLOCKS = 16
"""Blocks of each way at a size; even, so that each way comes first equally often."""
FAN_OUT_CALLS = {1: 10, 8: 10, 64: 8, 512: 3}
"""Tokens of a call -> calls of a block."""
ECHO_CALLS = {1: 30, 8: 30, 64: 15, 512: 3}
FULL_CALLS = {1: 15, 8: 6, 64: 3, 512: 1}
BYTES_SHAPES = ((512, 4), (512, 8))
"""(tokens, experts a token): enough tokens that chance moves the rows by less than a percent."""


def main(arguments: list[str] | None = None) -> int:
    """Run, print, and write the JSON file if asked."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.dataplane", description=__doc__)
    parser.add_argument("--json", type=Path, help="write results to this file")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args(arguments)

    use_one_thread()  # before anything below imports numpy
    from benchmarks.dataplane_ray import local_ray

    environment = record("dataplane", options.seed)
    _say(*environment.lines())
    with local_ray() as folder:
        from benchmarks.dataplane_fleet import actor_environment
        from benchmarks.dataplane_report import Report

        os.environ.update(actor_environment())  # read by the processes started from here on
        report = Report()
        # A front end is a process of its own, without Ray; a new one for each job, because gRPC's
        # late events find the loop of an earlier one closed.
        pool = ProcessPoolExecutor(1, mp_context=get_context("spawn"), max_tasks_per_child=1)
        with pool as front_end:
            _echo_part(folder, options.seed, front_end, report)
            _full_part(folder, options.seed, front_end, report)
    _say(*report.verdicts())
    ended = os.getloadavg()
    _say(f"  load at the end {', '.join(f'{load:.1f}' for load in ended)}")
    if options.json is not None:
        write_json(options.json, environment, {"load_average_at_end": ended, **report.document()})
        _say(f"written: {options.json}")
    return 0


def _echo_part(folder: Path, seed: int, front_end: Executor, report: Report) -> None:
    """Parts a, b and c, with identity experts that take no time."""
    import ray

    from benchmarks.dataplane_client import ALL_PATHS
    from benchmarks.dataplane_fleet import NUM_SHARDS, running_fleet
    from benchmarks.dataplane_model import ECHO, token_batch, write_checkpoint

    checkpoint = write_checkpoint(folder / "echo", ECHO, seed)
    with running_fleet(checkpoint, folder / "manifests", ECHO) as fleet:
        for tokens, calls in FAN_OUT_CALLS.items():
            batch = token_batch(ECHO, tokens, TOP_K, seed)
            times = ray.get(fleet.fan_out.measure.remote(batch, BLOCKS, calls))
            report.add_fan_out(batch, times)
        _say(*report.fan_out_lines())
        for tokens, calls in ECHO_CALLS.items():
            batch = token_batch(ECHO, tokens, TOP_K, seed)
            times, _ = _paths(fleet, front_end, batch, ALL_PATHS, calls)
            report.add_stream(batch, times)
        _say(*report.stream_lines())
        for tokens, top_k in BYTES_SHAPES:
            batch = token_batch(ECHO, tokens, top_k, seed)
            counted = ray.get(fleet.fan_out.count_bytes.remote(batch))
            report.add_bytes(batch, NUM_SHARDS, counted)
        _say(*report.bytes_lines())


def _full_part(folder: Path, seed: int, front_end: Executor, report: Report) -> None:
    """Part d: the whole path with experts of a real size."""
    from benchmarks.dataplane_client import LOCAL, STREAM
    from benchmarks.dataplane_fleet import running_fleet
    from benchmarks.dataplane_model import FULL, token_batch, write_checkpoint

    checkpoint = write_checkpoint(folder / "full", FULL, seed)
    with running_fleet(checkpoint, folder / "manifests", FULL) as fleet:
        for tokens, calls in FULL_CALLS.items():
            batch = token_batch(FULL, tokens, TOP_K, seed)
            times, compute_s = _paths(fleet, front_end, batch, (LOCAL, STREAM), calls)
            report.add_overhead(batch, times, compute_s)
        _say(*report.overhead_lines())


def _paths(
    fleet: Fleet, front_end: Executor, batch: TokenBatch, paths: tuple[str, ...], calls: int
) -> tuple[PathTimes, float]:
    """Times of a batch's paths, and seconds that all shards computed for one request."""
    from benchmarks.dataplane_client import PathsJob, measure_paths

    before_s = fleet.compute_s()
    job = PathsJob(
        fleet.router,
        fleet.checkpoint,
        fleet.manifests,
        fleet.size,
        batch,
        paths,
        BLOCKS,
        calls,
    )
    times = front_end.submit(measure_paths, job).result()
    return times, (fleet.compute_s() - before_s) / times.requests


def _say(*lines: str) -> None:
    for line in lines:
        sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
