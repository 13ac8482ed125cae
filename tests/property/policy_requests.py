"""Requests that policies are asked with: fleets of any shape, live layouts of any content, loads of
any size.

Responsible for the strategies that property tests of policies share.
"""

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st

from placement.layout import EMPTY, ExpertLayout
from placement.policy import POLICIES, PolicyError, PolicyInput
from placement.policy.feasibility import check_request
from placement.topology import NUM_PHASES, DeviceProfile, RankSpec, Topology
from tests.builders import make_spec

SPEEDS = (1e9, 5e8, 3e8)
EXAMPLES = settings(max_examples=150, derandomize=True, database=None, deadline=None)
MODES = tuple((name, uniform) for name in sorted(POLICIES) for uniform in (False, True))
"""Every policy, in slots that a rank shares over its layers (False) and in a uniform layout."""
MODE_NAMES = tuple(f"{name}-{'uniform' if uniform else 'pooled'}" for name, uniform in MODES)


@st.composite
def topologies(draw, num_ranks, slots_most):
    """Uneven ranks in slots and speed, on up to three nodes; some lost, some draining."""
    ranks = []
    least = draw(st.integers(0, slots_most))
    for rank in range(num_ranks):
        node = draw(st.integers(0, 2))
        ranks.append(
            RankSpec(
                rank=rank,
                node=f"node{node}",
                failure_domain=f"domain{node}",
                num_slots=draw(st.integers(least, slots_most)),
                profile=f"speed{draw(st.integers(0, 2))}",
                alive=draw(st.integers(0, 9)) > 0,
                draining=draw(st.integers(0, 9)) == 0,
            )
        )
    profiles = tuple(
        DeviceProfile(
            name=f"speed{i}", flops_per_s=speed, memory_bytes_per_s=1e9, copy_bytes_per_s=1e8
        )
        for i, speed in enumerate(SPEEDS)
    )
    return Topology(ranks=tuple(ranks), profiles=profiles)


@st.composite
def requests(draw, **fields):
    """A request that may be infeasible, with a live layout that may be anything but a duplicate."""
    spec = make_spec(num_layers=draw(st.integers(1, 3)), num_experts=draw(st.integers(1, 9)))
    num_ranks = draw(st.integers(1, 7))
    topology = draw(topologies(num_ranks, 2 * -(-spec.num_keys // num_ranks) + 4))
    rng = np.random.default_rng(draw(st.integers(0, 1 << 20)))
    width = topology.max_slots + draw(st.integers(0, 3))
    rows = np.full((topology.num_ranks, width), EMPTY, dtype=np.int32)
    for row in rows:
        kept = rng.permutation(spec.num_keys)[: rng.integers(0, width + 1)]
        row[rng.permutation(width)[: len(kept)]] = kept
    num_scenarios = draw(st.integers(1, 3))
    shape = (num_scenarios, NUM_PHASES, spec.num_layers, spec.num_experts)
    scenarios = rng.gamma(0.4, 100.0, shape) * rng.integers(0, 2, (1, 1, spec.num_layers, 1))
    if draw(st.booleans()):
        scenarios = np.floor(scenarios / 40.0)  # many equal and many zero
    weights = rng.random(num_scenarios) + 0.1
    return PolicyInput(
        spec=spec,
        topology=topology,
        layout=ExpertLayout(rows, spec.num_layers, spec.num_experts),
        scenarios=scenarios,
        weights=weights / weights.sum(),
        floor=draw(st.integers(1, 3)),
        staging_slots=draw(st.integers(0, 2)),
        **fields,
    )


def feasible(request):
    try:
        check_request(request)
    except PolicyError:
        return False
    return True
