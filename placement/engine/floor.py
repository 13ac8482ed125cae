"""The floor: in how many failure domains every expert is to lie, and who lies below.

Responsible for what the floor is while memory is short, and for saying so. Plans nothing. Called by
supervise, needs and admin.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from placement.engine.shown import fill_max
from placement.engine.state import NEVER_S
from placement.engine.turn import Turn
from placement.layout import ExpertLayout
from placement.planner import reachable_floor
from placement.policy.base import PolicyInput
from placement.policy.feasibility import reachable_uniform
from placement.topology import Topology

NAMED_MAX = 8
"""Experts below the floor that a record names."""


def below_floor(turn: Turn) -> bool:
    """Whether an expert has fewer failure domains than the floor that memory allows."""
    floor, spread = _found(turn)
    return bool((spread < max(1, floor)).any())


def floor_now(turn: Turn) -> int:
    """Failure domains, at most the configured floor, that every expert can have now; 0 = the ranks
    cannot hold every expert."""
    return _found(turn)[0]


def reachable(turn: Turn, topology: Topology) -> int:
    """Failure domains, at most the configured floor, that every expert can have on these ranks; 0 =
    they cannot hold every expert."""
    spec, config = turn.spec, turn.config
    if not config.uniform:
        return reachable_floor(
            topology,
            num_keys=spec.num_keys,
            floor=config.floor,
            staging_slots=config.staging_slots,
        )
    return reachable_uniform(
        PolicyInput(
            spec=spec,
            topology=topology,
            layout=turn.layout(),
            scenarios=np.zeros((0, 0, 0, 0)),
            weights=np.zeros(0),
            floor=config.floor,
            staging_slots=config.staging_slots,
            uniform=True,
        )
    )


def _found(turn: Turn) -> tuple[int, npt.NDArray[np.int64]]:
    """(reachable floor, failure domains of each key), looked up after every event and found anew
    when something changed."""
    key = (turn.state.revision, fill_max(turn.state))
    known = turn.cache.floor
    if known is None or known[0] != key:
        topology = turn.topology()
        known = (key, reachable(turn, topology), domain_spread(turn.layout(), topology))
        turn.cache.floor = known
    return known[1], known[2]


def domain_spread(layout: ExpertLayout, topology: Topology) -> npt.NDArray[np.int64]:
    """Failure domains each key has a replica in: int64 [num_keys]."""
    domains = sorted({r.failure_domain for r in topology.ranks if r.alive})
    member = np.zeros((topology.num_ranks, len(domains)), dtype=np.int64)
    for spec in topology.ranks:
        if spec.alive:
            member[spec.rank, domains.index(spec.failure_domain)] = 1
    spread: npt.NDArray[np.int64] = (((layout.hosts > 0).astype(np.int64) @ member) > 0).sum(axis=1)
    return spread


def must_not_wait(turn: Turn) -> bool:
    """Whether experts lie below the floor and a repair may be tried now: nothing else comes
    first."""
    if turn.at_s < turn.state.retry_at_s.get("repair", -NEVER_S):
        return False
    return turn.state.published and below_floor(turn)


def tell_floor(turn: Turn) -> None:
    """Record which experts lie below the configured floor because memory allows no more: once, and
    again when it gets worse. To be asked when nothing is left to be done."""
    wanted = turn.config.floor
    reachable, spread = _found(turn)
    low = np.flatnonzero(spread < wanted)
    told, told_low = turn.state.floor_told
    turn.state.floor_told = (reachable, len(low))
    if reachable >= wanted:
        if 0 <= told < wanted:
            turn.record("floor", "done", f"every expert lies in {wanted} failure domains")
        return
    if reachable == told and len(low) <= told_low:
        return
    named = [divmod(key, turn.spec.num_experts) for key in low[:NAMED_MAX].tolist()]
    words = ", ".join(f"layer {layer} expert {expert}" for layer, expert in named)
    turn.record(
        "floor",
        "noted",
        f"slots and ranks allow {reachable} of {wanted} failure domains for every expert; "
        f"{len(low)} lie in fewer than {wanted}"
        + (f": {words}" if named else "")
        + (" ..." if len(low) > len(named) else ""),
        numbers={
            "floor": float(wanted),
            "floor_reachable": float(reachable),
            "experts_below": float(len(low)),
        },
    )
