"""The engine under anything that may happen, in any order: it stays safe, and it heals.

Real shards execute what the engine asks for; their answers come at once, late, twice, in another
order, as a failure, or never. After every step the checkers of the simulator hold: I1 (table
order), I2 (coverage), I6 (memory), I7 (release last). At the end everything heals, and the engine
must agree with the shards, slot by slot, and list every expert.
"""

from collections import deque
from itertools import count

import hypothesis.strategies as st
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from placement.config import RebalanceConfig
from placement.engine.state import RankStatus, SlotUse
from placement.messages import events as ev
from placement.messages.effects import (
    ComputeTarget,
    PublishTable,
    ReleaseSlot,
    ShardCommand,
    WakeAt,
)
from placement.messages.history import (
    CommandSent,
    Died,
    MemoryUsed,
    PlanStarted,
    RouterHeard,
    RouterTold,
    SlotFreed,
    SlotProved,
    TablePublished,
)
from placement.roles.shard import SlotPhase
from placement.sim.checks import Coverage, Memory, ReleaseLast, TableOrder
from tests.builders import make_spec, make_topology
from tests.engine_driver import EngineDriver

NUM_RANKS = 3
NUM_EXPERTS = 4
DRAIN_WAIT_S = 1.0
SILENCE_S = 5.0
MEMORY = 20
"""Answers of the past that may come a second time."""

ROUTERS = ("r0", "r1")

ranks = st.integers(0, NUM_RANKS - 1)
routers = st.sampled_from(ROUTERS)
picks = st.integers(0, 1 << 16)
"""Chooses among things whose number is known only when the rule runs."""


class WatchedDriver(EngineDriver):
    """The driver with late answers, and with checkers on everything that leaves or returns.

    slow: ranks whose answers wait in `late`. deaf: ranks that commands do not reach.
    """

    def __init__(self, *args, **fields):
        self.now_s = 0.0
        self.checkers = (
            TableOrder(),
            Coverage(),
            Memory(),
            ReleaseLast(silence_s=SILENCE_S, drain_wait_s=DRAIN_WAIT_S),
        )
        self.rules = [checker.rules() for checker in self.checkers]
        self.facts = count()
        self.proved, self.listed, self.plan_id = {}, {}, ""
        self.applied = {}
        for router in ROUTERS:
            self.note_router(router, -1)
        self.slow, self.deaf = set(), set()
        self.late, self.told = [], deque(maxlen=MEMORY)
        super().__init__(*args, **fields)

    def note(self, kind, who, **fields):
        fact = kind(who=who, seq=next(self.facts), at_s=self.now_s, **fields)
        for rules in self.rules:
            if kind in rules:
                rules[kind](fact)

    def _answer(self, command):
        self._note_plan()
        if isinstance(command, PublishTable):
            self._note_table(command.table)
        elif isinstance(command, WakeAt):
            assert command.at_s >= self.now_s, "a time that is over would wake it without end"
        elif isinstance(command, ReleaseSlot):
            self.note(
                CommandSent,
                "controller",
                command="ReleaseSlot",
                step_id=command.step_id,
                rank=command.rank,
                incarnation=command.incarnation,
                slot=command.slot,
                slot_tag=command.slot_tag,
            )
        if not isinstance(command, ShardCommand):
            return super()._answer(command)
        if command.rank in self.deaf:
            return []
        answers = self.run_shard(command)
        self.told.extend(answers)
        if command.rank in self.slow:
            self.late.extend(answers)
            return []
        return answers

    def run_shard(self, command):
        answers = super().run_shard(command)
        shard = self.shards.get(command.rank)
        if shard is None or shard.incarnation != command.incarnation:
            return answers
        ledger = shard.ledger
        self._note_slots(command.rank, shard)
        self.note(
            MemoryUsed,
            who_is(command.rank, shard),
            rank=command.rank,
            resident_bytes=ledger.resident_bytes,
            reserved_bytes=ledger.reserved_bytes,
            held_bytes=ledger.resident_bytes,
            budget_bytes=ledger.budget_bytes,
        )
        return answers

    def _note_plan(self):
        """Steps belong to the plan that runs as their commands leave."""
        run = self.engine.state.run
        if run is None or run.plan_id == self.plan_id:
            return
        self.plan_id = run.plan_id
        wait_s = run.drain_wait_s
        self.note(
            PlanStarted, "controller", plan_id=run.plan_id, cause=run.cause, drain_wait_s=wait_s
        )

    def _note_slots(self, rank, shard):
        """What a shard began to serve, and what it gave back, since it was looked at."""
        who, ledger = who_is(rank, shard), shard.ledger
        known = self.proved.setdefault(who, {})
        for slot in range(ledger.num_slots):
            layer, expert, tag = ledger.holder(slot)
            key = layer * self.spec.num_experts + expert
            if slot in known and known[slot] != tag:
                freed = known.pop(slot)
                self.note(SlotFreed, who, rank=rank, slot=slot, slot_tag=freed, readers=0)
            if ledger.phase(slot) is SlotPhase.VERIFIED and slot not in known:
                known[slot] = tag
                self.note(
                    SlotProved,
                    who,
                    rank=rank,
                    slot=slot,
                    slot_tag=tag,
                    key=key,
                    version="v1",
                    held_key=key,
                    held_version="v1",
                    intact=True,
                )

    def _note_table(self, table):
        self.kill_who_was_given_up()
        for rank, shard in self.shards.items():
            self._note_slots(rank, shard)
        for router in set(self.routers) - set(self.silent_routers):
            self.note_router(router, self.applied[router])
        listed = [
            (layer * self.spec.num_experts + expert, *replica)
            for layer in range(self.spec.num_layers)
            for expert in range(self.spec.num_experts)
            for replica in table.replicas(layer, expert)
        ]
        self.note(
            TablePublished,
            "controller",
            term=table.term,
            epoch=table.epoch,
            num_keys=self.spec.num_keys,
            listed=tuple(listed),
            lives=tuple((r.rank, r.incarnation) for r in table.ranks),
        )
        lives = dict(self.lives())
        self.listed = {}
        for key, rank, _, _ in listed:
            self.listed.setdefault(key, set()).add((rank, lives[rank]))

    def lose(self, rank):
        self.note(Died, who_is(rank, self.shards[rank]), cause="killed")
        return super().lose(rank)

    def end(self, rank):
        """A shard ends, and nobody tells the engine."""
        shard = self.shards.pop(rank, None)
        if shard is not None:
            self.note(Died, who_is(rank, shard), cause="killed")

    def kill_who_was_given_up(self):
        """The controller kills what it has declared lost: its process answers nothing any more."""
        for rank in self.engine.state.ranks:
            shard = self.shards.get(rank.rank)
            if (
                shard is not None
                and rank.status is RankStatus.LOST
                and rank.incarnation == shard.incarnation
            ):
                self.note(Died, who_is(rank.rank, shard), cause="replaced")
                del self.shards[rank.rank]

    def lives(self):
        """(rank, incarnation) of every shard that lives."""
        return {(rank, shard.incarnation) for rank, shard in self.shards.items()}

    def acks(self, epoch):
        for router in self.routers:
            if router not in self.silent_routers:
                self.note_router(router, epoch)
        return super().acks(epoch)

    def note_router(self, router, epoch):
        self.applied[router] = epoch
        term = self.engine.state.term if self.applied[router] >= 0 else -1
        self.note(RouterTold, router, term=term, router=router, applied=epoch, quiesced=epoch)
        if term >= 0:
            self.note(RouterHeard, "controller", term=term, life=router)


def who_is(rank, shard):
    return f"rank{rank}/{shard.incarnation}"


class EngineMachine(RuleBasedStateMachine):
    """Rules are what may happen to a service; see the module's text for what must hold."""

    demand: dict[int, float] = {}  # noqa: RUF012  # replaced, never changed

    @initialize(
        slots=st.lists(st.integers(3, 6), min_size=NUM_RANKS, max_size=NUM_RANKS),
        num_layers=st.integers(1, 2),
        first_policy=st.sampled_from(["static", "incremental"]),
        floor=st.integers(1, 2),
        slow=st.sets(ranks),
        silent=st.sets(routers),
        hold=st.booleans(),
    )
    def start(self, slots, num_layers, first_policy, floor, slow, silent, hold):
        self.request_id = 0
        self.incarnations = [1] * NUM_RANKS
        self.slots = [max(n, num_layers * 2 + 1) for n in slots]
        config = RebalanceConfig(
            cooldown_s=0.0,
            first_policy=first_policy,
            floor=floor,
            drain_wait_s=DRAIN_WAIT_S,
            budget_drain_wait_s=DRAIN_WAIT_S,
            router_silence_s=SILENCE_S,
            plan_life_s=600.0,
        )
        self.driver = WatchedDriver(
            make_spec(num_layers=num_layers, num_experts=NUM_EXPERTS),
            make_topology(self.slots, ranks_per_node=1),
            config,
            routers=ROUTERS,
        )
        # Trouble from the start: a run of rules would seldom come upon several kinds at once.
        self.driver.slow |= slow
        self.driver.silent_routers |= silent
        self.driver.hold |= {ComputeTarget} if hold else set()

    # -- traffic and time ------------------------------------------------------------------------

    @rule(hot=picks, cold=picks, pairs=st.sampled_from([500.0, 5000.0, 50000.0]))
    def the_load_shifts(self, hot, cold, pairs):
        num_keys = self.driver.spec.num_keys
        self.demand = {cold % num_keys: 0.0, hot % num_keys: pairs}
        self.driver.close_window(self.demand)

    @rule(windows=st.integers(1, 3))
    def the_load_stays(self, windows):
        for _ in range(windows):
            self.driver.close_window(self.demand)

    @rule(seconds=st.sampled_from([0.1, 0.5, 1.0, 3.0, 8.0, 40.0]))
    def time_passes(self, seconds):
        self.driver.wait(seconds)

    # -- answers ---------------------------------------------------------------------------------

    @rule(rank=ranks, how=st.sampled_from(["slow", "prompt", "deaf", "hears"]))
    def a_connection_changes(self, rank, how):
        {
            "slow": self.driver.slow.add,
            "prompt": self.driver.slow.discard,
            "deaf": self.driver.deaf.add,
            "hears": self.driver.deaf.discard,
        }[how](rank)

    @precondition(lambda self: self.driver.late)
    @rule(drawn=st.lists(picks, min_size=1, max_size=4))
    def late_answers_come(self, drawn):
        for pick in drawn:
            if self.driver.late:
                self.driver.feed(self.driver.late.pop(pick % len(self.driver.late)))

    @precondition(lambda self: self.driver.late)
    @rule(pick=picks, code=st.sampled_from(["", "io", "timeout", "digest", "source_lost"]))
    def a_late_answer_is_lost_or_a_failure(self, pick, code):
        late = self.driver.late.pop(pick % len(self.driver.late))
        if code and not isinstance(late, ev.BudgetApplied):
            self.driver.feed(
                ev.StepFailed(at_s=0.0, step_id=late.step_id, code=code, detail="on purpose")
            )

    @precondition(lambda self: self.driver.told)
    @rule(pick=picks)
    def an_answer_comes_twice(self, pick):
        told = self.driver.told[pick % len(self.driver.told)]
        if not isinstance(told, ev.BudgetApplied):  # one at a time a rank: never reordered
            self.driver.feed(told)

    @rule(later=st.booleans())
    def targets_come_late(self, later):
        if later:
            self.driver.hold.add(ComputeTarget)
        else:
            self.driver.let_go(ComputeTarget)

    # -- ranks and routers -----------------------------------------------------------------------

    @rule(rank=ranks)
    def a_rank_goes_or_comes(self, rank):
        if rank in self.driver.shards:
            self.driver.lose(rank)
        else:
            self.join_anew(rank)

    @rule(rank=ranks, known=st.booleans())
    def a_rank_speaks_again(self, rank, known):
        """The same shard tells what it holds, or another has taken its place unseen."""
        shard = self.driver.shards.get(rank)
        if known and shard is not None:
            self.driver.join(rank, shard=shard)
        else:
            self.driver.end(rank)
            self.join_anew(rank)

    @rule(rank=ranks, silent=st.booleans())
    def a_rank_is_suspected_or_cleared(self, rank, silent):
        if silent:
            self.driver.feed(ev.RankSuspected(at_s=0.0, rank=rank, reason="disconnected"))
        elif rank in self.driver.shards:
            self.driver.feed(ev.RankCleared(at_s=0.0, rank=rank))

    @rule(router=routers, silent=st.booleans())
    def a_router_falls_silent_or_catches_up(self, router, silent):
        if silent:
            self.driver.silent_routers.add(router)
        else:
            self.catch_up(router)

    # -- operators -------------------------------------------------------------------------------

    @rule(rank=ranks, slots=st.integers(0, 7))
    def a_budget_is_asked_for(self, rank, slots):
        self.ask(ev.BudgetAsked, rank=rank, budget_bytes=slots * self.driver.spec.slot_bytes)

    @rule(rank=ranks, kind=st.sampled_from([ev.DrainAsked, ev.UndrainAsked]))
    def a_drain_or_undrain_is_asked_for(self, rank, kind):
        self.ask(kind, rank=rank)

    @rule(kind=st.sampled_from([ev.PauseAsked, ev.ResumeAsked]))
    def a_pause_or_resume_is_asked_for(self, kind):
        self.ask(kind)

    @rule(pick=st.none() | picks)
    def a_plan_is_asked_for_or_applied(self, pick):
        stored = self.driver.engine.state.stored
        if pick is None or not stored:
            self.ask(ev.PlanAsked)
        else:
            self.ask(ev.ApplyAsked, plan_id=stored[pick % len(stored)].plan_id)

    # -- what the rules are made of --------------------------------------------------------------

    def ask(self, kind, **fields):
        self.request_id += 1
        self.driver.feed(kind(at_s=0.0, request_id=self.request_id, **fields))

    def join_anew(self, rank):
        self.incarnations[rank] += 1
        self.driver.join(rank, self.incarnations[rank])

    def catch_up(self, router):
        self.driver.silent_routers.discard(router)
        if self.driver.tables:
            epoch = self.driver.table.epoch
            self.driver.note_router(router, epoch)
            self.driver.feed(ev.TableApplied(at_s=0.0, router=router, epoch=epoch))
            self.driver.feed(ev.TableQuiesced(at_s=0.0, router=router, epoch=epoch))

    # -- what must hold --------------------------------------------------------------------------

    @invariant()
    def nobody_holds_more_than_it_may(self):
        self.driver.kill_who_was_given_up()
        for rank in self.driver.engine.state.ranks:
            filled = sum(s.use is not SlotUse.EMPTY for s in rank.slots)
            assert filled <= rank.num_slots, f"I6: rank {rank.rank} fills {filled} slots"
        for rank, shard in self.driver.shards.items():
            used = shard.ledger.resident_bytes + shard.ledger.reserved_bytes
            assert used <= shard.ledger.budget_bytes, f"I6: rank {rank}"

    @invariant()
    def what_is_listed_is_served(self):
        """The newest table's replicas on live ranks hold what it says, until a newer one is out."""
        if not self.driver.tables:
            return
        lives = self.driver.lives()
        for layer in range(self.driver.spec.num_layers):
            for expert in range(NUM_EXPERTS):
                key = layer * NUM_EXPERTS + expert
                for rank, slot, tag in self.driver.table.replicas(layer, expert):
                    if not self.driver.listed[key] & lives & {(rank, self.incarnations[rank])}:
                        continue
                    assert self.driver.shards[rank].ledger.holder(slot) == (layer, expert, tag)

    @invariant()
    def every_request_is_answered_once(self):
        state = self.driver.engine.state
        open_ids = {a.request_id for a in state.asks}
        if state.outstanding is not None:
            open_ids.add(state.outstanding.asked_by)
        missing = set(range(1, self.request_id + 1)) - set(self.driver.answers) - open_ids
        assert not missing, f"requests {missing} have no answer"

    def teardown(self):
        if not hasattr(self, "driver"):
            return
        driver = self.driver
        self.driver.kill_who_was_given_up()
        driver.slow.clear()
        driver.deaf.clear()
        for late in driver.late:
            driver.feed(late)
        driver.late.clear()
        driver.let_go(ComputeTarget)
        for rank in range(NUM_RANKS):
            if rank in driver.shards:
                driver.feed(ev.RankCleared(at_s=0.0, rank=rank))
            else:
                self.join_anew(rank)
        for router in driver.routers:
            self.catch_up(router)
        self.ask(ev.ResumeAsked)
        for rank, slots in enumerate(self.slots):
            self.ask(ev.UndrainAsked, rank=rank)
            self.ask(ev.BudgetAsked, rank=rank, budget_bytes=slots * driver.spec.slot_bytes)
        driver.wait(120.0)
        state = driver.engine.state
        assert state.run is None
        assert driver.engine.layout().missing() == ()
        assert driver.table.missing() == ()
        driver.check_agreement()


EngineMachine.TestCase.settings = settings(
    max_examples=220,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestEngineMachine = pytest.mark.timeout(300)(EngineMachine.TestCase)
