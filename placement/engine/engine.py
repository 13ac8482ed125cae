"""`RebalanceEngine`: one entry point that takes an event and returns what should be done.

Responsible for dispatching events to the module that has the rule, and for settling: going on until
nothing moves any more. Does no I/O, reads no clock and never plans. Three drivers run it: the
controller, the simulator and replay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from placement.config import RebalanceConfig
from placement.engine import admin, elastic, ranks, recover, tables, trigger
from placement.engine.needs import next_need
from placement.engine.state import EngineSnapshot, EngineState, RankState, copy_of, initial
from placement.engine.steps import note_progress, offer
from placement.engine.supervise import copy_failed, settle_steps
from placement.engine.timers import ask_to_be_woken, pass_time
from placement.engine.turn import LayoutCache, Turn
from placement.layout import ExpertLayout
from placement.messages import events as ev
from placement.messages.effects import Effects, PublishTable, ReplaceRouter, Transition
from placement.migration import AddState, RemoveState, StepEvent
from placement.routing import RoutingTable
from placement.topology import DeviceProfile, MoeSpec, Topology

SETTLE_ROUNDS_MAX = 10_000
"""Rounds after which settling counts as a loop without end: each wave takes a few, so no real plan
comes near."""


class RebalanceEngine:
    """Placement of one service. Same events, same effects.

    topology: ranks that are expected and the device profiles they may name. term: this controller's
    number.
    first_epoch: number of the first table it may publish. paused: start without automatic plans.
    earlier: ranks of an earlier run of the service; of those that were added to it or removed from
    it the topology, which is the service file's, does not tell.
    """

    def __init__(
        self,
        spec: MoeSpec,
        topology: Topology,
        config: RebalanceConfig,
        *,
        term: int,
        first_epoch: int,
        start_s: float,
        paused: bool = False,
        earlier: Sequence[RankState] = (),
    ) -> None:
        self._spec = spec
        self._config = config
        self._profiles: tuple[DeviceProfile, ...] = topology.profiles
        self._cross_node_bytes_per_s = topology.cross_node_bytes_per_s
        self._cache = LayoutCache()
        self._table: RoutingTable | None = None
        self._state = initial(
            spec,
            topology,
            config,
            term=term,
            first_epoch=first_epoch,
            start_s=start_s,
            paused=paused,
        )
        elastic.carry_over(self._state, spec, earlier)

    @classmethod
    def restore(
        cls,
        snapshot: EngineSnapshot,
        transitions: Iterable[Transition] = (),
        *,
        term: int,
        first_epoch: int,
        start_s: float,
        paused: bool | None = None,
    ) -> RebalanceEngine:
        """The engine of a restarted controller: snapshot, then the transitions journalled after it,
        then a new term.

        Open steps go on when their ranks tell what they hold (RankJoined); what had not begun is
        cancelled. No table is published before every rank of the old one has answered or is lost.
        """
        engine = cls.replayed(snapshot)
        recover.restart(
            engine._state,
            snapshot.spec,
            transitions,
            term=term,
            first_epoch=first_epoch,
            start_s=start_s,
            router_silence_s=snapshot.config.router_silence_s,
        )
        if paused is not None:
            engine._state.paused = paused
        return engine

    @classmethod
    def replayed(cls, snapshot: EngineSnapshot) -> RebalanceEngine:
        """The engine exactly as it was when the snapshot was taken: for replay, not for a
        restart."""
        engine = cls.__new__(cls)
        engine._spec = snapshot.spec
        engine._config = snapshot.config
        engine._profiles = snapshot.profiles
        engine._cross_node_bytes_per_s = snapshot.cross_node_bytes_per_s
        engine._cache = LayoutCache()
        engine._table = None
        engine._state = copy_of(snapshot.state)
        return engine

    def snapshot(self) -> EngineSnapshot:
        """A copy of everything the engine knows; later steps do not change it."""
        return EngineSnapshot(
            spec=self._spec,
            config=self._config,
            profiles=self._profiles,
            cross_node_bytes_per_s=self._cross_node_bytes_per_s,
            state=copy_of(self._state),
        )

    @property
    def state(self) -> EngineState:
        """The live state, to be read by views; only `step` may change it."""
        return self._state

    @property
    def config(self) -> RebalanceConfig:
        """The settings it was made with."""
        return self._config

    def layout(self) -> ExpertLayout:
        """What is listed or will be."""
        return self._turn(self._state.now_s).layout()

    def topology(self) -> Topology:
        """Ranks as the next plan must see them."""
        return self._turn(self._state.now_s).topology()

    def table(self) -> RoutingTable | None:
        """The newest table that this engine published; None before its first, also after a
        restart: what it would publish then is not what (term, epoch) named before."""
        return self._table

    def step(self, event: ev.AnyEvent) -> Effects:
        """Take one event in. See `Effects` for the order in which its parts must be carried out."""
        state = self._state
        # A driver's clock is monotonic; should an event carry an older time, none of our waits may
        # run backwards.
        state.now_s = max(state.now_s, event.at_s)
        turn = self._turn(state.now_s)
        epoch = state.epoch
        _dispatch(turn, event)
        pass_time(turn)
        for _ in range(SETTLE_ROUNDS_MAX):
            moved = settle_steps(turn) or elastic.let_empty_ranks_go(turn)
            if not moved and not next_need(turn):
                break
        else:
            raise AssertionError("settling does not end")
        ask_to_be_woken(turn)
        assert state.epoch >= epoch, "epochs must grow"
        for command in turn.commands:
            if isinstance(command, PublishTable):
                self._table = command.table
        return turn.effects()

    def _turn(self, at_s: float) -> Turn:
        return Turn(
            spec=self._spec,
            config=self._config,
            profiles=self._profiles,
            cross_node_bytes_per_s=self._cross_node_bytes_per_s,
            state=self._state,
            at_s=at_s,
            cache=self._cache,
        )


def _dispatch(turn: Turn, event: ev.AnyEvent) -> None:
    if isinstance(event, ev.TimerFired):
        return  # time itself is handled after every event
    handler = _HANDLERS.get(type(event))
    if handler is not None:
        handler(turn, event)
    else:
        _step_answered(turn, event)


def _router_left(turn: Turn, event: ev.RouterLeft) -> None:
    known = turn.state.routers.get(event.router)
    if event.gone:
        turn.state.routers.pop(event.router, None)
        turn.commands.append(ReplaceRouter(router=event.router))
    elif known is not None:
        known.in_set = False
    turn.record("router_left", "noted", f"router {event.router}: {event.reason}")


def _step_answered(turn: Turn, event: ev.AnyEvent) -> None:
    """A shard's answer. One to a step that has ended, or that comes twice, means nothing more."""
    assert isinstance(event, _STEP_ANSWERS), f"no rule for {type(event).__name__}"
    step = turn.find_step(event.step_id)
    if step is None:
        return
    match event:
        case ev.SlotReserved():
            if step.tag in (-1, event.slot_tag):
                step.tag = event.slot_tag
            offer(turn, step, StepEvent.RESERVED)
        case ev.CopyProgress():
            if step.state == AddState.COPYING and event.copied_bytes > step.copied_bytes:
                step.copied_bytes = event.copied_bytes
                note_progress(turn, step.step.step_id)
        case ev.ExpertCopied():
            if offer(turn, step, StepEvent.COPIED) and turn.state.run is not None:
                turn.state.run.copied_bytes += event.copy_bytes
        case ev.ExpertVerified():
            offer(turn, step, StepEvent.VERIFIED)
        case ev.AddAborted():
            offer(turn, step, StepEvent.ABORTED)
        case ev.SlotReleased():
            offer(turn, step, StepEvent.RELEASED)
        case _:
            _step_failed(turn, event)


def _step_failed(turn: Turn, event: ev.StepFailed) -> None:
    step = turn.known_step(event.step_id)
    if event.code == "recalled":
        return  # the release that a recall forbade; the recall's own answer decides
    gone = event.code == "no_slot" and step.state in (RemoveState.RECALLED, RemoveState.DRAINED)
    why = f"{event.code}: {event.detail}"
    if gone:
        offer(turn, step, StepEvent.RELEASED, why)
    elif copy_failed(turn, step, event.code, why):
        turn.record(
            "step_aborted",
            "aborted",
            f"step {event.step_id} failed, {why}",
            plan_id=turn.plan_of(event.step_id),
            move_id=step.step.move_id,
        )


def _suspected(turn: Turn, event: ev.RankSuspected) -> None:
    ranks.rank_suspected(turn, event.rank, event.reason)


def _cleared(turn: Turn, event: ev.RankCleared) -> None:
    ranks.rank_cleared(turn, event.rank)


def _lost(turn: Turn, event: ev.RankLost) -> None:
    ranks.rank_lost(turn, event.rank, event.incarnation, event.reason)


def _router_joined(turn: Turn, event: ev.RouterJoined) -> None:
    tables.router_joined(turn, event.router, event.incarnation)


def _applied(turn: Turn, event: ev.TableApplied) -> None:
    tables.router_answered(turn, event.router, applied=event.epoch)


def _quiesced(turn: Turn, event: ev.TableQuiesced) -> None:
    tables.router_answered(turn, event.router, quiesced=event.epoch)


_STEP_ANSWERS = (
    ev.SlotReserved,
    ev.CopyProgress,
    ev.ExpertCopied,
    ev.ExpertVerified,
    ev.AddAborted,
    ev.SlotReleased,
    ev.StepFailed,
)
_HANDLERS: Mapping[type, Callable[[Turn, Any], None]] = MappingProxyType(
    {
        ev.RankJoined: ranks.rank_joined,
        ev.RankSuspected: _suspected,
        ev.RankCleared: _cleared,
        ev.RankLost: _lost,
        ev.RouterJoined: _router_joined,
        ev.RouterLeft: _router_left,
        ev.TableApplied: _applied,
        ev.TableQuiesced: _quiesced,
        ev.WindowClosed: trigger.window_closed,
        ev.TargetComputed: trigger.target_computed,
        ev.TargetFailed: trigger.target_failed,
        ev.BudgetApplied: admin.budget_applied,
        ev.PauseAsked: admin.pause_asked,
        ev.ResumeAsked: admin.resume_asked,
        ev.DrainAsked: admin.drain_asked,
        ev.UndrainAsked: admin.undrain_asked,
        ev.RankAddAsked: elastic.rank_add_asked,
        ev.RankRemoveAsked: elastic.rank_remove_asked,
        ev.RankReplaceAsked: elastic.rank_replace_asked,
        ev.BudgetAsked: admin.budget_asked,
        ev.PlanAsked: admin.plan_asked,
        ev.ApplyAsked: admin.apply_asked,
    }
)
