"""The default policy: from the live layout, few slot writes, each for what it gains under the
split the router runs.

Responsible for repairs first (`repair`), then a search (`incremental_search`), then the checks that
what is proposed is better than what is there. Must never write a slot that brings nothing: same
load, same layout gives zero moves. Called through `propose`.

Objective: sum over layers of the predicted seconds a second of the slowest rank, weighted over
scenarios, plus `byte_price` x resident bytes. Seconds are pairs / speed of the rank, or, in phases
whose batches are memory-bound, the experts a rank reads (`cost.pair_equivalents`).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from placement.cost import pair_equivalents, seconds_per_pair
from placement.layout import ExpertLayout
from placement.policy.base import PolicyInput
from placement.policy.feasibility import check_request
from placement.policy.incremental_judge import LeveledJudge
from placement.policy.incremental_search import Search
from placement.policy.leveled import Leveled
from placement.policy.occupancy import Occupancy
from placement.policy.repair import repair
from placement.topology import Phase

FloatArray = npt.NDArray[np.float64]


def propose_incremental(request: PolicyInput) -> ExpertLayout:
    """The live layout, repaired and changed as far as that pays and the limits allow; unchanged
    where nothing pays.

    In a uniform layout slots that no write pays for are filled all the same, heaviest experts
    first: the form wants them full.

    Raises PolicyError where the ranks cannot hold every expert.
    """
    floor = check_request(request)
    demand = priced_demand(request)
    known = bool(demand.any())
    if not known:
        demand = np.ones_like(demand)
    occupancy, leveled = _repaired(request, floor, demand)
    if known:
        search = Search(request, occupancy, leveled)
        search.run()
        search.take_back()
    if request.uniform:
        _fill(occupancy, np.tensordot(request.weights, demand, axes=1))
    return occupancy.to_layout()


def priced_demand(request: PolicyInput) -> FloatArray:
    """Demand of each scenario over both phases, in pairs a second or what costs as much: float64
    [scenarios, layers, experts].

    Where devices differ, a phase is priced with the profile of the first usable rank.
    """
    topology = request.topology
    usable = [r for r in range(topology.num_ranks) if topology.usable(r)]
    if not any(request.batch_tokens) or not usable:
        total: FloatArray = request.scenarios.sum(axis=1)
        return total
    profile = topology.profile_of(usable[0])
    priced = np.zeros_like(request.scenarios[:, 0])
    for phase in Phase:
        priced += pair_equivalents(
            request.scenarios[:, phase], request.batch_tokens[phase], request.spec, profile
        )
    return priced


def objective_s(request: PolicyInput, layout: ExpertLayout) -> float:
    """What the policy lowers: seconds a second of the slowest rank, summed over layers, plus the
    price of residents.
    """
    seen = PolicyInput(
        spec=request.spec,
        topology=request.topology,
        layout=layout,
        scenarios=request.scenarios,
        weights=request.weights,
        staging_slots=request.staging_slots,
        batch_tokens=request.batch_tokens,
    )
    occupancy = Occupancy(seen, 1)
    leveled = Leveled(
        occupancy,
        priced_demand(seen),
        request.weights,
        seconds_per_pair(request.spec, request.topology),
    )
    price = request.byte_price * request.spec.slot_bytes
    return float(leveled.slowest_s.sum()) + price * int(occupancy.filled.sum())


def _repaired(request: PolicyInput, floor: int, demand: FloatArray) -> tuple[Occupancy, Leveled]:
    mean = np.tensordot(request.weights, demand, axes=1)
    order = [int(key) for key in np.argsort(-mean.reshape(-1), kind="stable")]
    occupancy = Occupancy(request, floor)
    leveled = Leveled(
        occupancy, demand, request.weights, seconds_per_pair(request.spec, request.topology)
    )
    judge = LeveledJudge(occupancy, leveled, mean)
    repair(occupancy, judge, order)
    judge.finish()
    return occupancy, leveled


def _fill(occupancy: Occupancy, mean: FloatArray) -> None:
    """Fill what is empty: on each rank the expert it lacks with most pairs a replica, ties by
    lowest id.
    """
    for layer in range(occupancy.num_layers):
        hosted = occupancy.hosts_of_layer(layer)
        for rank in np.nonzero(occupancy.free_of(layer) > 0)[0]:
            for _ in range(int(occupancy.free_of(layer)[rank])):
                each = np.where(hosted[:, rank], -1.0, mean[layer] / hosted.sum(axis=1))
                occupancy.add(layer * occupancy.num_experts + int(np.argmax(each)), int(rank))
