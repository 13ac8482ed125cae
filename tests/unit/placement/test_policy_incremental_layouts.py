"""Layouts that the search proposed before its kernels were made faster: speed must not change them.

A change of the rule may: then read what changed, and write the new layouts down.
"""

import msgspec
import numpy as np
import pytest

from placement.layout import ExpertLayout
from placement.policy import propose
from placement.policy.kernels import warm as warm_search
from placement.policy.leveled.drops.kernels import warm as warm_drops
from placement.policy.leveled.kernels import warm as warm_leveling
from placement.topology import NUM_PHASES, DeviceProfile
from tests.builders import PROFILE, make_request, make_spec, make_topology


@pytest.fixture(scope="module", autouse=True)
def compiled():
    warm_leveling()
    warm_drops()
    warm_search()


def scenarios(spec, count):
    """Skewed demand that differs between scenarios, made of whole numbers alone."""
    s, layer, expert = np.ogrid[:count, : spec.num_layers, : spec.num_experts]
    found = np.zeros((count, NUM_PHASES, spec.num_layers, spec.num_experts))
    found[:, 0] = (29 * expert * expert + 13 * layer + 17 * s * (expert % 3)) % 97 + 1
    found[:, 0] *= 1 + 4 * ((expert + 2 * layer) % 7 == 0)
    found[:, 1] = (11 * expert + 5 * s + layer) % 23
    return found


def request(num_slots, num_layers, num_experts, count, speeds=(), nodes=1, **fields):
    spec = make_spec(num_layers=num_layers, num_experts=num_experts)
    topology = make_topology([num_slots] * 4, ranks_per_node=4 // nodes)
    profiles = tuple(
        DeviceProfile(
            name=f"speed{speed}",
            flops_per_s=PROFILE.flops_per_s / speed,
            memory_bytes_per_s=1e9,
            copy_bytes_per_s=1e8,
        )
        for speed in sorted(set(speeds))
    )
    if speeds:
        ranks = tuple(
            msgspec.structs.replace(rank, profile=f"speed{speed}")
            for rank, speed in zip(topology.ranks, speeds, strict=True)
        )
        topology = msgspec.structs.replace(topology, ranks=ranks, profiles=profiles)
    empty = ExpertLayout.empty(topology, num_layers=num_layers, num_experts=num_experts)
    start = propose("static", make_request(spec, topology, empty))
    demand = scenarios(spec, count)
    weights = np.arange(count, 0, -1) / np.arange(count + 1).sum()
    return msgspec.structs.replace(
        make_request(spec, topology, start, **fields), scenarios=demand, weights=weights
    )


REQUESTS = {
    "one layer, five scenarios": lambda: request(6, 1, 12, 5, balance_enough=1.0),
    "layers trade slots": lambda: request(8, 3, 8, 3, balance_enough=1.0),
    "uneven speeds": lambda: request(8, 2, 10, 4, speeds=(1, 2, 1, 3)),
    "floor of two domains, few writes": lambda: request(
        11, 2, 10, 6, nodes=2, floor=2, max_moves=4, balance_enough=1.0
    ),
    "uniform, near copies only": lambda: request(
        9, 2, 10, 2, nodes=2, uniform=True, max_cross_node_bytes=0
    ),
    "bytes have a price": lambda: request(9, 2, 10, 7, byte_price=2e-10),
}
EXPECTED = {
    "one layer, five scenarios": [
        [7, 1, 2, 3, 4, -1],
        [3, 4, 5, 0, 1, -1],
        [6, 7, 8, 2, 5, -1],
        [9, 10, 11, 6, 7, -1],
    ],
    "layers trade slots": [
        [7, 21, 8, 13, 16, 17, 2, -1],
        [7, 3, 13, 9, 18, 23, 0, -1],
        [4, 5, 12, 14, 20, 19, 1, -1],
        [6, 7, 11, 15, 22, 19, 10, -1],
    ],
    "uneven speeds": [
        [7, 8, 2, 18, 11, 3, 15, -1],
        [3, 4, 5, 12, 13, 0, 10, -1],
        [6, 7, 14, 15, 16, 1, 17, -1],
        [8, 9, 17, -1, 19, 5, 13, -1],
    ],
    "floor of two domains, few writes": [
        [15, 1, 8, 10, 17, 9, 14, 19, 18, 7, -1],
        [3, 4, 5, 12, 13, 0, 6, 2, 16, 11, -1],
        [11, 12, 14, 15, 16, 8, 9, 0, 4, 5, -1],
        [13, 3, 17, 18, 19, 6, 7, 1, 2, 10, -1],
    ],
    "uniform, near copies only": [
        [15, 1, 2, 10, 11, 3, 4, 12, -1],
        [3, 4, 5, 12, 13, 0, 15, 10, -1],
        [6, 7, 14, 15, 16, 2, 5, 11, -1],
        [8, 9, 17, 18, 19, 6, 7, 15, -1],
    ],
    "bytes have a price": [
        [0, 1, 2, 15, 11, 3, 4, 12, -1],
        [3, 4, 5, 15, 13, 7, 1, 10, -1],
        [6, 7, 14, 15, 16, 2, 5, -1, -1],
        [8, 9, 17, 18, 19, 6, 7, 15, -1],
    ],
}


@pytest.mark.parametrize("name", REQUESTS)
def test_the_search_proposes_what_it_did(name):
    asked = REQUESTS[name]()
    found = propose("incremental", asked)
    assert found.slots.tolist() == EXPECTED[name]
    assert not found.same_as(asked.layout)
