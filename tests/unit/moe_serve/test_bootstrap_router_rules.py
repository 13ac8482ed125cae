"""Routers take the regime of a batch from the cost model of the declared devices."""

from __future__ import annotations

import pytest

from moe_serve.bootstrap.parts import PartsPlan, moe_spec
from moe_serve.config import ServiceConfig
from placement.cost import crossover_pairs


def plan_of(*flops_per_s: float) -> PartsPlan:
    """A fleet of one rank for each figure; every device reads 2 GB a second."""
    config = ServiceConfig.model_validate(
        {
            "service": "s",
            "model": {"name": "m", "checkpoint": "package:tiny_moe"},
            "fleet": {
                "ranks": [{"slots": 200, "profile": f"p{i}"} for i, _ in enumerate(flops_per_s)]
            },
            "profiles": [
                {
                    "name": f"p{i}",
                    "flops_per_s": figure,
                    "memory_bytes_per_s": 2e9,
                    "copy_bytes_per_s": 1e8,
                }
                for i, figure in enumerate(flops_per_s)
            ],
        }
    )
    spec, layers = moe_spec(config)
    return PartsPlan(
        config=config, spec=spec, checkpoint_layers=layers, state_dir="", wire_keys=None
    )


def memory_bound_pairs(plan: PartsPlan) -> float:
    settings = plan.router_settings("router-0", 1, node="n", host="127.0.0.1", port=0)
    return settings.rules.memory_bound_pairs


def test_the_crossover_of_the_declared_device_is_the_routers_bound() -> None:
    plan = plan_of(1e10)
    assert memory_bound_pairs(plan) == pytest.approx(crossover_pairs(plan.spec, plan.profile("p0")))
    # 98,304 bytes at 2 GB/s take as long as ten pairs of 49,152 FLOP at 10 GFLOP/s.
    assert memory_bound_pairs(plan) == pytest.approx(10.0)


def test_over_different_devices_a_batch_must_be_memory_bound_on_all() -> None:
    assert memory_bound_pairs(plan_of(1e10, 4e9, 8e9)) == pytest.approx(4.0)
