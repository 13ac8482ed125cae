"""The index tables a device needs for one batch, computed on the host and sent in one transfer.

Responsible for turning pairs into: which row each sorted pair reads, which parts each row adds, and
which rows of which slot a program works on. Must never touch rows, weights or a device. Called by
the torch backend.

Why on the host: pairs arrive there, the tables are a few kilobytes, and nothing then has to wait
for the device to know a size.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moe_serve.shard.compute.order import PairOrder, order_by_slot
from moe_serve.shard.kernels import sort_by_key


@dataclass(frozen=True, slots=True)
class CombineTable:
    """Which parts each row adds, in the order of the batch: part[r, k] int32 and gate[r, k]
    float32, both [R, K].

    K is the most pairs any row has; rows with fewer are padded with part P (a row of zeros behind
    the parts) and gate 0. Adding column by column gives the same sum each time, which atomic adds
    would not.
    """

    part: NDArray[np.int32]
    gate: NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class RowBlocks:
    """Work of one program each: sorted pairs begin[b]..end[b]-1, all of group[b]; each block has at
    most `block_rows`.
    """

    begin: NDArray[np.int32]
    end: NDArray[np.int32]
    group: NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class BatchTables:
    """Pairs grouped by slot, the row each sorted pair reads (`row` int32 [P]), and how rows add
    parts up.
    """

    order: PairOrder
    row: NDArray[np.int32]
    combine: CombineTable


def batch_tables(
    num_rows: int,
    pair_row: NDArray[np.int32],
    pair_slot: NDArray[np.int32],
    pair_gate: NDArray[np.float32],
) -> BatchTables:
    """Tables of a batch of `num_rows` rows, from its P pairs."""
    order = order_by_slot(pair_slot)
    return BatchTables(
        order=order,
        row=pair_row[order.order],
        combine=_combine_table(num_rows, pair_row, pair_gate, order),
    )


def row_blocks(order: PairOrder, block_rows: int) -> RowBlocks:
    """Cut each group into blocks of `block_rows` sorted pairs; the last block of a group may be
    shorter.

    Example: groups of 3 and 1 pairs, blocks of 2 -> begin [0, 2, 3], end [2, 3, 4], group [0, 0,
    1].
    """
    blocks_of_group = -(-(order.end - order.begin) // block_rows)
    group = np.repeat(np.arange(order.slots.shape[0], dtype=np.int32), blocks_of_group)
    first = np.cumsum(blocks_of_group) - blocks_of_group
    within = np.arange(group.shape[0]) - first[group]
    begin = (order.begin[group] + within * block_rows).astype(np.int32)
    end = np.minimum(begin + block_rows, order.end[group]).astype(np.int32)
    return RowBlocks(begin=begin, end=end, group=group)


def _combine_table(
    num_rows: int, pair_row: NDArray[np.int32], pair_gate: NDArray[np.float32], order: PairOrder
) -> CombineTable:
    num_pairs = pair_row.shape[0]
    sorted_position = np.empty(num_pairs, np.int32)
    sorted_position[order.order] = np.arange(num_pairs, dtype=np.int32)
    starts = np.empty(num_rows + 1, np.int32)
    by_row = np.empty(num_pairs, np.int32)
    used = np.empty(min(num_pairs, num_rows), np.int32)
    assert sort_by_key(pair_row, starts, by_row, used) >= 0, "pair_row is in range"
    pairs_of_row = np.diff(starts)
    width = int(pairs_of_row.max(initial=0))
    part = np.full((num_rows, width), num_pairs, np.int32)
    gate = np.zeros((num_rows, width), np.float32)
    row = pair_row[by_row]
    column = np.arange(num_pairs, dtype=np.int32) - starts[row]
    part[row, column] = sorted_position[by_row]
    gate[row, column] = pair_gate[by_row]
    return CombineTable(part=part, gate=gate)
