"""Shards and routers of a simulated world: production roles with delays in place of work.

Responsible for carrying commands out after a while, for pins that last as long as a batch, and for
acknowledgements. Decides
nothing: what a shard may do is `roles.shard`'s to say. Called by the world.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import numpy.typing as npt

from placement.messages.effects import (
    AbortAdd,
    CopyExpert,
    ReleaseSlot,
    ReserveSlot,
    SetRankSlots,
    VerifyExpert,
)
from placement.messages.events import AnyEvent, StepFailed
from placement.roles.shard import Answer, ShardSlots, SlotPhase, Start, TermRefused, Work
from placement.routing import RoutingTable
from placement.sim.clock import VirtualClock
from placement.sim.log import Entry, Freed, Listed, MemoryUsed
from placement.split import level

ShardCommand = ReserveSlot | CopyExpert | VerifyExpert | AbortAdd | ReleaseSlot | SetRankSlots
Send = Callable[[AnyEvent], None]


@dataclass(slots=True)
class Delays:
    """Seconds of simulated work; each is drawn evenly between half and one and a half times its
    value."""

    network_s: float = 0.002
    copy_s: float = 0.05
    verify_s: float = 0.01
    compute_s: float = 0.02
    report_s: float = 0.25
    plan_s: float = 0.02


class SimShard:
    """One shard: commands in the order they were sent, copies from other shards, batches that
    pin."""

    def __init__(
        self,
        slots: ShardSlots,
        clock: VirtualClock,
        rng: np.random.Generator,
        delays: Delays,
        send: Send,
        note: Callable[[Entry], None],
        peers: dict[int, SimShard],
        expert_bytes: int,
    ) -> None:
        self.slots = slots
        self.alive = True
        self._clock, self._rng, self._delays = clock, rng, delays
        self._send, self._note, self._peers = send, note, peers
        self._expert_bytes = expert_bytes
        self._order_s = 0.0

    def take(self, term: int, command: ShardCommand) -> None:
        """A command on its way: arrives after the network's delay, never before an earlier one."""
        self._order_s = max(self._order_s, self._clock.now_s + self._draw(self._delays.network_s))
        self._clock.at(self._order_s, lambda: self._run(term, command))

    def install(self, table: RoutingTable) -> None:
        """Keep a table, as every shard does for routers that are cut off."""
        try:
            self.slots.install_table(table)
        except TermRefused:
            return  # an older controller's table that came late

    def _draw(self, mean_s: float) -> float:
        return mean_s * float(self._rng.uniform(0.5, 1.5))

    def _run(self, term: int, command: ShardCommand) -> None:
        if not self.alive:
            return
        try:
            self.slots.accept_term(term)
        except TermRefused:
            return  # an older controller's command; it is dead and waits for no answer
        done = self._execute(command)
        if isinstance(done, Start):
            self._work(done, command)
        else:
            self._answer([done])
        self._answer(self.slots.ledger.take_ready())

    def _execute(self, command: ShardCommand) -> Answer | Start:
        match command:
            case ReserveSlot():
                return self.slots.reserve(command)
            case CopyExpert():
                return self.slots.begin_copy(command)
            case VerifyExpert():
                return self.slots.begin_verify(command)
            case AbortAdd():
                return self.slots.abort(command)
            case ReleaseSlot():
                pins = self._pins(command.slot)
                done = self.slots.release(command)
                if not isinstance(done, Start | StepFailed):
                    self._note_freed(command.slot, command.slot_tag, pins)
                return done
            case _:
                return self.slots.resize(command)

    def _work(self, start: Start, command: ShardCommand) -> None:
        slot, tag = start.slot, start.tag
        if start.work is Work.COPY and isinstance(command, CopyExpert):
            source = command.source
            peer = self._peers.get(source.rank)
            if source.rank >= 0 and not (
                peer is not None
                and peer.alive
                and peer.slots.ledger.pin_copy(source.slot, source.slot_tag)
            ):
                self._answer(
                    self.slots.copy_failed(slot, tag, "source_lost", f"rank {source.rank}")
                )
                return
            took_s = self._draw(self._delays.copy_s)
            self._clock.after(took_s, lambda: self._copied(slot, tag, took_s, peer, source.slot))
        elif start.work is Work.VERIFY:
            self._clock.after(self._draw(self._delays.verify_s), lambda: self._verified(slot, tag))

    def _copied(
        self, slot: int, tag: int, took_s: float, peer: SimShard | None, source: int
    ) -> None:
        if peer is not None and peer.alive:
            peer._answer(peer.slots.ledger.unpin_copy(source))
        if self.alive:
            self._answer(self.slots.copied(slot, tag, self._expert_bytes, took_s))

    def _verified(self, slot: int, tag: int) -> None:
        if self.alive:
            self._answer(self.slots.verified(slot, tag))

    def _pins(self, slot: int) -> int:
        if not 0 <= slot < self.slots.ledger.num_slots:
            return 0
        found = self.slots.ledger.slots[slot]
        return found.batch_pins + found.copy_pins

    def _note_freed(self, slot: int, tag: int, pins: int) -> None:
        self._note(
            Freed(at_s=self._clock.now_s, rank=self.slots.rank, slot=slot, tag=tag, pins=pins)
        )

    def _answer(self, answers: list[Answer]) -> None:
        self._note(
            MemoryUsed(
                at_s=self._clock.now_s,
                rank=self.slots.rank,
                resident_bytes=self.slots.ledger.resident_bytes,
                reserved_bytes=self.slots.ledger.reserved_bytes,
                budget_bytes=self.slots.ledger.budget_bytes,
            )
        )
        for answer in answers:
            self._clock.after(self._draw(self._delays.network_s), partial(self._send, answer))

    def compute(
        self,
        slot: npt.NDArray[np.int32],
        tag: npt.NDArray[np.int64],
        pairs: npt.NDArray[np.int64],
        reply: Callable[[npt.NDArray[np.bool_]], None],
    ) -> None:
        """Serve a batch: compare tags, pin, work for a while, unpin, reply which of its rows were
        served."""
        served = self.slots.ledger.served(slot, tag)
        pinned = np.unique(slot[served])
        self.slots.ledger.pin(pinned)
        del pairs

        def finish() -> None:
            if self.alive:
                self._answer(self.slots.ledger.unpin(pinned))
                reply(served)
            else:
                reply(np.zeros_like(served))  # the connection broke: nothing of it counts

        self._clock.after(self._draw(self._delays.compute_s), finish)

    def verified_slots(self, num_experts: int) -> list[Listed]:
        """(key, rank, slot, tag) of what it would serve now."""
        return [
            (layer * num_experts + expert, self.slots.rank, i, tag)
            for i in range(self.slots.ledger.num_slots)
            if self.slots.ledger.phase(i) is SlotPhase.VERIFIED
            for layer, expert, tag in [self.slots.ledger.holder(i)]
        ]


@dataclass(slots=True)
class SimRouter:
    """One router: the newest table it knows, its work in flight by epoch, and its ledger of
    pairs."""

    name: str
    table: RoutingTable | None = None
    in_flight: dict[int, int] = field(default_factory=dict)
    """Epoch -> batches split under it that have no reply yet."""
    seq: int = 0
    wanted: int = 0
    served: int = 0
    stale: int = 0

    def install(self, table: RoutingTable) -> None:
        """Use the table if it is newer."""
        if table.is_newer(self.table):
            self.table = table

    @property
    def applied(self) -> int:
        """Epoch in use, -1 before the first."""
        return -1 if self.table is None else self.table.epoch

    @property
    def quiesced(self) -> int:
        """Greatest epoch below which nothing is in flight."""
        open_epochs = [e for e, n in self.in_flight.items() if n]
        return min([self.applied, *open_epochs])

    def split(
        self, layer: int, counts: npt.NDArray[np.int64], num_ranks: int, tie_offset: int
    ) -> list[tuple[int, npt.NDArray[np.int32], npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
        """Counts [experts] of a layer -> (rank, slots, tags, pairs) a rank, by the production
        split."""
        assert self.table is not None, "no table yet"
        table = self.table
        low, high = (
            int(table.replica_ptr[layer * table.num_experts]),
            int(table.replica_ptr[(layer + 1) * table.num_experts]),
        )
        ptr = table.replica_ptr[layer * table.num_experts : (layer + 1) * table.num_experts + 1]
        expert = np.repeat(np.arange(table.num_experts), np.diff(ptr))
        rank = table.replica_rank[low:high].astype(np.int64)
        tokens = level(expert, rank, counts, num_ranks, None, tie_offset)
        parts = []
        for target in np.unique(rank[tokens > 0]).tolist():
            mine = (rank == target) & (tokens > 0)
            parts.append(
                (
                    target,
                    table.replica_slot[low:high][mine],
                    table.replica_tag[low:high][mine],
                    tokens[mine],
                )
            )
        return parts
