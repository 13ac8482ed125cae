"""The routing table that the controller publishes and routers and shards keep: immutable, numbered
(term, epoch).

Responsible for the table's form and for building it from a layout. Does not split (placement.split)
and does not send.

A replica is named by (rank, slot, tag). The *tag* is the fill number of the slot in that shard
incarnation: it proves what the slot holds. A table of an older epoch whose tags still match is
served; a reused slot has another tag.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import numpy as np
import numpy.typing as npt

from placement.layout import ExpertLayout, SlotId


class RankAddress(msgspec.Struct, frozen=True, kw_only=True):
    """How to reach one shard: `address` is a ZeroMQ endpoint ("tcp://host:port"); `public_key` its
    CURVE key or ""."""

    rank: int
    node: str
    address: str
    incarnation: int
    public_key: str = ""


class RoutingTable(msgspec.Struct, frozen=True, kw_only=True, eq=False):
    """Every listed replica of every expert, as compressed rows by key = layer * num_experts +
    expert.

    Replicas of key x are positions replica_ptr[x] .. replica_ptr[x + 1] of replica_rank (int32),
    replica_slot (int32) and replica_tag (int64). Arrays are read-only. (term, epoch) names exactly
    one table; epochs only grow.
    """

    term: int
    epoch: int
    model: str
    weights_version: str
    num_layers: int
    num_experts: int
    replica_ptr: npt.NDArray[np.int32]
    replica_rank: npt.NDArray[np.int32]
    replica_slot: npt.NDArray[np.int32]
    replica_tag: npt.NDArray[np.int64]
    ranks: tuple[RankAddress, ...]

    def __post_init__(self) -> None:
        for array in (self.replica_ptr, self.replica_rank, self.replica_slot, self.replica_tag):
            array.setflags(write=False)

    @property
    def order(self) -> tuple[int, int]:
        """(term, epoch): compare to know which of two tables is newer."""
        return self.term, self.epoch

    def is_newer(self, than: RoutingTable | None) -> bool:
        """Whether this table replaces `than` (None: there is none yet). The one rule for all."""
        return than is None or self.order > than.order

    def replicas(self, layer: int, expert: int) -> tuple[tuple[int, int, int], ...]:
        """(rank, slot, tag) of each listed replica of an expert."""
        key = layer * self.num_experts + expert
        low, high = int(self.replica_ptr[key]), int(self.replica_ptr[key + 1])
        return tuple(
            (int(self.replica_rank[i]), int(self.replica_slot[i]), int(self.replica_tag[i]))
            for i in range(low, high)
        )

    def missing(self) -> tuple[tuple[int, int], ...]:
        """(layer, expert) of experts without a listed replica: calls that need one fail
        UNAVAILABLE."""
        empty = np.nonzero(np.diff(self.replica_ptr) == 0)[0]
        return tuple((int(k) // self.num_experts, int(k) % self.num_experts) for k in empty)

    def address(self, rank: int) -> RankAddress | None:
        """How to reach a rank, None where the table does not list it."""
        for entry in self.ranks:
            if entry.rank == rank:
                return entry
        return None


def build_table(
    layout: ExpertLayout,
    tags: Mapping[SlotId, int],
    *,
    term: int,
    epoch: int,
    model: str,
    weights_version: str,
    ranks: tuple[RankAddress, ...],
) -> RoutingTable:
    """Table of the listed replicas: every filled slot of `layout` (which must hold listed replicas
    only) with its tag.

    Replicas of one expert stand in order of (rank, slot). Raises KeyError where a filled slot has
    no tag, and ValueError where it lies on a rank that `ranks` does not name: both are bugs of the
    caller.
    """
    known = {entry.rank for entry in ranks}
    rank, index = np.nonzero(layout.slots >= 0)
    keys = layout.slots[rank, index]
    order = np.lexsort((index, rank, keys))
    rank, index, keys = rank[order], index[order], keys[order]
    unknown = sorted(set(rank.tolist()) - known)
    if unknown:
        raise ValueError(f"layout lists replicas on ranks {unknown}, which have no address")
    ptr = np.zeros(layout.num_keys + 1, dtype=np.int32)
    ptr[1:] = np.cumsum(np.bincount(keys, minlength=layout.num_keys))
    tag = np.array(
        [tags[SlotId(int(r), int(i))] for r, i in zip(rank, index, strict=True)], dtype=np.int64
    )
    return RoutingTable(
        term=term,
        epoch=epoch,
        model=model,
        weights_version=weights_version,
        num_layers=layout.num_layers,
        num_experts=layout.num_experts,
        replica_ptr=ptr,
        replica_rank=rank.astype(np.int32),
        replica_slot=index.astype(np.int32),
        replica_tag=tag,
        ranks=ranks,
    )
