"""What a shard notes of itself for a history: commands, tables, slots, memory, rows served.

Responsible for saying what memory really holds, found apart from what the shard's own books and
proofs say: readers are counted beside the pins, and an expert is recognised by its bytes. Must
never change anything. Called by core, commands and copy server, only where settings name a folder.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from moe_serve.errors import MoeServeError
from moe_serve.ports import SubReply
from moe_serve.shard.batch import Admitted
from moe_serve.shard.compute.base import ComputeBackend
from moe_serve.shard.served_model import ExpertSource, ServedModel
from moe_serve.shard.slot_pool import SlotPool
from moe_serve.telemetry.fact_log import FactLog
from moe_serve.weights.canonical import canonical_digest
from placement.messages.effects import SetRankSlots, ShardCommand
from placement.messages.history import (
    Began,
    CommandTaken,
    Died,
    MemoryUsed,
    RowsServed,
    SlotFreed,
    SlotProved,
    TableInstalled,
    TermRefused,
)
from placement.roles.shard import ShardSlots
from placement.routing import RoutingTable

LOOKED_BYTES_MAX = 1 << 16
"""Experts up to this size are looked at with each batch, larger ones with each proof."""
UNKNOWN = -1
"""Key of bytes that are no expert of the model."""


class ShardFacts:
    """Of one life of one shard. Safe to call from several threads."""

    def __init__(
        self,
        log: FactLog,
        model: ServedModel,
        slots: ShardSlots,
        pool: SlotPool,
        experts: ExpertSource,
        backend: ComputeBackend,
    ) -> None:
        self._log = log
        self._life = log.life(f"rank{slots.rank}/{slots.incarnation}")
        self._model = model
        self._slots = slots
        self._pool = pool
        self._backend = backend
        self._small = model.expert.canonical_bytes <= LOOKED_BYTES_MAX
        self._lock = threading.Lock()
        self._readers: Counter[int] = Counter()
        self._tags: dict[int, int] = {}
        """Tag that each slot's memory was taken for."""
        self._held: dict[int, int] = {}
        """Key whose bytes each slot held when it was last looked at."""
        self._ended = False
        keys = range(model.num_keys)
        self._digests = [experts.canonical_sha256(*divmod(k, model.num_experts)) for k in keys]
        self._key_of = {digest: key for key, digest in reversed(list(enumerate(self._digests)))}

    # ------------------------------------------------------------------------------- the life
    def began(self) -> None:
        """It serves from now on."""
        self._life.note(Began, place=f"rank{self._slots.rank}", pid=os.getpid())

    def died(self) -> None:
        """It ends, because it was asked to. Idempotent."""
        with self._lock:
            ended, self._ended = self._ended, True
        if not ended:
            self._life.note(Died, cause="left")
            self._log.close()

    # --------------------------------------------------- under the core's lock, but the last two
    def taken(self, term: int, command: ShardCommand) -> None:
        """A command is obeyed."""
        step_id = -1 if isinstance(command, SetRankSlots) else command.step_id
        self._life.note(CommandTaken, term=term, command=type(command).__name__, step_id=step_id)

    def refused(self, term: int, seen: int) -> None:
        """A command or table of an old term is not."""
        self._life.note(TermRefused, term=term, seen=seen)

    def installed(self, table: RoutingTable) -> None:
        """A table is kept."""
        self._life.note(TableInstalled, term=table.term, epoch=table.epoch)

    def claimed(self, slot: int, tag: int) -> None:
        """Memory was taken for a fill."""
        self._tags[slot] = tag

    def freed(self, slot: int) -> None:
        """Memory was given back."""
        with self._lock:
            self._held.pop(slot, None)
            readers = self._readers[slot]
        self._life.note(
            SlotFreed,
            rank=self._slots.rank,
            slot=slot,
            slot_tag=self._tags.pop(slot),
            readers=readers,
        )

    def memory(self) -> None:
        """Bytes are taken or given back."""
        ledger = self._slots.ledger
        self._life.note(
            MemoryUsed,
            rank=self._slots.rank,
            resident_bytes=ledger.resident_bytes,
            reserved_bytes=ledger.reserved_bytes,
            held_bytes=self._pool.resident_bytes,
            budget_bytes=ledger.budget_bytes,
        )

    def proved(self, slot: int, tag: int, key: int) -> None:
        """A fill is served from now on; it was looked at before."""
        held, version = self._held.get(slot, UNKNOWN), self._model.weights_version
        intact = held == key or held != UNKNOWN
        self._life.note(
            SlotProved,
            rank=self._slots.rank,
            slot=slot,
            slot_tag=tag,
            key=key,
            version=version,
            held_key=held,
            held_version=version if intact else "",
            intact=intact,
        )

    def look(self, slot: int, key: int) -> None:
        """See whose bytes a loaded slot holds; `key`'s, where several experts are alike."""
        try:
            digest = canonical_digest(self._backend.canonical_bytes(slot))
        except MemoryError:
            return  # what was seen before stands
        found = key if digest == self._digests[key] else self._key_of.get(digest, UNKNOWN)
        with self._lock:
            self._held[slot] = found

    # ------------------------------------------------------------------------------- reading
    def begin_reading(self, slot: int) -> None:
        """A batch or copy reads the slot from now on."""
        with self._lock:
            self._readers[slot] += 1

    def end_reading(self, slot: int) -> None:
        """It has read it."""
        with self._lock:
            self._readers[slot] -= 1

    def watched(
        self,
        admitted: Sequence[Admitted],
        pinned: npt.NDArray[np.intp],
        run: Callable[[], list[SubReply | MoeServeError]],
    ) -> list[SubReply | MoeServeError]:
        """`run`, which computes a batch from these slots. They are pinned before and after, and its
        answers have not left."""
        slots = pinned.tolist()
        for slot in slots:
            self.begin_reading(slot)
        try:
            answers = run()
            for one, answer in zip(admitted, answers, strict=True):
                if isinstance(answer, SubReply) and one.num_pairs:
                    self._rows_served(one)
        finally:
            for slot in slots:
                self.end_reading(slot)
        return answers

    def _rows_served(self, one: Admitted) -> None:
        call = one.work.call
        pairs = slice(None) if one.pairs is None else one.pairs
        slots = call.pair_slot[pairs].tolist()
        first = call.layer * self._model.num_experts
        keys = [first + expert for expert in call.pair_expert[pairs].tolist()]
        if self._small:
            for slot, key in dict(zip(slots, keys, strict=True)).items():
                self.look(slot, key)
        held = [self._held.get(slot, UNKNOWN) for slot in slots]
        intact = UNKNOWN not in held
        self._life.note(
            RowsServed,
            rank=self._slots.rank,
            sub_id=call.sub_id,
            request=call.request_key,
            cause=int(call.cause),
            row=tuple(call.row_id[call.pair_row[pairs]].tolist()),
            k=tuple(call.pair_k[pairs].tolist()),
            slot=tuple(slots),
            slot_tag=tuple(call.pair_tag[pairs].tolist()),
            key=tuple(keys),
            held_key=tuple(held),
            held_version=self._model.weights_version if intact else "",
            intact=intact,
        )
