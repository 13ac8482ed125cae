"""A service in one thread: production engine and roles on a virtual clock, callers, faults.

Responsible for what a seed means, for traffic, and for telling whether all is well. Holds no rule
of placement. Called by the runner and by tests.
"""

from __future__ import annotations

from collections import Counter, deque
from functools import partial

import numpy as np

from placement.config import RebalanceConfig
from placement.engine.state import RankStatus
from placement.layout import ExpertLayout
from placement.messages.history import Recorder
from placement.roles.router_records import RouterRules
from placement.scoring import balancedness, rank_load
from placement.sim.clock import VirtualClock
from placement.sim.controller import SimController
from placement.sim.coverage import Coverage
from placement.sim.dice import Dice
from placement.sim.fleet import Fleet
from placement.sim.harm import Flow, Harm
from placement.sim.nemesis import Nemesis, aims_of
from placement.sim.network import Network, Part
from placement.sim.operators import Operators
from placement.sim.stage import Delays, Stage
from placement.sim.traffic import Traffic
from placement.topology import DeviceProfile, MoeSpec, RankSpec, Topology

FAULTS = 10
"""Faults a seed brings about, apart from those that lead up to them."""
FIRST_FAULT_S = 2.0
NODE_RANKS = 2


class World:
    """A service drawn from a seed. `faults`: how many befall it. `elastic`: see `PeopleHarm`."""

    def __init__(self, seed: int, *, faults: int = FAULTS, elastic: bool = False) -> None:
        dice = Dice(seed)
        clock = VirtualClock(Dice(seed, 1))
        spec = _spec(dice)
        config = _config(dice)
        topology, self.start_ranks = _topology(dice, spec, config)
        delays = Delays(
            copy_s=dice.between(0.01, 0.15),
            compute_s=dice.between(0.004, 0.02),
            plan_s=dice.between(0.005, 0.05),
        )
        self.stage = Stage(
            spec=spec,
            topology=topology,
            config=config,
            delays=delays,
            clock=clock,
            network=Network(clock, Dice(seed, 2), delays.network_s),
            dice=dice,
            recorder=Recorder(),
            coverage=Coverage(),
            marks=dice.rng.integers(1, 1 << 63, spec.num_keys, dtype=np.uint64) | np.uint64(1),
        )
        rules = RouterRules(
            attempt_timeout_s=0.3,
            eject_s=0.5,
            eject_max_s=2.0,
            faults_to_eject=3,
            silence_s=0.2,
            fault_silence_s=0.05,
            retry_patience_s=0.3,
            budget_window_s=2.0,
            budget_least=3,
            hedge_share=0.05 if dice.chance(0.7) else 0.0,
        )
        self.flow = Flow()
        self.traffic = Traffic(
            spec,
            Dice(seed, 3),
            exponent=dice.between(0.6, 1.4),
            rows_max=12,
            deadline_s=delays.deadline_s,
        )
        self.rate = dice.between(25.0, 40.0)
        self.outcomes: Counter[str] = Counter()
        self.fleet = Fleet(
            self.stage,
            rules,
            2 + dice.below(2),
            self._stepped,
            start_ranks=self.start_ranks,
        )
        self.harm = Harm(self.stage, self.fleet, self.traffic, self.flow, elastic=elastic)
        self.nemesis = Nemesis(self.harm, deque(aims_of(seed, faults) if faults else ()))
        self.operators = Operators(self.stage, self.harm)
        self._client = Part("client", 0, clock)
        self._arrivals = Dice(seed, 4)
        self._open = True
        self.fleet.start()
        clock.after(0.0, self._arrive)
        if faults:
            clock.after(FIRST_FAULT_S, self.nemesis.begin)
            clock.after(FIRST_FAULT_S, self._interrupt)

    def _stepped(self, controller: SimController, effects: object) -> None:
        self.nemesis.stepped(controller, effects)  # type: ignore[arg-type]

    # -- traffic -----------------------------------------------------------------------------------

    def _arrive(self) -> None:
        """One request to any router, and the next a while later."""
        if not self._open:
            return
        request = self.traffic.draw()
        router = self.stage.routers.get(self._arrivals.pick(self.fleet.router_names))
        if router is None or not router.alive:
            self.outcomes["refused connection"] += 1
        else:
            there = router
            self.stage.network.send(
                self._client, there, lambda: there.forward(request, self._answered)
            )
        gap_s = -np.log(1.0 - self._arrivals.unit()) / (self.rate * self.flow.factor)
        self.stage.clock.after(float(gap_s), self._arrive)

    def _answered(self, outcome: str) -> None:
        self.outcomes[outcome] += 1

    def stop_traffic(self) -> None:
        """No more requests come."""
        self._open = False

    def _interrupt(self) -> None:
        """Operators ask for this and that while faults last."""
        if not self.nemesis.over:
            self.operators.ask_something()
            self.stage.clock.after(self.stage.dice.between(0.5, 2.0), self._interrupt)

    # -- the end of faults -------------------------------------------------------------------------

    def heal(self) -> None:
        """Mend everything, and take back what operators wanted."""
        self.nemesis.heal()
        self._settle_wishes()

    def _settle_wishes(self) -> None:
        """Every rank at its whole budget, none drained, automatic plans on: asked for until a
        controller has heard it."""
        boss, again = self.fleet.controller, partial(self._settle_wishes)
        if boss is None or any(r.status is RankStatus.RESTORED for r in boss.engine.state.ranks):
            self.stage.clock.after(0.2, again)
            return
        self.operators.take_everything_back(boss)
        if not self.operators.content(boss):
            self.stage.clock.after(0.5, again)

    # -- is all well? ------------------------------------------------------------------------------

    def why_not_settled(self) -> str:
        """What still moves, or differs between controller, shards and routers; "" where nothing."""
        boss = self.fleet.controller
        if boss is None or boss.paused:
            return "no controller"
        state = boss.engine.state
        if state.run is not None or state.outstanding is not None:
            return "a plan is running or being computed"
        for rank in state.ranks:
            if rank.status is not RankStatus.LIVE or rank.draining or rank.wanted_slots >= 0:
                return f"rank {rank.rank} is {rank.status}, drained {rank.drained_by}"
        if not state.published or state.table_dirty or boss.engine.layout().missing():
            return "not every expert is listed"
        return self._difference(boss)

    def _difference(self, boss: SimController) -> str:
        state, spec = boss.engine.state, self.stage.spec
        for rank in state.ranks:
            shard = self.stage.shards[rank.rank]
            mine = {i: (s.key, s.tag) for i, s in enumerate(rank.slots) if s.key >= 0}
            real = {
                r.slot: (spec.key(r.layer, r.expert), r.tag)
                for r in shard.slots.ledger.resident()
                if r.verified
            }
            if mine != real:
                return f"rank {rank.rank} holds {real}, the controller believes {mine}"
            if shard.slots.highest_epoch != state.epoch:
                return f"rank {rank.rank} keeps epoch {shard.slots.highest_epoch}"
        for name in self.fleet.router_names:
            router = self.stage.routers.get(name)
            if router is None or not router.alive or router.closed:
                return f"{name} is not there"
            if (router.role.table is None) or router.role.table.order != (state.term, state.epoch):
                return f"{name} does not use the newest table"
        return ""

    def balance(self) -> float:
        """Balancedness of the live layout under the present popularity, by our split."""
        boss = self.fleet.controller
        assert boss is not None, "nobody balances"
        return balancedness(rank_load(boss.engine.layout(), self._demand()))

    def balance_of(self, layout: ExpertLayout) -> float:
        """The same of another layout."""
        return balancedness(rank_load(layout, self._demand()))

    def _demand(self) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
        return self.traffic.popularity() * 1e6

    def note_holdings(self) -> None:
        """Have every router note what it holds."""
        for router in self.stage.routers.values():
            if router.alive:
                router.note_holdings()


def _spec(dice: Dice) -> MoeSpec:
    return MoeSpec(
        model="simulated",
        weights_version="v1",
        num_layers=1 + dice.below(2),
        num_experts=4 + dice.below(7),
        top_k=2,
        hidden_size=64,
        intermediate_size=128,
        expert_bytes=49_152,
        slot_bytes=49_152,
    )


def _config(dice: Dice) -> RebalanceConfig:
    return RebalanceConfig(
        window_s=0.5,
        sub_windows=2,
        floor=1 + dice.below(2),
        staging_slots=1 + dice.below(2),
        cooldown_s=1.0,
        first_policy=dice.pick(("static", "incremental")),
        balance_enough=0.95,
        drain_wait_s=0.8,
        budget_drain_wait_s=0.3,
        copy_timeout_s=1.0,
        router_silence_s=1.0,
        rank_silence_s=1.0,
        target_timeout_s=3.0,
        wave_adds_per_rank=1 + dice.below(2),
    )


def _topology(dice: Dice, spec: MoeSpec, config: RebalanceConfig) -> tuple[Topology, int]:
    """Ranks, of which the last may join only later; how many are there from the start."""
    ranks = 3 + dice.below(3)
    start = ranks - dice.below(2)
    least = -(-spec.num_keys // (start - 1)) + config.staging_slots
    profile = DeviceProfile(
        name="simulated", flops_per_s=1e9, memory_bytes_per_s=1e9, copy_bytes_per_s=1e9
    )
    specs = [
        RankSpec(
            rank=rank,
            node=f"node{rank // NODE_RANKS}",
            failure_domain=f"node{rank // NODE_RANKS}",
            num_slots=least + dice.below(4),
            profile=profile.name,
        )
        for rank in range(ranks)
    ]
    return Topology(ranks=tuple(specs), profiles=(profile,)), start
