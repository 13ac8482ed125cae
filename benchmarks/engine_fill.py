"""CPU of a first fill: 58 layers x 256 experts, 288 slots a layer on 32 ranks, from nothing to the
first table.

    python -m benchmarks.engine_fill

Responsible for one figure: CPU seconds inside the engine's `step` while every slot is filled, and
beside it those of policy and planner. The ranks are simulated and answer at once, so no time of
copies is in it. Must never assert an absolute time.
"""

from __future__ import annotations

import argparse
import json

from benchmarks.engine_scale import ScaleFleet, scale_spec, scale_topology
from benchmarks.environment import record
from placement.config import RebalanceConfig


def main() -> None:
    """Fill once and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=58)
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--ranks", type=int, default=32)
    parser.add_argument("--layer-slots", type=int, default=288)
    given = parser.parse_args()
    environment = record("engine_fill", seed=0)
    config = RebalanceConfig()
    spec = scale_spec(given.layers, given.experts)
    topology = scale_topology(
        spec,
        num_ranks=given.ranks,
        layer_slots=given.layer_slots,
        staging_slots=config.staging_slots,
    )
    fleet = ScaleFleet(spec, topology, config)
    fleet.join_all()
    figures = {
        "simulated": True,
        "slot_writes": fleet.slot_writes,
        "events": fleet.steps,
        "tables": fleet.engine.state.epoch,
        "engine_cpu_s": round(fleet.engine_cpu_s, 3),
        "engine_us_an_event": round(1e6 * fleet.engine_cpu_s / fleet.steps, 1),
        "policy_and_planner_cpu_s": round(fleet.target_cpu_s, 3),
    }
    print(json.dumps({"environment": environment.as_dict(), "figures": figures}, indent=1))


if __name__ == "__main__":
    main()
