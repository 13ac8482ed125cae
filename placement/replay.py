"""The engine over what was recorded: a journal segment, or an expert trace given as arrays.

Responsible for two questions: does today's code answer recorded events as it did then, byte for
byte; and what balance, writes and moves would the production trigger, policies and planner have
given on this traffic. Does no I/O: bytes and arrays come in, figures go out. Called by the CLI,
benchmarks, the simulator's checkers and golden tests.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from placement.config import RebalanceConfig
from placement.engine import EngineSnapshot, RebalanceEngine, compute_target
from placement.layout import ExpertLayout
from placement.load import LoadWindow
from placement.messages import events as ev
from placement.messages.codec import decode_as, decode_effects, decode_event, encode
from placement.messages.effects import (
    AbortAdd,
    AnyCommand,
    ComputeTarget,
    CopyExpert,
    Effects,
    ReleaseSlot,
    ReserveSlot,
    SetRankSlots,
    VerifyExpert,
)
from placement.policy import PolicyInput, propose
from placement.routing import RankAddress
from placement.scoring import balancedness, rank_load
from placement.topology import NUM_PHASES, MoeSpec, Phase, Topology

FloatArray = npt.NDArray[np.float64]


# -- recorded events -----------------------------------------------------------------------------


def replay_segment(
    snapshot: bytes, events: Iterable[bytes], effects: Iterable[bytes]
) -> tuple[str, ...]:
    """Differences between recorded effects and today's, as sentences; empty where every byte is the
    same.

    snapshot: bytes of the EngineSnapshot that opens the segment. Targets come from the recorded
    TargetComputed events; nothing is planned anew.
    """
    return replay_events(
        decode_as(snapshot, EngineSnapshot),
        [decode_event(data) for data in events],
        [decode_effects(data) for data in effects],
    )


def replay_events(
    snapshot: EngineSnapshot, events: Sequence[ev.AnyEvent], effects: Sequence[Effects]
) -> tuple[str, ...]:
    """As `replay_segment`, for decoded events and effects."""
    engine = RebalanceEngine.replayed(snapshot)
    found: list[str] = []
    for number, (event, want) in enumerate(zip(events, effects, strict=True)):
        got = engine.step(event)
        if encode(got) != encode(want):
            found.append(f"event {number} ({type(event).__name__}): {_first_difference(want, got)}")
    return tuple(found)


def recomputed(
    events: Sequence[ev.AnyEvent], effects: Sequence[Effects], config: RebalanceConfig
) -> tuple[str, ...]:
    """Recorded targets that today's policy and planner would not compute, as sentences."""
    wanted: dict[int, ComputeTarget] = {}
    found: list[str] = []
    for event, effect in zip(events, effects, strict=True):
        if isinstance(event, ev.TargetComputed) and event.request_id in wanted:
            got = compute_target(wanted.pop(event.request_id), config)
            same = isinstance(got, ev.TargetComputed) and encode(got.plan) == encode(event.plan)
            if not same:
                found.append(f"target {event.request_id} is computed differently now")
        for command in effect.commands:
            if isinstance(command, ComputeTarget):
                wanted[command.request_id] = command
    return tuple(found)


def _first_difference(want: Effects, got: Effects) -> str:
    for name in ("transitions", "commands", "records"):
        old, new = getattr(want, name), getattr(got, name)
        for i in range(max(len(old), len(new))):
            a = encode(old[i]) if i < len(old) else b""
            b = encode(new[i]) if i < len(new) else b""
            if a != b:
                was = type(old[i]).__name__ if i < len(old) else "nothing"
                now = type(new[i]).__name__ if i < len(new) else "nothing"
                return f"{name}[{i}] was {was}, is {now}" + (
                    " with other content" if was == now else ""
                )
    raise AssertionError("effects whose bytes differ are equal part by part")


# -- expert traces -------------------------------------------------------------------------------


class WindowFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One window of a trace: balancedness of three layouts on the window's own counts, and what was
    written in it.

    static: contiguous with round-robin extras, split equally. static_leveled: the same layout, our
    split. served: the engine's layout as it was when the window began, our split.
    """

    index: int
    pairs: int
    static: float
    static_leveled: float
    served: float
    slot_writes: int
    copy_bytes: int
    moves: int
    epoch: int


class TraceFigures(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """All windows, and totals: balancedness over all windows is the ratio of sums, as in
    `scoring`."""

    windows: tuple[WindowFigures, ...]
    static: float
    static_leveled: float
    served: float
    slot_writes: int
    copy_bytes: int
    moves: dict[str, int]
    records: tuple[str, ...]
    """Rule of every decision record, in order."""


def trace_windows(
    ids: npt.NDArray[np.integer],
    spec: MoeSpec,
    *,
    window_tokens: int,
    window_s: float,
    sub_windows: int,
) -> list[LoadWindow]:
    """Windows of `window_tokens` tokens each from expert ids [tokens, layers, top_k] in request
    order.

    A last window that is not full is left out. All tokens count as prefill. Raises ValueError for
    other shapes or ids.
    """
    if ids.ndim != 3 or ids.shape[1] != spec.num_layers:
        raise ValueError(f"ids must be [tokens, {spec.num_layers}, top_k], got {ids.shape}")
    if ids.size and (int(ids.min()) < 0 or int(ids.max()) >= spec.num_experts):
        raise ValueError(f"ids must lie in [0, {spec.num_experts}), got {ids.min()}..{ids.max()}")
    windows = []
    layer = np.arange(spec.num_layers)[None, :, None] * spec.num_experts
    for index in range(ids.shape[0] // window_tokens):
        chunk = ids[index * window_tokens : (index + 1) * window_tokens].astype(np.int64) + layer
        demand = np.zeros(
            (sub_windows, NUM_PHASES, spec.num_layers, spec.num_experts), dtype=np.int64
        )
        for part, piece in enumerate(np.array_split(chunk, sub_windows)):
            counts = np.bincount(piece.reshape(-1), minlength=spec.num_keys)
            demand[part, Phase.PREFILL] = counts.reshape(spec.num_layers, spec.num_experts)
        windows.append(
            LoadWindow(
                index=index,
                start_s=index * window_s,
                end_s=(index + 1) * window_s,
                demand=demand,
                executed_pairs=demand.sum(axis=0),
                rank_pairs=np.zeros((0, spec.num_layers), dtype=np.int64),
                rank_busy_s=np.zeros((0, NUM_PHASES), dtype=np.float64),
            )
        )
    return windows


def replay_trace(
    windows: Sequence[LoadWindow], spec: MoeSpec, topology: Topology, config: RebalanceConfig
) -> TraceFigures:
    """Run the production engine over closed windows with an executor that is perfect and takes no
    time.

    A plan decided at the end of a window is in place when the next begins, so no window is scored
    on its own knowledge.
    """
    runner = PerfectExecutor(spec, topology, config)
    static = static_layout(spec, topology, config)
    figures: list[WindowFigures] = []
    sums = np.zeros((3, 2), dtype=np.float64)
    for window in windows:
        counts = window.demand.sum(axis=(0, 1))
        served = runner.engine.layout()
        loads = (
            rank_load(static, counts, "equal"),
            rank_load(static, counts),
            rank_load(served, counts),
        )
        for row, load in enumerate(loads):
            sums[row] += load.mean(axis=0).sum(), load.max(axis=0).sum()
        before = runner.totals()
        runner.take(ev.WindowClosed(at_s=window.end_s, window=window))
        after = runner.totals()
        figures.append(
            WindowFigures(
                index=window.index,
                pairs=int(counts.sum()),
                static=balancedness(loads[0]),
                static_leveled=balancedness(loads[1]),
                served=balancedness(loads[2]),
                slot_writes=after[0] - before[0],
                copy_bytes=after[1] - before[1],
                moves=after[2] - before[2],
                epoch=runner.engine.state.epoch,
            )
        )
    ratio = np.where(sums[:, 1] > 0, sums[:, 0] / np.where(sums[:, 1] > 0, sums[:, 1], 1.0), 1.0)
    return TraceFigures(
        windows=tuple(figures),
        static=float(ratio[0]),
        static_leveled=float(ratio[1]),
        served=float(ratio[2]),
        slot_writes=sum(f.slot_writes for f in figures),
        copy_bytes=sum(f.copy_bytes for f in figures),
        moves={
            k: n - runner.fill_moves.get(k, 0) for k, n in runner.engine.state.moves_done.items()
        },
        records=tuple(runner.rules),
    )


def static_layout(spec: MoeSpec, topology: Topology, config: RebalanceConfig) -> ExpertLayout:
    """The layout that never moves: contiguous, extras in turn, in the same slots."""
    request = PolicyInput(
        spec=spec,
        topology=topology,
        layout=ExpertLayout.empty(
            topology, num_layers=spec.num_layers, num_experts=spec.num_experts
        ),
        scenarios=np.zeros((1, NUM_PHASES, spec.num_layers, spec.num_experts), dtype=np.float64),
        weights=np.ones(1, dtype=np.float64),
        staging_slots=config.staging_slots,
    )
    return propose("static", request)


class PerfectExecutor:
    """Carries out every effect at once and without fault: each rank holds what it is asked to
    hold."""

    def __init__(self, spec: MoeSpec, topology: Topology, config: RebalanceConfig) -> None:
        self.engine = RebalanceEngine(spec, topology, config, term=1, first_epoch=1, start_s=0.0)
        self.rules: list[str] = []
        self._config = config
        self._spec = spec
        self._next_tag = 1
        self.slot_writes = 0
        self.copy_bytes = 0
        for rank in topology.ranks:
            self.take(
                ev.RankJoined(
                    at_s=0.0,
                    rank=rank.rank,
                    node=rank.node,
                    failure_domain=rank.failure_domain,
                    profile=rank.profile,
                    num_slots=rank.num_slots,
                    address=RankAddress(rank=rank.rank, node=rank.node, address="", incarnation=1),
                )
            )
        self.slot_writes = self.copy_bytes = 0
        self.fill_moves = dict(self.engine.state.moves_done)

    def totals(self) -> tuple[int, int, int]:
        """(slot writes, bytes copied, moves done) since the first fill."""
        done = sum(self.engine.state.moves_done.values()) - sum(self.fill_moves.values())
        return self.slot_writes, self.copy_bytes, done

    def take(self, event: ev.AnyEvent) -> None:
        """Step the engine, and on with every answer, until nothing is left to answer."""
        waiting: list[ev.AnyEvent] = [event]
        while waiting:
            effects = self.engine.step(waiting.pop(0))
            self.rules.extend(r.rule for r in effects.records)
            for command in effects.commands:
                answer = self._carry_out(command, event.at_s)
                if answer is not None:
                    waiting.append(answer)

    def _carry_out(self, command: AnyCommand, at_s: float) -> ev.AnyEvent | None:
        match command:
            case ComputeTarget():
                answer = compute_target(command, self._config)
                return msgspec.structs.replace(answer, at_s=at_s)
            case ReserveSlot():
                self._next_tag += 1
                return ev.SlotReserved(at_s=at_s, step_id=command.step_id, slot_tag=self._next_tag)
            case CopyExpert():
                self.slot_writes += 1
                self.copy_bytes += self._spec.expert_bytes
                return ev.ExpertCopied(
                    at_s=at_s,
                    step_id=command.step_id,
                    copy_bytes=self._spec.expert_bytes,
                    seconds=0.0,
                )
            case VerifyExpert():
                return ev.ExpertVerified(at_s=at_s, step_id=command.step_id)
            case ReleaseSlot():
                return ev.SlotReleased(at_s=at_s, step_id=command.step_id)
            case SetRankSlots():
                return ev.BudgetApplied(at_s=at_s, rank=command.rank, num_slots=command.num_slots)
            case _:
                # Nothing fails here, so no add is aborted; tables and wishes to be woken need no
                # answer.
                assert not isinstance(command, AbortAdd), f"step {command.step_id} was aborted"
                return None
