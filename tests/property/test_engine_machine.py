"""The engine under anything that may happen, in any order: it stays safe, and it heals.

Real shards execute what the engine asks for; their answers come at once, late, twice, in another
order, as a failure, or never. After every step the checkers of the simulator hold: I1 (table
order), I2 (coverage), I6 (memory), I7 (release last). At the end everything heals, and the engine
must agree with the shards, slot by slot, and list every expert.
"""

from collections import deque

import hypothesis.strategies as st
from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from placement.config import RebalanceConfig
from placement.engine.state import RankStatus, SlotUse
from placement.messages import events as ev
from placement.messages.effects import ComputeTarget, Effects, PublishTable, ReleaseSlot
from placement.roles.shard import SlotPhase
from placement.sim.checkers import Coverage, Memory, ReleaseLast, TableOrder
from placement.sim.log import Freed, MemoryUsed, Published, RouterTold, Stepped
from tests.builders import make_spec, make_topology
from tests.engine_driver import EngineDriver, ShardCommand

NUM_RANKS = 3
NUM_EXPERTS = 4
DRAIN_WAIT_S = 1.0
MEMORY = 20
"""Answers of the past that may come a second time."""

ranks = st.integers(0, NUM_RANKS - 1)
picks = st.integers(0, 1 << 16)
"""Chooses among things whose number is known only when the rule runs."""


class WatchedDriver(EngineDriver):
    """The driver with late answers, and with checkers on everything that leaves or returns.

    slow: ranks whose answers wait in `late`. deaf: ranks that commands do not reach.
    """

    def __init__(self, *args, **fields):
        self.checkers = (
            TableOrder(),
            Coverage(losses_allowed=True),
            Memory(),
            ReleaseLast(wait_s=DRAIN_WAIT_S),
        )
        self.slow, self.deaf = set(), set()
        self.late, self.told = [], deque(maxlen=MEMORY)
        self.listed = {}
        super().__init__(*args, **fields)

    def note(self, entry):
        for checker in self.checkers:
            checker.take(entry)

    def _answer(self, command):
        if isinstance(command, PublishTable):
            self._note_table(command.table)
        elif isinstance(command, ReleaseSlot):
            effects = Effects(commands=(command,), transitions=(), records=())
            event = ev.TimerFired(at_s=self.now_s)
            self.note(Stepped(at_s=self.now_s, event=event, effects=effects))
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
        self.note(
            MemoryUsed(
                at_s=self.now_s,
                rank=command.rank,
                resident_bytes=ledger.resident_bytes,
                reserved_bytes=ledger.reserved_bytes,
                budget_bytes=ledger.budget_bytes,
            )
        )
        if isinstance(command, ReleaseSlot) and any(
            isinstance(a, ev.SlotReleased) for a in answers
        ):
            self.note(
                Freed(
                    at_s=self.now_s,
                    rank=command.rank,
                    slot=command.slot,
                    tag=command.slot_tag,
                    pins=0,
                )
            )
        return answers

    def _note_table(self, table):
        listed = {
            (layer * self.spec.num_experts + expert, *replica)
            for layer in range(self.spec.num_layers)
            for expert in range(self.spec.num_experts)
            for replica in table.replicas(layer, expert)
        }
        verified = {
            (layer * self.spec.num_experts + expert, rank, slot, tag)
            for rank, shard in self.shards.items()
            for slot in range(shard.ledger.num_slots)
            if shard.ledger.phase(slot) is SlotPhase.VERIFIED
            for layer, expert, tag in [shard.ledger.holder(slot)]
        }
        self.note(
            Published(
                at_s=self.now_s,
                term=table.term,
                epoch=table.epoch,
                num_keys=self.spec.num_keys,
                listed=frozenset(listed),
                verified=frozenset(verified),
            )
        )
        for key in self.listed.keys() - {key for key, _, _, _ in listed}:
            alive = [at for at in self.listed[key] if at in self.lives()]
            assert not alive, f"I2: key {key} left the table though {alive} live"
        lives = {rank: incarnation for rank, incarnation in self.lives()}
        self.listed = {}
        for key, rank, _, _ in listed:
            self.listed.setdefault(key, set()).add((rank, lives[rank]))

    def lives(self):
        """(rank, incarnation) of every shard that lives."""
        return {(rank, shard.incarnation) for rank, shard in self.shards.items()}

    def acks(self, epoch):
        for router in self.routers:
            if router not in self.silent_routers:
                self.note_router(router, epoch)
        return super().acks(epoch)

    def note_router(self, router, epoch):
        self.note(
            RouterTold(
                at_s=self.now_s, router=router, applied=epoch, quiesced=epoch, installs=epoch
            )
        )


class EngineMachine(RuleBasedStateMachine):
    """Rules are what may happen to a service; see the module's text for what must hold."""

    @initialize(
        slots=st.lists(st.integers(3, 6), min_size=NUM_RANKS, max_size=NUM_RANKS),
        num_layers=st.integers(1, 2),
        first_policy=st.sampled_from(["static", "incremental"]),
        floor=st.integers(1, 2),
    )
    def start(self, slots, num_layers, first_policy, floor):
        self.request_id = 0
        self.incarnations = [1] * NUM_RANKS
        self.slots = [max(n, num_layers * 2 + 1) for n in slots]
        config = RebalanceConfig(
            cooldown_s=0.0,
            first_policy=first_policy,
            floor=floor,
            drain_wait_s=DRAIN_WAIT_S,
            budget_drain_wait_s=DRAIN_WAIT_S,
            plan_life_s=600.0,
        )
        self.driver = WatchedDriver(
            make_spec(num_layers=num_layers, num_experts=NUM_EXPERTS),
            make_topology(self.slots, ranks_per_node=1),
            config,
            routers=["r0", "r1"],
        )

    # -- traffic and time ------------------------------------------------------------------------

    @rule(hot=picks, pairs=st.sampled_from([0.0, 500.0, 5000.0]))
    def window_closes(self, hot, pairs):
        self.driver.close_window({hot % self.driver.spec.num_keys: pairs})

    @rule(seconds=st.sampled_from([0.1, 1.0, 3.0, 8.0, 40.0]))
    def time_passes(self, seconds):
        self.driver.wait(seconds)

    # -- answers ---------------------------------------------------------------------------------

    @rule(rank=ranks)
    def answers_begin_to_come_late(self, rank):
        self.driver.slow.add(rank)

    @rule(rank=ranks)
    def answers_come_at_once_again(self, rank):
        self.driver.slow.discard(rank)

    @precondition(lambda self: self.driver.late)
    @rule(pick=picks)
    def a_late_answer_comes(self, pick):
        self.driver.feed(self.driver.late.pop(pick % len(self.driver.late)))

    @precondition(lambda self: self.driver.late)
    @rule(pick=picks)
    def a_late_answer_is_lost(self, pick):
        self.driver.late.pop(pick % len(self.driver.late))

    @precondition(lambda self: self.driver.told)
    @rule(pick=picks)
    def an_answer_comes_twice(self, pick):
        told = self.driver.told[pick % len(self.driver.told)]
        if not isinstance(told, ev.BudgetApplied):  # one at a time a rank: never reordered
            self.driver.feed(told)

    @precondition(lambda self: self.driver.late)
    @rule(pick=picks, code=st.sampled_from(["io", "timeout", "digest", "source_lost"]))
    def a_late_answer_is_a_failure(self, pick, code):
        late = self.driver.late.pop(pick % len(self.driver.late))
        if not isinstance(late, ev.BudgetApplied):
            self.driver.feed(
                ev.StepFailed(at_s=0.0, step_id=late.step_id, code=code, detail="on purpose")
            )

    @rule(rank=ranks)
    def commands_get_lost(self, rank):
        self.driver.deaf.add(rank)

    @rule(rank=ranks)
    def commands_arrive_again(self, rank):
        self.driver.deaf.discard(rank)

    # -- targets ---------------------------------------------------------------------------------

    @rule()
    def targets_are_held_back(self):
        self.driver.hold.add(ComputeTarget)

    @precondition(lambda self: self.driver.hold)
    @rule()
    def held_targets_come(self):
        self.driver.let_go(ComputeTarget)

    # -- ranks and routers -----------------------------------------------------------------------

    @rule(rank=ranks)
    def a_rank_is_lost(self, rank):
        if rank in self.driver.shards:
            self.driver.lose(rank)

    @rule(rank=ranks)
    def a_rank_joins_anew(self, rank):
        if rank not in self.driver.shards:
            self.join_anew(rank)

    @rule(rank=ranks)
    def a_rank_is_replaced_before_its_loss_is_known(self, rank):
        self.driver.shards.pop(rank, None)
        self.join_anew(rank)

    @rule(rank=ranks)
    def a_rank_tells_again_what_it_holds(self, rank):
        shard = self.driver.shards.get(rank)
        if shard is not None:
            self.driver.join(rank, shard=shard)

    @rule(rank=ranks)
    def a_rank_is_suspected(self, rank):
        # A live one that stays silent would be declared lost: then its process is killed.
        self.driver.feed(ev.RankSuspected(at_s=0.0, rank=rank, reason="disconnected"))

    @rule(rank=ranks)
    def a_suspicion_ends(self, rank):
        if rank in self.driver.shards:
            self.driver.feed(ev.RankCleared(at_s=0.0, rank=rank))

    @rule(router=st.sampled_from(["r0", "r1"]))
    def a_router_falls_silent(self, router):
        self.driver.silent_routers.add(router)

    @rule(router=st.sampled_from(["r0", "r1"]))
    def a_router_catches_up(self, router):
        self.catch_up(router)

    # -- operators -------------------------------------------------------------------------------

    @rule(rank=ranks, slots=st.integers(0, 7))
    def a_budget_is_asked_for(self, rank, slots):
        self.ask(ev.BudgetAsked, rank=rank, budget_bytes=slots * self.driver.spec.slot_bytes)

    @rule(rank=ranks)
    def a_drain_is_asked_for(self, rank):
        self.ask(ev.DrainAsked, rank=rank)

    @rule(rank=ranks)
    def an_undrain_is_asked_for(self, rank):
        self.ask(ev.UndrainAsked, rank=rank)

    @rule()
    def a_pause_is_asked_for(self):
        self.ask(ev.PauseAsked)

    @rule()
    def a_resume_is_asked_for(self):
        self.ask(ev.ResumeAsked)

    @rule()
    def a_plan_is_asked_for(self):
        self.ask(ev.PlanAsked)

    @precondition(lambda self: self.driver.engine.state.stored)
    @rule(pick=picks)
    def a_plan_is_applied(self, pick):
        stored = self.driver.engine.state.stored
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

    def kill_who_was_given_up(self):
        """The controller kills what it has declared lost: its process answers nothing any more."""
        for rank in self.driver.engine.state.ranks:
            shard = self.driver.shards.get(rank.rank)
            if (
                shard is not None
                and rank.status is RankStatus.LOST
                and rank.incarnation == shard.incarnation
            ):
                del self.driver.shards[rank.rank]

    # -- what must hold --------------------------------------------------------------------------

    @invariant()
    def nobody_holds_more_than_it_may(self):
        self.kill_who_was_given_up()
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
        self.kill_who_was_given_up()
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
    max_examples=60,
    stateful_step_count=25,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
TestEngineMachine = EngineMachine.TestCase
