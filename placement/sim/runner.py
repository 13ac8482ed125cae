"""One seeded run: a service, its faults, its healing, and every promise checked over its facts.

Responsible for what a run consists of, for the bound on healing, and for the one line that replays
it. Called by tests and by whoever runs many seeds.

Phases. *Safety*: faults strike for as long as the seed's list lasts; every promise must hold.
*Healing*: everything is mended, and within HEAL_S the service must be at rest (no plan, all ranks
there, controller, shards and routers of one mind) and in balance: at most BALANCE_SLACK below what
the default policy reaches from nothing. *Rest*: callers stop, what is open ends.
"""

from __future__ import annotations

import msgspec
import numpy as np

from placement.layout import ExpertLayout
from placement.policy import propose
from placement.policy.base import PolicyInput
from placement.sim.checks import (
    Checker,
    Coverage,
    ExactlyOnce,
    Fence,
    InvariantBroken,
    Isolation,
    JournalFirst,
    LoadOnce,
    Memory,
    Progress,
    ReleaseLast,
    TableOrder,
    Termination,
    check_facts,
    check_replay,
)
from placement.sim.coverage import Coverage as Met
from placement.sim.world import World
from placement.topology import NUM_PHASES

SAFETY_MAX_S = 30.0
HEAL_S = 60.0
"""Simulated seconds from the last fault's end to balance, at most."""
BALANCE_SLACK = 0.1
LOOK_S = 0.5
REST_S = 3.0


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one seed. events: messages and timers of the world; healed_s: simulated seconds
    from the end of faults to rest and balance."""

    seed: int
    events: int
    facts: int
    engine_events: int
    terms: int
    epochs: int
    moves: dict[str, int]
    requests: dict[str, int]
    contributions: int
    healed_s: float
    balancedness: float
    reachable: float
    met: Met


def replay_command(seed: int) -> str:
    """What replays a seed."""
    return f"make sim SEEDS=1 FIRST_SEED={seed}"


def run(seed: int, *, elastic: bool = False) -> Outcome:
    """Live through a seed and check everything. elastic: ranks are also removed, added again and
    replaced (`PeopleHarm`). Whatever goes wrong, an InvariantBroken of the
    checkers, an assertion of production code or any other error, is raised as InvariantBroken that
    names the seed and the command that replays it."""
    try:
        return _run(seed, elastic)
    except Exception as broken:
        said = str(broken) if isinstance(broken, InvariantBroken) else repr(broken)
        raise InvariantBroken(f"{said} [seed {seed}; replay: {replay_command(seed)}]") from broken


def _run(seed: int, elastic: bool) -> Outcome:
    world = World(seed, elastic=elastic)
    clock = world.stage.clock
    while clock.now_s < SAFETY_MAX_S and not world.nemesis.done:
        clock.run_until(clock.now_s + LOOK_S)
    world.heal()
    healed_from_s = clock.now_s
    why = "nothing was looked at"
    while why and clock.now_s < healed_from_s + HEAL_S:
        clock.run_until(clock.now_s + LOOK_S)
        why = world.why_not_settled() or _why_not_balanced(world)
    if why:
        raise InvariantBroken(f"I12: not healed {HEAL_S:g} s after the last fault: {why}")
    healed_s = clock.now_s - healed_from_s
    balance, best = world.balance(), reachable(world)
    world.stop_traffic()
    clock.run_until(clock.now_s + REST_S)
    world.note_holdings()
    contributions = check(world)
    boss = world.fleet.controllers[-1]
    return Outcome(
        seed=seed,
        events=clock.actions_run,
        facts=len(world.stage.recorder.facts),
        engine_events=sum(len(c.inputs) for c in world.fleet.controllers),
        terms=boss.term,
        epochs=boss.engine.state.epoch,
        moves=dict(boss.engine.state.moves_done),
        requests=dict(world.outcomes),
        contributions=contributions,
        healed_s=healed_s,
        balancedness=balance,
        reachable=best,
        met=world.stage.coverage,
    )


def checkers_of(world: World) -> tuple[list[Checker], ExactlyOnce]:
    """One checker of each promise; the one that counts contributions is named."""
    config = world.stage.config
    once = ExactlyOnce()
    return [
        TableOrder(),
        Coverage(),
        Fence(),
        once,
        Memory(),
        ReleaseLast(silence_s=config.router_silence_s, drain_wait_s=config.drain_wait_s),
        JournalFirst(),
        LoadOnce(),
        Termination(),
        Isolation(),
        Progress(window_s=config.window_s),
    ], once


def check(world: World, *, at_rest: bool = True) -> int:
    """Check every promise over a world's facts; the contributions that were checked. Raises
    InvariantBroken."""
    checkers, once = checkers_of(world)
    check_facts(world.stage.recorder.facts, checkers, at_rest=at_rest)
    for controller in world.fleet.controllers:
        check_replay(controller.started_from, controller.inputs)
    return once.contributions


def _why_not_balanced(world: World) -> str:
    have, best = world.balance(), reachable(world)
    if have >= best - BALANCE_SLACK:
        return ""
    return f"balancedness {have:.3f}, {best:.3f} can be reached"


def reachable(world: World) -> float:
    """Balancedness of the layout that the default policy makes from nothing, for the traffic as it
    really is."""
    stage, boss = world.stage, world.fleet.controller
    assert boss is not None, "nobody balances"
    topology = boss.engine.topology()
    demand = np.zeros((1, NUM_PHASES, stage.spec.num_layers, stage.spec.num_experts))
    demand[0, 0] = world.traffic.popularity() * 1e3
    empty = ExpertLayout.empty(
        topology, num_layers=stage.spec.num_layers, num_experts=stage.spec.num_experts
    )
    layout = propose(
        stage.config.policy,
        PolicyInput(
            spec=stage.spec,
            topology=topology,
            layout=empty,
            scenarios=demand,
            weights=np.ones(1),
            staging_slots=stage.config.staging_slots,
        ),
    )
    return world.balance_of(layout)
