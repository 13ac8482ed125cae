"""One seeded run: build a world, let it live, check every invariant over its log.

Responsible for what a seed means and for the one line that replays it. Called by tests and by `make
sim`.
"""

from __future__ import annotations

import msgspec
import numpy as np

from placement.config import RebalanceConfig
from placement.replay import static_layout
from placement.scoring import balancedness, rank_load
from placement.sim.checkers import (
    Checker,
    Coverage,
    InvariantBroken,
    Memory,
    ReleaseLast,
    TableOrder,
    check_replay,
)
from placement.sim.log import Stepped
from placement.sim.parts import Delays
from placement.sim.workload import shifting_zipf
from placement.sim.world import World
from placement.topology import DeviceProfile, MoeSpec, RankSpec, Topology

CALM_WINDOWS = 5
"""Windows at the end of a run in which traffic does not shift, so that balance can be reached."""


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one run. Balancedness is under the last window's demand, by our split: of the live
    layout, and of a static one in the same slots."""

    seed: int
    actions: int
    events: int
    epochs: int
    moves: dict[str, int]
    moves_aborted: int
    pairs_wanted: int
    pairs_served: int
    pairs_stale: int
    balancedness: float
    balancedness_static: float


def small_world(seed: int, *, windows: int = 12) -> World:
    """A world whose size, slots, traffic and delays are drawn from the seed."""
    rng = np.random.default_rng(seed)
    num_ranks = int(rng.integers(2, 6))
    spec = MoeSpec(
        model="simulated",
        weights_version="v1",
        num_layers=int(rng.integers(1, 4)),
        num_experts=int(rng.integers(4, 17)),
        top_k=2,
        hidden_size=64,
        intermediate_size=128,
        expert_bytes=49_152,
        slot_bytes=49_152,
    )
    staging = int(rng.integers(1, 3))
    least = -(-spec.num_keys // num_ranks) + staging
    profile = DeviceProfile(
        name="simulated", flops_per_s=1e9, memory_bytes_per_s=1e9, copy_bytes_per_s=1e9
    )
    topology = Topology(
        ranks=tuple(
            RankSpec(
                rank=r,
                node=f"node{r // 2}",
                failure_domain=f"node{r // 2}",
                num_slots=least + int(rng.integers(0, 4)),
                profile=profile.name,
            )
            for r in range(num_ranks)
        ),
        profiles=(profile,),
    )
    config = RebalanceConfig(staging_slots=staging, cooldown_s=2.0)
    demand = shifting_zipf(
        spec,
        windows=windows,
        tokens=int(rng.integers(200, 2000)),
        shift_every=int(rng.integers(3, 7)),
        exponent=float(rng.uniform(0.5, 1.5)),
        rng=rng,
        calm=CALM_WINDOWS,
    )
    delays = Delays(copy_s=float(rng.uniform(0.01, 0.5)), compute_s=float(rng.uniform(0.005, 0.2)))
    return World(
        spec,
        topology,
        config,
        demand,
        seed=seed,
        num_routers=int(rng.integers(1, 4)),
        delays=delays,
    )


def check(world: World, *, losses_allowed: bool = False) -> None:
    """Run every checker over the world's log. Raises InvariantBroken."""
    checkers: list[Checker] = [
        TableOrder(),
        Coverage(losses_allowed=losses_allowed),
        Memory(),
        ReleaseLast(wait_s=world.config.budget_drain_wait_s),
    ]
    for entry in world.log:
        for checker in checkers:
            checker.take(entry)
    ends = [start for _, start in world.segments[1:]] + [len(world.log)]
    for (snapshot, start), end in zip(world.segments, ends, strict=True):
        check_replay(snapshot, world.log[start:end])


def run(seed: int, *, windows: int = 12, quiet_s: float = 10.0) -> Outcome:
    """Live through `windows` windows and a quiet time, check, and tell.

    Raises InvariantBroken with the seed and the command that replays it.
    """
    world = small_world(seed, windows=windows)
    world.clock.run_until(windows * world.config.window_s + quiet_s)
    try:
        check(world)
    except InvariantBroken as broken:
        raise InvariantBroken(f"{broken} [seed {seed}; replay: make sim SEED={seed}]") from broken
    return outcome_of(world, seed)


def outcome_of(world: World, seed: int) -> Outcome:
    """Figures of a world as it stands."""
    state = world.engine.state
    return Outcome(
        seed=seed,
        actions=world.clock.actions_run,
        events=sum(isinstance(e, Stepped) for e in world.log),
        epochs=state.epoch,
        moves=dict(state.moves_done),
        moves_aborted=state.moves_aborted,
        pairs_wanted=sum(r.wanted for r in world.routers),
        pairs_served=sum(r.served for r in world.routers),
        pairs_stale=sum(r.stale for r in world.routers),
        balancedness=balancedness(rank_load(world.engine.layout(), world.last_demand())),
        balancedness_static=balancedness(
            rank_load(static_layout(world.spec, world.topology, world.config), world.last_demand())
        ),
    )
