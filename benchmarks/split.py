"""The splitter: is it the optimum, how long does it take, what does pair choice save, and what do
memory-bound batches read?

    python -m benchmarks.split --json FILE

Recorded batches are used where the variable MOE_SERVE_DATA names their folder; made-up ones always.
Times are of one thread, best of three; "first" in the file is the first of the three. Responsible
for the tables and the file; exits 1 when a split is not the optimum. About five minutes, `--quick`
half a minute.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.environment import record, use_one_thread, write_json

if TYPE_CHECKING:
    from benchmarks.split_cases import Case

P50_US, P99_US = 60.0, 150.0
SAVED = {64: 0.015, 512: 0.025}
TOKEN_US = 0.25
READS = {16: 0.92, 64: 0.98}
PLANNED_TOKENS = 64
"""Batch size whose activations a layout for memory-bound batches is planned on."""
PAIR_BATCHES = 60
"""Batches a layer and size in the pair choice."""


def main(arguments: list[str] | None = None) -> int:
    """Run, print, and write the JSON file if asked."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.split", description=__doc__)
    parser.add_argument("--json", type=Path, help="write results to this file")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="one layer a case, fewer LPs")
    options = parser.parse_args(arguments)

    use_one_thread()  # before anything below imports numpy
    from benchmarks.split_cases import DATA_VARIABLE, cases, trace_folder

    environment = record("split", options.seed)
    _say(*environment.lines())
    if trace_folder() is None:
        _say(f"  {DATA_VARIABLE} names no folder with expert_traces: recorded cases are left out")
    found = cases(options.seed)
    if options.quick:
        found = [case.first_layers(1) for case in found]
    lp_batches = 4 if options.quick else 40
    wide = [case for case in found if (case.num_experts, case.num_ranks) == (256, 32)]
    results: dict[str, Any] = {
        "optimum": _optimum(found, options.seed, lp_batches),
        "latency": _latency(wide, options.seed, lp_batches),
        "pair_choice": _pair_choice(found, options.seed),
        "activated": _activated(wide, options.seed),
    }
    if options.json is not None:
        write_json(options.json, environment, results)
        _say(f"written: {options.json}")
    wrong = [fault for row in results["optimum"] for fault in row["wrong"]]
    _say(*wrong[:20])
    return 1 if wrong else 0


def _optimum(found: list[Case], seed: int, lp_batches: int) -> list[dict[str, Any]]:
    from benchmarks.split_cases import LAYOUTS, layers_of
    from benchmarks.split_parts import optimum

    _say(
        "", "Maximum = integer optimum: splits checked (tokens by flow, by LP too; experts by flow)"
    )
    _say(f"{'case':<24} {'layout':<12} {'by flow':>8} {'by LP':>6} {'experts':>8} {'wrong':>6}")
    rows = []
    for case in found:
        for layout in LAYOUTS:
            row = optimum(case, layers_of(case, layout, seed), seed, lp_batches)
            _say(
                f"{case.name:<24} {layout:<12} {row['proved']:>8} {row['by_lp']:>6} "
                f"{row['activated_proved']:>8} {len(row['wrong']):>6}"
            )
            rows.append({"case": case.name, "layout": layout, **row})
    return rows


def _latency(wide: list[Case], seed: int, lp_batches: int) -> list[dict[str, Any]]:
    from benchmarks.split_cases import LAYOUTS, layers_of
    from benchmarks.split_parts import latency
    from placement.split import kernels

    kernels.warm()
    _say("", f"Time of a split, 256 experts x 32 ranks, us (bars: p50 {P50_US:g}, p99 {P99_US:g})")
    _say(
        f"{'case':<12} {'layout':<12} {'tokens':>6} {'splits':>6} {'face p50':>9} {'p99':>6} "
        f"{'kernel p50':>11} {'p99':>6} {'HiGHS p50':>10} {'ratio':>6}"
    )
    rows = []
    for case in wide:
        for layout in LAYOUTS:
            for row in latency(case, layers_of(case, layout, seed), lp_batches):
                _say(
                    f"{case.name:<12} {layout:<12} {row['tokens']:>6} {row['batches']:>6} "
                    f"{row['face_best_p50_us']:>9.1f} {row['face_best_p99_us']:>6.1f} "
                    f"{row['kernel_best_p50_us']:>11.1f} {row['kernel_best_p99_us']:>6.1f} "
                    f"{row['highs_best_p50_us']:>10.0f} {row['highs_over_face']:>6.0f}"
                )
                rows.append({"case": case.name, "layout": layout, **row})
    return rows


def _pair_choice(found: list[Case], seed: int) -> list[dict[str, Any]]:
    from benchmarks.split_cases import LAYOUTS, layers_of
    from benchmarks.split_parts import pair_choice

    bars = ", ".join(f"{share:.1%} at {tokens}" for tokens, share in SAVED.items())
    _say("", f"Rows saved against quotas alone (bars: {bars} tokens; {TOKEN_US} us a token)")
    _say(
        "quotas: each met exactly; room: ranks may take more, below the same maximum, as routers do"
    )
    _say(f"{'case':<24} {'layout':<12} {'tokens':>6} {'quotas':>8} {'us':>6} {'room':>8} {'us':>6}")
    rows = []
    for case in found:
        for layout in LAYOUTS:
            layers = layers_of(case, layout, seed)
            for tokens in SAVED:
                row = pair_choice(case, layers, tokens, PAIR_BATCHES)
                _say(
                    f"{case.name:<24} {layout:<12} {tokens:>6} "
                    f"{row['saved_exact']:>8.2%} {row['exact_us_a_token']:>6.3f} "
                    f"{row['saved_roomy']:>8.2%} {row['roomy_us_a_token']:>6.3f}"
                )
                rows.append({"case": case.name, "layout": layout, **row})
    return rows


def _activated(wide: list[Case], seed: int) -> list[dict[str, Any]]:
    from benchmarks.split_cases import POLICIES, layers_of
    from benchmarks.split_parts import activated

    bars = ", ".join(f"{share:.2f} at {tokens}" for tokens, share in READS.items())
    _say("", f"Experts read by the worst rank over a layout without replicas (bars: {bars} tokens)")
    _say(
        f"{'case':<12} {'layout':<12} {'planned on':<12} {'tokens':>6} {'without':>8} {'ours':>6} "
        f"{'even':>6} {'ours':>6} {'even':>6}"
    )
    rows = []
    for case in wide:
        for layout in POLICIES:
            for planned in ("pairs", "activations"):
                demand = case.past_activations(PLANNED_TOKENS) if planned != "pairs" else None
                layers = layers_of(case, layout, seed, demand)
                for tokens in READS:
                    row = activated(case, layers, tokens)
                    _say(
                        f"{case.name:<12} {layout:<12} {planned:<12} {tokens:>6} "
                        f"{row['experts_without_replicas']:>8.2f} {row['experts_ours']:>6.2f} "
                        f"{row['experts_even']:>6.2f} {row['ours_over_without']:>6.3f} "
                        f"{row['even_over_without']:>6.3f}"
                    )
                    rows.append({"case": case.name, "layout": layout, "planned_on": planned, **row})
    return rows


def _say(*lines: str) -> None:
    for line in lines:
        sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
