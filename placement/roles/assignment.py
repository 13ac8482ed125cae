"""Which rank gets which rows and pairs of a batch: the split of one table, grouped by rank.

Worked example. Two rows, k = 2, ids [[0, 1], [0, 2]]; expert 0 on ranks 0 and 1, expert 1 on rank
0, expert 2 on rank 1. Row 0 goes to rank 0 whole and row 1 to rank 1 whole: two parts, each with
one row and two pairs. A row travels once a rank.

Which split. The cost model bounds a rank's time for a batch by its pairs and by the experts it
reads, whichever takes longer; an expert costs `memory_bound_pairs` pairs to read. A batch with more
pairs an active expert than that is compute-bound and levels tokens. Any other one is memory-bound:
it levels activated experts, one replica each, unless that would keep its slowest rank busy for
longer, as it does where one expert has most of the pairs. In a compute-bound batch a pair that
would travel alone may join its row on a rank beyond that rank's quota, as long as the rank ends no
later than the last one.

*Work* is the unit both have in common, and that of backlog: pairs, or the pairs' worth of reading
if that is more. With 20 pairs to a read, 30 pairs of 1 expert are 30 of work, and of 2 experts 40.

Responsible for turning a routing table into split indices and a split into parts. Must never decide
what is retried. Called by `placement.roles.router`; `PlanJob.run` is safe in another thread, it
touches nothing shared.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from placement.roles.kernels import group_by_rank
from placement.routing import RoutingTable
from placement.split import (
    CompiledLayer,
    assign_pairs,
    compile_layer,
    count_ids,
    split_activated,
    split_counts,
)

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]
Bytes = npt.NDArray[np.uint8]

COMPILED_MAX = 512
"""Layer indices kept a table: layers x the few sets of avoided ranks in use. The oldest goes."""


@dataclass(frozen=True, slots=True, eq=False)
class Part:
    """What one rank gets: R rows, P pairs, in order of (row, k).

    row_id: int32 [R], row of the request, ascending. pair_row: int32 [P] indexes `row_id`. pair_k,
    pair_expert, pair_slot int32 [P]; pair_tag int64 [P]. work_pairs: what they cost, in pairs.
    """

    rank: int
    work_pairs: float
    row_id: Int32s
    pair_row: Int32s
    pair_k: Int32s
    pair_expert: Int32s
    pair_slot: Int32s
    pair_tag: Int64s

    @property
    def num_pairs(self) -> int:
        """Pairs the rank computes."""
        return int(self.pair_row.shape[0])


@dataclass(frozen=True, slots=True, eq=False)
class LayerReplicas:
    """Replicas of one layer that may be used, indexed for splitting; slot and tag by replica of
    `compiled`. alone: bool [E], experts that have them on one rank only; some_alone: there are any.
    """

    compiled: CompiledLayer
    slot: Int32s
    tag: Int64s
    alone: Mask = field(init=False)
    some_alone: bool = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "alone", np.diff(self.compiled.host_ptr) < 2)
        object.__setattr__(self, "some_alone", bool(self.alone.any()))

    def any_alone(self, experts: Int32s) -> bool:
        """Whether one of these experts could be asked of one rank only."""
        return self.some_alone and bool(self.alone.take(experts).any())


class TableIndex:
    """Split indices of one routing table, each made when first asked for."""

    def __init__(self, table: RoutingTable) -> None:
        self.table = table
        listed = [entry.rank for entry in table.ranks]
        self.num_ranks = max(listed, default=0) + 1
        self.incarnation = {entry.rank: entry.incarnation for entry in table.ranks}
        self.node = {entry.rank: entry.node for entry in table.ranks}
        self.many_nodes = len(set(self.node.values())) > 1
        self._layers: dict[tuple[int, tuple[frozenset[int], ...]], LayerReplicas] = {}
        self._complete: dict[int, bool] = {}

    def layer(self, layer: int, *avoid: frozenset[int]) -> LayerReplicas:
        """Replicas of a layer, without those on avoided ranks unless an expert has no other. Of
        several sets each is worse than the one before: an expert with none but avoided replicas
        keeps those on the least bad ranks."""
        key = (layer, avoid if any(avoid) else ())
        found = self._layers.get(key)
        if found is None:
            found = self._compile(*key)
            if len(self._layers) >= COMPILED_MAX:
                del self._layers[next(iter(self._layers))]
            self._layers[key] = found
        return found

    def complete(self, layer: int) -> bool:
        """Whether every expert of the layer has a listed replica."""
        known = self._complete.get(layer)
        if known is None:
            first = layer * self.table.num_experts
            ptr = self.table.replica_ptr[first : first + self.table.num_experts + 1]
            known = self._complete[layer] = bool((ptr[1:] > ptr[:-1]).all())
        return known

    def missing(self, layer: int, experts: Int64s) -> list[int]:
        """Those of `experts` that have no listed replica in the layer."""
        base = layer * self.table.num_experts
        ptr = self.table.replica_ptr
        empty = ptr[base + experts + 1] == ptr[base + experts]
        return [int(expert) for expert in experts[empty]]

    def _compile(self, layer: int, avoid: tuple[frozenset[int], ...]) -> LayerReplicas:
        table = self.table
        base = layer * table.num_experts
        ptr = table.replica_ptr[base : base + table.num_experts + 1].astype(np.int64)
        low, high = int(ptr[0]), int(ptr[-1])
        expert = np.repeat(np.arange(table.num_experts, dtype=np.int64), np.diff(ptr))
        rank = table.replica_rank[low:high].astype(np.int64)
        if avoid:
            badness = np.zeros(rank.shape[0], np.int64)
            for level, ranks in enumerate(avoid, 1):
                badness[np.isin(rank, np.fromiter(ranks, np.int64, len(ranks)))] = level
            best = np.full(table.num_experts, len(avoid), np.int64)
            np.minimum.at(best, expert, badness)
            # -1 is an empty slot to the splitter.
            expert = np.where(badness == best[expert], expert, -1)
        compiled = compile_layer(expert, rank, table.num_experts, self.num_ranks)
        at = low + compiled.replica_slot
        return LayerReplicas(compiled, table.replica_slot[at], table.replica_tag[at])


def assign(
    replicas: LayerReplicas,
    ids: Int32s,
    valid: Bytes,
    row_id: Int32s,
    backlog: Int64s,
    tie_offset: int,
    memory_bound_pairs: float = 0.0,
) -> tuple[Part, ...]:
    """Split rows over ranks -> one part for each rank that gets pairs, by rank.

    ids: int32 [n, k]. valid: uint8 [n, k]. row_id: int32 [n], number of each row in its request.
    backlog: int64 [ranks] of work, in pairs. memory_bound_pairs: pairs of an expert that take as
    long as reading it, 0 = reading costs nothing.

    Raises SplitError where an expert with valid pairs has no replica.
    """
    compiled = replicas.compiled
    counts = count_ids(ids, valid, compiled.num_experts)
    quotas, room = choose_quotas(compiled, counts, backlog, tie_offset, memory_bound_pairs)
    chosen = assign_pairs(compiled, ids, valid, quotas, tie_offset, room)
    served = np.bincount(chosen[chosen >= 0], minlength=compiled.num_replicas)
    work = _work(compiled, served, memory_bound_pairs)
    pair_ptr, row_ptr, pair_flat, pair_row, rows = group_by_rank(
        chosen, compiled.replica_rank, compiled.num_ranks
    )
    width = ids.shape[1]
    flat_ids = ids.reshape(-1)
    flat_chosen = chosen.reshape(-1)
    parts = []
    for rank in range(compiled.num_ranks):
        low, high = int(pair_ptr[rank]), int(pair_ptr[rank + 1])
        if low == high:
            continue
        flat = pair_flat[low:high]
        replica = flat_chosen[flat]
        parts.append(
            Part(
                rank=rank,
                work_pairs=float(work[rank]),
                row_id=row_id[rows[int(row_ptr[rank]) : int(row_ptr[rank + 1])]],
                pair_row=pair_row[low:high],
                pair_k=(flat % width).astype(np.int32),
                pair_expert=flat_ids[flat],
                pair_slot=replicas.slot[replica],
                pair_tag=replicas.tag[replica],
            )
        )
    return tuple(parts)


def choose_quotas(
    compiled: CompiledLayer,
    counts: Int64s,
    backlog: Int64s,
    tie_offset: int,
    memory_bound_pairs: float,
) -> tuple[Int64s, Int64s | None]:
    """The split that suits the batch -> tokens of each replica int64 [replicas], and room int64
    [ranks] for `assign_pairs`, None where a pair elsewhere might be a read more.

    Expert 0 on ranks 0 and 1, expert 1 on rank 0, expert 2 on rank 2. Reading costs 20 pairs, so
    rank 0 should not read expert 0 beside its own:

    >>> layer = compile_layer([0, 0, 1, 2], [0, 1, 0, 2], num_experts=3, num_ranks=3)
    >>> backlog = np.zeros(3, np.int64)
    >>> choose_quotas(layer, np.array([5, 2, 2]), backlog, 0, 20.0)[0].tolist()
    [0, 5, 2, 2]

    With 52 pairs of expert 0, two reads (40) on rank 0 end earlier than all 52 on rank 1:

    >>> choose_quotas(layer, np.array([52, 2, 2]), backlog, 0, 20.0)[0].tolist()
    [25, 27, 2, 2]

    Raises SplitError as `split_counts` does.
    """
    by_tokens = split_counts(compiled, counts, backlog, tie_offset)
    if counts.sum() > memory_bound_pairs * np.count_nonzero(counts):
        return by_tokens, _room(compiled, by_tokens, backlog, memory_bound_pairs)
    queued_experts = np.rint(backlog / max(1.0, memory_bound_pairs)).astype(np.int64)
    by_experts = split_activated(compiled, counts, queued_experts, tie_offset)
    ends = [
        _last_end(_work(compiled, quotas, memory_bound_pairs), backlog)
        for quotas in (by_experts, by_tokens)
    ]
    return (by_experts if ends[0] <= ends[1] else by_tokens), None


def _work(compiled: CompiledLayer, quotas: Int64s, memory_bound_pairs: float) -> Floats:
    """Work of each rank in pairs: float64 [ranks]."""
    rank, num_ranks = compiled.replica_rank, compiled.num_ranks
    pairs = np.bincount(rank, quotas, num_ranks)
    reads = np.bincount(rank, quotas > 0, num_ranks)
    work: Floats = np.maximum(pairs, memory_bound_pairs * reads)
    return work


def _last_end(work: Floats, backlog: Int64s) -> float:
    """Work until the last rank that serves the batch has served it, its backlog first."""
    return float(np.where(work > 0, work + backlog, 0.0).max(initial=0.0))


def _room(
    compiled: CompiledLayer, quotas: Int64s, backlog: Int64s, memory_bound_pairs: float
) -> Int64s:
    """Pairs each rank may take on top and still end no later than the last one.

    None for a rank that would not have read all its experts by then: a pair there might be a read
    more.
    """
    pairs = np.bincount(compiled.replica_rank, quotas, compiled.num_ranks).astype(np.float64)
    reads = np.bincount(compiled.replica_rank, minlength=compiled.num_ranks)
    last_end = _last_end(pairs, backlog)
    fits = memory_bound_pairs * reads + backlog <= last_end
    return np.where(fits, last_end - backlog - pairs, 0.0).astype(np.int64)
