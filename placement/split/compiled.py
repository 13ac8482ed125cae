"""The slots of one layer, indexed for splitting: built once a routing table, used by every batch.

Words and a number example. Three slots on two ranks, two experts: slot 0 (rank 0) and slot 1 (rank
1) hold expert 0, slot 2 (rank 1) holds expert 1. *Replicas* are the filled slots sorted by (expert,
rank, slot): replica 0 = slot 0, replica 1 = slot 1, replica 2 = slot 2, so `replica_ptr = [0, 2,
3]`. A *host* is one rank that holds an expert, however many replicas of it lie there: loads are
levelled over hosts, then shared evenly by the replicas of a host. A *shared* expert here has more
than one host, the others' load is forced.

Responsible for: this index. Must never know counts or loads. Called by the router
(`placement.roles`), policies and `levels`.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from placement.split.checks import EXPERTS_MAX, RANKS_MAX, Int64Array, int64_vector, size
from placement.split.errors import SplitError


@dataclass(frozen=True, slots=True, eq=False)
class CompiledLayer:
    """Index of one layer's slots, all arrays int64 and read-only.

    S slots, R replicas, H hosts, E experts, D ranks.
    """

    num_experts: int
    num_ranks: int
    num_slots: int
    replica_ptr: Int64Array
    """[E + 1]: the replicas of expert e are replica_ptr[e] .. replica_ptr[e + 1] - 1."""
    replica_slot: Int64Array
    """[R]: slot index of each replica, as the caller numbered it."""
    replica_rank: Int64Array
    """[R]: rank of each replica."""
    host_ptr: Int64Array
    """[E + 1]: the hosts of expert e."""
    host_rank: Int64Array
    """[H]: rank of each host, ascending within an expert."""
    host_expert: Int64Array
    """[H]: expert of each host."""
    host_replica_ptr: Int64Array
    """[H + 1]: the replicas of each host."""
    shared: Int64Array
    """Experts with two or more hosts, by first slot."""
    rank_host_ptr: Int64Array
    """[D + 1]: for each rank, its part of `rank_host`."""
    rank_host: Int64Array
    """Hosts of shared experts, by rank, then by first slot of their expert."""
    only_replica: Int64Array
    """[E]: the replica of an expert that has one, -1 for experts with none or several."""
    plural: Int64Array
    """Experts with two or more replicas, on one host or several, ascending."""
    first_slot: Int64Array
    """[E]: lowest slot of each expert. It orders ties: relabelling experts only relabels."""

    @property
    def num_replicas(self) -> int:
        """Filled slots of the layer."""
        return int(self.replica_slot.shape[0])


def compile_layer(
    slot_expert: npt.ArrayLike, slot_rank: npt.ArrayLike, num_experts: int, num_ranks: int
) -> CompiledLayer:
    """Index the slots of one layer.

    slot_expert: int [S], expert of each slot, -1 empty or -2 absent. slot_rank: int [S], rank of
    each slot. Two replicas of an expert on one rank are legal. An expert without a replica is legal
    until it has tokens.

    >>> compile_layer([0, 0, 1], [0, 1, 1], num_experts=2, num_ranks=2).replica_ptr.tolist()
    [0, 2, 3]

    Raises SplitError for shapes, dtypes, ids or ranks out of range.
    """
    num_experts = size("num_experts", num_experts, EXPERTS_MAX)
    num_ranks = size("num_ranks", num_ranks, RANKS_MAX)
    experts = int64_vector("slot_expert", slot_expert)
    ranks = int64_vector("slot_rank", slot_rank, length=experts.shape[0])
    _check_range("slot_expert", experts, -2, num_experts)
    _check_range("slot_rank", ranks, 0, num_ranks)

    filled = np.flatnonzero(experts >= 0)
    replica_slot = filled[np.lexsort((filled, ranks[filled], experts[filled]))]
    replica_rank = ranks[replica_slot]
    replica_expert = experts[replica_slot]
    first_slot = np.full(num_experts, experts.shape[0], np.int64)
    np.minimum.at(first_slot, replica_expert, replica_slot)

    opens_host = np.ones(replica_slot.shape[0], np.bool_)
    opens_host[1:] = (replica_expert[1:] != replica_expert[:-1]) | (
        replica_rank[1:] != replica_rank[:-1]
    )
    host_first = np.flatnonzero(opens_host)
    host_rank = replica_rank[host_first]
    host_expert = replica_expert[host_first]
    host_ptr = _pointers(host_expert, num_experts)

    replica_ptr = _pointers(replica_expert, num_experts)
    replicas_of = np.diff(replica_ptr)
    hosts_of = np.diff(host_ptr)
    shared = np.flatnonzero(hosts_of > 1)
    shared = shared[np.argsort(first_slot[shared], kind="stable")]
    movable = np.flatnonzero(hosts_of[host_expert] > 1)
    rank_host = movable[np.lexsort((first_slot[host_expert[movable]], host_rank[movable]))]
    return CompiledLayer(
        num_experts=num_experts,
        num_ranks=num_ranks,
        num_slots=int(experts.shape[0]),
        replica_ptr=_frozen(replica_ptr),
        replica_slot=_frozen(replica_slot),
        replica_rank=_frozen(replica_rank),
        host_ptr=_frozen(host_ptr),
        host_rank=_frozen(host_rank),
        host_expert=_frozen(host_expert),
        host_replica_ptr=_frozen(np.append(host_first, replica_slot.shape[0])),
        shared=_frozen(shared),
        rank_host_ptr=_frozen(_pointers(host_rank[rank_host], num_ranks)),
        rank_host=_frozen(rank_host),
        only_replica=_frozen(np.where(replicas_of == 1, replica_ptr[:-1], -1)),
        plural=_frozen(np.flatnonzero(replicas_of > 1)),
        first_slot=_frozen(first_slot),
    )


def _check_range(field: str, values: Int64Array, low: int, high: int) -> None:
    wrong = np.flatnonzero((values < low) | (values >= high))
    if wrong.size > 0:
        at = int(wrong[0])
        raise SplitError(
            f"{field}[{at}]",
            f"must be in [{low}, {high}), got {int(values[at])}",
            "pass the layer's own ids",
        )


def _pointers(owner: Int64Array, num_owners: int) -> Int64Array:
    ends = np.cumsum(np.bincount(owner, minlength=num_owners))
    return np.concatenate((np.zeros(1, np.int64), ends.astype(np.int64)))


def _frozen(array: Int64Array) -> Int64Array:
    owned = np.array(array, dtype=np.int64, order="C")
    owned.flags.writeable = False
    return owned
