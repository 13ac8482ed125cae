"""Policies: named rules that propose a layout. One file, one test file and one line below for each.

Responsible for the registry, and for checking what goes in and what comes out. Called by the
driver that answers `ComputeTarget`, by the simulator, the benchmarks and the planner library.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from placement.layout import ExpertLayout
from placement.policy.base import Policy, PolicyError, PolicyInput
from placement.policy.eplb import propose_eplb
from placement.policy.feasibility import check_request
from placement.policy.incremental import propose_incremental
from placement.policy.static import propose_static

POLICIES: Final[Mapping[str, Policy]] = MappingProxyType(
    {
        "incremental": propose_incremental,
        "eplb": propose_eplb,
        "static": propose_static,
    }
)


def propose(name: str, request: PolicyInput) -> ExpertLayout:
    """Layout that the named policy proposes, valid for the request's topology, staging slots and
    reachable floor.

    It has the topology's shape; where the live layout is wider (a budget fell), compare sets of
    keys, not slots. Only `incremental` keeps to `max_moves` and `max_bytes`; the baselines plan
    anew.

    Raises PolicyError for an unknown name, a request that is not well-formed, and ranks that
    cannot hold every expert.
    """
    policy = POLICIES.get(name)
    if policy is None:
        raise PolicyError(f"policy {name!r} is not one of {', '.join(sorted(POLICIES))}")
    floor = check_request(request)
    layout = policy(request)
    problems = layout.problems(request.topology, floor=floor, staging_slots=request.staging_slots)
    assert not problems, f"policy {name} broke a rule: {'; '.join(problems[:3])}"
    return layout


__all__ = ["POLICIES", "Policy", "PolicyError", "PolicyInput", "propose"]
