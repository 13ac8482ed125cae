"""The controller dies and comes back: journal, new term, inventories.

Responsible for doing to the engine what a restarted controller does, and for the moments at which
it may die. Called by tests.
"""

from __future__ import annotations

from functools import partial

from placement.engine import RebalanceEngine
from placement.messages import events as ev
from placement.routing import RankAddress
from placement.sim.log import Stepped
from placement.sim.parts import SimRouter
from placement.sim.world import World


def restart_controller(world: World) -> None:
    """Replace the engine by one restored from the last snapshot and the transitions journalled
    since.

    Commands that are on their way belong to the old term: shards that have seen the new one refuse
    them.
    """
    state = world.engine.state
    transitions = [
        transition
        for entry in world.log[world.segments[-1][1] :]
        if isinstance(entry, Stepped)
        for transition in entry.effects.transitions
    ]
    world.engine = RebalanceEngine.restore(
        world.segments[-1][0],
        transitions,
        term=state.term + 1,
        first_epoch=1 + max([state.epoch, *(r.applied for r in world.routers)]),
        start_s=world.clock.now_s,
    )
    world.segments.append((world.engine.snapshot(), len(world.log)))
    for router in world.routers:
        world.clock.after(float(world.rng.uniform(0.0, 0.3)), partial(_router_again, world, router))
    for rank in sorted(world.shards):
        world.clock.after(float(world.rng.uniform(0.0, 0.5)), partial(_rank_again, world, rank))


def _router_again(world: World, router: SimRouter) -> None:
    world.forget_told(router)
    world.feed(ev.RouterJoined(at_s=0.0, router=router.name, incarnation=1))


def _rank_again(world: World, rank: int) -> None:
    shard, spec = world.shards[rank], world.topology.ranks[rank]
    incarnation = shard.slots.incarnation
    if not shard.alive:
        world.feed(ev.RankLost(at_s=0.0, rank=rank, incarnation=incarnation, reason="found dead"))
        return
    shard.slots.accept_term(world.engine.state.term)
    world.feed(
        ev.RankJoined(
            at_s=0.0,
            rank=rank,
            node=spec.node,
            failure_domain=spec.failure_domain,
            profile=spec.profile,
            num_slots=shard.slots.ledger.num_slots,
            address=RankAddress(
                rank=rank,
                node=spec.node,
                address=f"sim://{rank}/{incarnation}",
                incarnation=incarnation,
            ),
            resident=shard.slots.ledger.resident(),
        )
    )
