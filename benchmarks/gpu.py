"""The torch backend on a CUDA device: numerics, ways to compute, copies while computing.

    python -m benchmarks.gpu [--json FILE]

One script, at most 8 minutes, no network and no Ray. Without a CUDA device it says so and exits 0;
it exits 1 when a result is wrong. `--device cpu` rehearses it with small sizes; its figures mean
nothing then.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.environment import record, write_json
from benchmarks.gpu_parts import Size, copies, numerics, ways

LIMIT_S = 480.0
"""The whole run; what would begin after most of it is left out, and said."""

NUMERICS = {"cuda": Size(64, 1024, 512, 16, 4), "cpu": Size(9, 64, 32, 8, 2)}
WAYS = {
    "cuda": (
        Size(1, 2048, 768, 128, 8),
        Size(16, 2048, 768, 128, 8),
        Size(128, 2048, 768, 128, 8),
        Size(1024, 2048, 768, 128, 8),
        Size(4096, 2048, 768, 128, 8),
        Size(64, 7168, 2048, 16, 8),
        Size(1024, 7168, 2048, 16, 8),
    ),
    "cpu": (Size(1, 64, 32, 8, 2), Size(16, 64, 32, 8, 2)),
}
COPIES = {
    "cuda": (Size(16, 2048, 768, 128, 8), Size(1024, 2048, 768, 128, 8)),
    "cpu": (Size(16, 64, 32, 8, 2),),
}
BUDGET_S = {"cuda": 8.0, "cpu": 0.3}


def main(arguments: list[str] | None = None) -> int:
    """Run all parts, print, and write the JSON file if asked."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu", description=__doc__)
    parser.add_argument("--json", type=Path, help="write results to this file")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args(arguments)
    device: str = options.device
    if device == "cuda" and not torch.cuda.is_available():
        _say("no CUDA device: skipped")
        return 0
    end_s = time.monotonic() + LIMIT_S
    environment = record("gpu", options.seed)
    described = torch.cuda.get_device_name() if device == "cuda" else "cpu (a rehearsal)"
    _say(*environment.lines(), f"  device: {described}, CUDA {torch.version.cuda}")

    checked = _numerics(device, options.seed)
    timed = _ways(device, options.seed, end_s)
    copied = _copies(device, options.seed, end_s)
    if options.json is not None:
        document = {"device": described, "numerics": checked, "ways": timed, "copies": copied}
        write_json(options.json, environment, document)
        _say(f"written: {options.json}")
    wrong = [result for result in checked if result.get("passed") is False]
    _say(f"numerics: {len(wrong)} wrong of {len(checked)}")
    return 1 if wrong else 0


def _numerics(device: str, seed: int) -> list[dict[str, Any]]:
    _say("numerics against float64 (relative to the largest value)")
    results = []
    for dtype in ("bfloat16", "float16", "float32"):
        for result in numerics(NUMERICS[device], device, dtype, seed):
            results.append(result)
            if "not_possible" in result:
                _say(f"  {dtype:<9} {result['path']:<8} - {result['not_possible']}")
                continue
            failed = [name for name, value in result.items() if value is False and name != "passed"]
            verdict = "ok" if result["passed"] else f"WRONG: {', '.join(failed)}"
            _say(f"  {dtype:<9} {result['path']:<8} error {result['error']:.1e}  {verdict}")
    return results


def _ways(device: str, seed: int, end_s: float) -> list[dict[str, Any]]:
    _say(
        "a step through each path, bfloat16, rows up and sums down included",
        f"  {'T,H,F,E,K':>20} {'path':<11} {'median ms':>10} {'x plain loop':>13} "
        f"{'quartiles':>13} {'TFLOP/s':>8} {'weights GB/s':>13}",
    )
    results = []
    for size in WAYS[device]:
        if _late(end_s, f"size {size.label}"):
            break
        for result in ways(size, device, "bfloat16", seed, BUDGET_S[device]):
            results.append(result)
            if "not_possible" in result:
                _say(f"  {size.label:>20} {result['path']:<11} - {result['not_possible']}")
                continue
            quartiles = f"{result['speedup_low']:.2f}..{result['speedup_high']:.2f}"
            _say(
                f"  {size.label:>20} {result['path']:<11} {result['median_s'] * 1e3:>10.3f} "
                f"{result['speedup']:>12.2f}x {quartiles:>13} {result['tflop_per_s']:>8.2f} "
                f"{result['weight_bytes_per_s'] / 1e9:>13.1f}"
            )
        _release(device)
    return results


def _copies(device: str, seed: int, end_s: float) -> list[dict[str, Any]]:
    _say(
        "a step while another thread copies weights, over a step without",
        f"  {'T,H,F,E,K':>20} {'copy':<17} {'slow-down':>10} {'quartiles':>13} {'copied GB/s':>12}",
    )
    results = []
    for size in COPIES[device]:
        if _late(end_s, f"copies at {size.label}"):
            break
        for result in copies(size, device, "bfloat16", seed, 3 * BUDGET_S[device]):
            results.append(result)
            quartiles = f"{result['slowdown_low']:.2f}..{result['slowdown_high']:.2f}"
            _say(
                f"  {size.label:>20} {result['copy']:<17} {result['slowdown']:>9.2f}x "
                f"{quartiles:>13} {result['copy_bytes_per_s'] / 1e9:>12.2f}"
            )
        _release(device)
    return results


def _late(end_s: float, what: str) -> bool:
    """Whether too little time is left to begin something, which is then said."""
    left_s = end_s - time.monotonic()
    if left_s < 60.0:
        _say(f"  left out for lack of time: {what} and what follows")
        return True
    return False


def _release(device: str) -> None:
    if device == "cuda":
        torch.cuda.empty_cache()


def _say(*lines: str) -> None:
    for line in lines:
        sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
