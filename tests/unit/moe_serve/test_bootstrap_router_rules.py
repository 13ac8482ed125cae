"""Routers take the regime of a batch from the cost model of the declared devices."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moe_serve.bootstrap.parts import PartsPlan, moe_spec
from moe_serve.config import ServiceConfig
from placement.cost import crossover_pairs
from placement.roles.router_records import RouterRules


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


def rules_of(plan: PartsPlan) -> RouterRules:
    return plan.router_settings("router-0", 1, node="n", host="127.0.0.1", port=0).rules


def memory_bound_pairs(plan: PartsPlan) -> float:
    return rules_of(plan).memory_bound_pairs


def test_the_crossover_of_the_declared_device_is_the_routers_bound() -> None:
    plan = plan_of(1e10)
    assert memory_bound_pairs(plan) == pytest.approx(crossover_pairs(plan.spec, plan.profile("p0")))
    # 98,304 bytes at 2 GB/s take as long as ten pairs of 49,152 FLOP at 10 GFLOP/s.
    assert memory_bound_pairs(plan) == pytest.approx(10.0)


def test_over_different_devices_a_batch_must_be_memory_bound_on_all() -> None:
    assert memory_bound_pairs(plan_of(1e10, 4e9, 8e9)) == pytest.approx(4.0)


def test_routers_hedge_retry_and_eject_within_the_limits_of_the_service_file() -> None:
    rules, usual = rules_of(plan_of(1e10)), RouterRules()
    shares = ("retry_share", "hedge_share", "eject_share")
    assert [getattr(rules, name) for name in shares] == [0.2, 0.05, 0.1]
    assert [getattr(usual, name) for name in shares] == [0.2, 0.05, 0.1]
    plan = plan_of(1e10)
    limits = plan.config.limits.model_copy(update=dict.fromkeys(shares, 0.5))
    changed = replace(plan, config=plan.config.model_copy(update={"limits": limits}))
    assert [getattr(rules_of(changed), name) for name in shares] == [0.5, 0.5, 0.5]


def test_a_device_declared_slower_may_take_longer() -> None:
    # Reading takes 49 us of each; computing a pair 5 us, and 98 us where it is 20 times slower.
    assert rules_of(plan_of(1e10, 5e8)).rank_slowness == pytest.approx((1.0, 2.0), rel=0.01)
    assert rules_of(plan_of(1e10, 1e10)).rank_slowness == (1.0, 1.0)
