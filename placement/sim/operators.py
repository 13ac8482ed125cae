"""People at a simulated service: they ask for plans, also back to an earlier placement, for budgets
and drains, and for nonsense.

Responsible for requests an operator may make, and for taking back what was asked for. Called by the
world.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import partial

from placement.messages import events as ev
from placement.routing import RoutingTable
from placement.sim.controller import SimController
from placement.sim.harm import Harm
from placement.sim.stage import Stage

AT_ONCE = 12
"""Plans that an impatient operator asks for."""
REMEMBERED = 3
"""Placements that people remember, and want the oldest of back."""
BACK_EVERY = 3
"""Of so many plans that are asked for, one leads back."""


class Operators:
    """See the module's text."""

    def __init__(self, stage: Stage, harm: Harm) -> None:
        self._stage = stage
        self._harm = harm
        self._asked = 0
        self._remembered: deque[tuple[tuple[int, ...], ...]] = deque(maxlen=REMEMBERED)
        self._wishes: tuple[Callable[[], None], ...] = (
            self._plan,
            self._plan,
            self._apply,
            self._plans_at_once,
            self._unknown_policy,
            self._unknown_rank,
            self._hunger,
            self._foreign_table,
        )

    def ask_something(self) -> None:
        """One wish of many."""
        self._stage.dice.pick(self._wishes)()

    def _plan(self) -> None:
        """A plan to look at; now and then one back to where things were some plans ago."""
        boss = self._harm.fleet.controller
        if boss is not None:
            slots = boss.engine.layout().slots.tolist()
            self._remembered.append(tuple(tuple(k for k in row if k >= 0) for row in slots))
        self._asked += 1
        back = self._asked % BACK_EVERY == 0 and self._remembered
        target = self._remembered[0] if back else ()
        self._harm.ask(lambda n: ev.PlanAsked(at_s=0.0, request_id=n, target=target))

    def _plans_at_once(self) -> None:
        for _ in range(AT_ONCE):
            self._plan()

    def _unknown_policy(self) -> None:
        self._harm.ask(lambda n: ev.PlanAsked(at_s=0.0, request_id=n, policy="no such policy"))

    def _apply(self) -> None:
        """Apply the newest plan that is known, one that leads back before any other."""
        boss = self._harm.fleet.controller
        known = boss.engine.state.stored if boss is not None else []
        back = [s for s in known if s.given and s.plan.moves and not s.begun]
        plan_id = (back or known)[-1].plan_id if known else "no such plan"
        self._harm.ask(lambda n: ev.ApplyAsked(at_s=0.0, request_id=n, plan_id=plan_id))

    def _unknown_rank(self) -> None:
        self._harm.ask(lambda n: ev.DrainAsked(at_s=0.0, request_id=n, rank=99))

    def _hunger(self) -> None:
        """A budget that cannot hold every expert."""
        self._harm.ask(lambda n: ev.BudgetAsked(at_s=0.0, request_id=n, rank=0, budget_bytes=-1))

    def _foreign_table(self) -> None:
        """A table of another model reaches a router."""
        boss = self._harm.fleet.controller
        table = boss.table if boss is not None else None
        router = self._stage.routers.get(self._harm.fleet.router_names[0])
        if table is None or router is None or not router.alive:
            return
        foreign = RoutingTable(
            term=table.term,
            epoch=table.epoch + 1,
            model="another",
            weights_version=table.weights_version,
            num_layers=table.num_layers,
            num_experts=table.num_experts + 1,
            replica_ptr=table.replica_ptr,
            replica_rank=table.replica_rank,
            replica_slot=table.replica_slot,
            replica_tag=table.replica_tag,
            ranks=table.ranks,
        )
        router.receive(lambda: router.install(foreign, lambda _epoch: None))

    # -- the end -----------------------------------------------------------------------------------

    def take_everything_back(self, boss: SimController) -> None:
        """Ask for whole budgets, no drains and automatic plans."""
        size = self._stage.spec.slot_bytes
        for rank in boss.engine.state.ranks:
            whole = self._stage.topology.ranks[rank.rank].num_slots
            number = rank.rank
            if rank.draining:
                self._harm.people.bring_back(number)
            wanted = rank.wanted_slots if rank.wanted_slots >= 0 else rank.num_slots
            if wanted != whole:
                self._harm.ask(partial(_budget, number, whole * size))
        if boss.engine.state.paused:
            self._harm.ask(lambda n: ev.ResumeAsked(at_s=0.0, request_id=n))

    def content(self, boss: SimController) -> bool:
        """Whether everything is as it was wanted at first, or will be."""
        state = boss.engine.state
        return not state.paused and all(
            not rank.draining
            and self._stage.topology.ranks[rank.rank].num_slots
            == (rank.wanted_slots if rank.wanted_slots >= 0 else rank.num_slots)
            for rank in state.ranks
        )


def _budget(rank: int, budget_bytes: int, request_id: int) -> ev.AnyEvent:
    return ev.BudgetAsked(at_s=0.0, request_id=request_id, rank=rank, budget_bytes=budget_bytes)
