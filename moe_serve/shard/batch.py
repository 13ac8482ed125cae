"""One batch of a shard: several sub-calls of a layer as one forward, and its results as one reply
each.

Responsible for merging and splitting arrays. Must never decide what is served: it is told which
pairs are resident. Called by the shard's core on the thread whose turn it is to compute.

Worked example: sub-call a has rows 0, 1 and b has row 0; row 1 of a names a stale slot. The batch
has two rows, a's row 0 and b's row 0; a is answered [SERVED, STALE] with one partial row, b
[SERVED] with one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from types import MappingProxyType
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from moe_serve.ports import DType, RowStatus, SubCall
from moe_serve.shard.compute.base import SlotWork
from moe_serve.shard.rows import from_float32, to_float32
from moe_serve.shard.work_queue import Work
from moe_serve.weights.dtypes import ServingDtype
from placement.topology import NUM_PHASES

WIRE_TO_SERVING: Final = MappingProxyType[DType, ServingDtype](
    {DType.FLOAT32: "float32", DType.BFLOAT16: "bfloat16", DType.FLOAT16: "float16"}
)
"""Name of a wire dtype as `rows` knows it."""


_NO_PHASES: Final = np.zeros(0, np.int32)


@dataclass(frozen=True, slots=True)
class Admitted:
    """A sub-call and what of it is computed. `row_status` uint8 [R]; `pairs` bool [P] or None where
    all are."""

    work: Work
    row_status: npt.NDArray[np.uint8]
    pairs: npt.NDArray[np.bool_] | None
    detail: str = ""

    @property
    def num_rows(self) -> int:
        """Rows that are computed."""
        return len(self.row_status) - int(np.count_nonzero(self.row_status))

    @property
    def num_pairs(self) -> int:
        """Pairs that are computed."""
        if self.pairs is None:
            return len(self.work.call.pair_row)
        return int(np.count_nonzero(self.pairs))


def admit(work: Work, resident: npt.NDArray[np.bool_], num_absent: int) -> Admitted:
    """Refuse whole every row of which a pair is not resident; `resident` bool [P], of which
    `num_absent` are not set."""
    call = work.call
    row_status = np.zeros(len(call.rows), np.uint8)
    if num_absent == 0:
        return Admitted(work, row_status, None)
    row_status[call.pair_row[~resident]] = RowStatus.STALE
    stale = int(np.flatnonzero(~resident)[0])
    return Admitted(
        work,
        row_status,
        row_status[call.pair_row] == RowStatus.SERVED,
        f"slot {int(call.pair_slot[stale])} does not hold tag {int(call.pair_tag[stale])} "
        f"(layer {call.layer} expert {int(call.pair_expert[stale])})",
    )


def refuse(work: Work, status: RowStatus, detail: str) -> Admitted:
    """Refuse every row."""
    call = work.call
    return Admitted(
        work,
        np.full(len(call.rows), status, np.uint8),
        np.zeros(len(call.pair_row), np.bool_),
        detail,
    )


@dataclass(frozen=True, slots=True)
class MergedBatch:
    """Arrays for one forward. Rows of sub-call i are begin[i] .. begin[i + 1]; `phase` is that of
    all pairs, -1 where they differ."""

    rows: npt.NDArray[np.float32]
    begin: tuple[int, ...]
    pair_row: npt.NDArray[np.int32]
    pair_slot: npt.NDArray[np.int32]
    pair_gate: npt.NDArray[np.float32]
    pair_phase: npt.NDArray[np.int32]
    phase: int


def merge(admitted: Sequence[Admitted], hidden_size: int) -> MergedBatch:
    """Served rows of all sub-calls, widened to float32, with their pairs renumbered. Only to be
    read: where there is nothing to merge they are the sub-call's own arrays."""
    phases = {one.work.call.phase for one in admitted}
    phase = phases.pop() if len(phases) == 1 else -1
    if len(admitted) == 1 and admitted[0].pairs is None:
        call = admitted[0].work.call
        rows = to_float32(call.rows, WIRE_TO_SERVING[call.dtype])
        pairs = call.pair_row, call.pair_slot, call.pair_gate
        return MergedBatch(rows, (0, len(rows)), *pairs, _NO_PHASES, phase)
    begin = (0, *accumulate(one.num_rows for one in admitted))
    rows = np.empty((begin[-1], hidden_size), np.float32)
    parts = [_part(one, begin[i], rows[begin[i] : begin[i + 1]]) for i, one in enumerate(admitted)]
    pair_row, pair_slot, pair_gate, pair_phase = (
        parts[0] if len(parts) == 1 else tuple(map(np.concatenate, zip(*parts, strict=True)))
    )
    return MergedBatch(rows, begin, pair_row, pair_slot, pair_gate, pair_phase, phase)


def _part(
    one: Admitted, first_row: int, out: npt.NDArray[np.float32]
) -> tuple[npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any]]:
    """Widen the served rows into `out`; returns (pair_row, pair_slot, pair_gate, pair_phase) of the
    computed pairs."""
    call = one.work.call
    dtype = WIRE_TO_SERVING[call.dtype]
    if one.pairs is None:
        to_float32(call.rows, dtype, out=out)
        pair_row, pair_slot, pair_gate = call.pair_row, call.pair_slot, call.pair_gate
    else:
        served = one.row_status == RowStatus.SERVED
        to_float32(call.rows[served], dtype, out=out)
        place = np.cumsum(served, dtype=np.int32) - np.int32(1)
        pair_row = place[call.pair_row[one.pairs]]
        pair_slot, pair_gate = call.pair_slot[one.pairs], call.pair_gate[one.pairs]
    phase = np.full(len(pair_row), call.phase, np.int32)
    return pair_row + np.int32(first_row), pair_slot, pair_gate, phase


def partial_rows(
    call: SubCall, out: npt.NDArray[np.float32], begin: int, end: int
) -> npt.NDArray[Any]:
    """A sub-call's rows of the result, in its dtype."""
    return from_float32(out[begin:end], WIRE_TO_SERVING[call.dtype])


def work_by_phase(batch: MergedBatch, work: SlotWork) -> list[tuple[int, SlotWork]]:
    """Split what a forward executed by phase.

    Seconds of a slot are shared out by pairs: prefill and decode rows of one batch read the same
    weights once.
    """
    if batch.phase >= 0:
        return [(batch.phase, work)]
    width = int(work.slots.max(initial=0)) + 1
    index = batch.pair_phase.astype(np.int64) * width + batch.pair_slot
    counts = np.bincount(index, minlength=NUM_PHASES * width).reshape(NUM_PHASES, width)
    seconds_a_pair = np.zeros(width)
    seconds_a_pair[work.slots] = work.seconds / np.maximum(work.pairs, 1)
    parts = []
    for phase in range(NUM_PHASES):
        slots = np.flatnonzero(counts[phase])
        pairs = counts[phase, slots].astype(np.int64)
        part = SlotWork(slots.astype(np.int32), pairs, pairs * seconds_a_pair[slots])
        parts.append((phase, part))
    return parts
