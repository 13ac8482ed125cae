# ruff: noqa: PLR0913, PLR0917 - numba unpacks a structure slower than the work itself takes
"""The loops of the splitter, compiled.

The theory, in plain words. Every expert with one host puts its tokens where they must go. Every
other expert pours its tokens over its hosts like water: all hosts it fills end at one level. A few
rounds of that (*sweeps*) come close, but each expert sees only its own hosts, so the hottest rank
may stay too hot. Then *paths*: from the hottest rank, an expert there may hand tokens to another of
its hosts, where another expert hands some on, until a rank below the bound is reached. The *bound*
is a load no split can go below: at first the mean over ranks or the largest forced load. When the
hottest rank above the bound reaches nobody below it, the ranks it reaches form a closed set: every
token there can only be served there. The mean of that set, rounded up, is the new bound. When no
rank is above the bound, the maximum equals a proved lower limit: it is the optimum, in whole
tokens. Each path takes at least one token from above the bound to below it, so the search ends.

Ties. Which host takes the odd token is read off a sequence of equal steps around a circle (`turn`),
the step being an irrational share of it. Over many batches every host gets its share whatever
stride the callers' offsets have, and routers with neighbouring offsets point at different hosts in
the same instant. A plain remainder `tie_offset % hosts` fails both.

Responsible for: this arithmetic. Must never allocate by the size of counts, raise, or depend on
anything but its arguments. Called by `levels`, which checks shapes first; status codes name what
only the loops can see.
"""

import numpy as np
from numba import njit

from placement.split.checks import TOTAL_MAX, ByteArray, Int64Array

GOOD = 0
NEGATIVE_COUNT = 1
NEGATIVE_BACKLOG = 2
NO_REPLICA = 3
TOO_LARGE = 4

SWEEPS_MAX = 3
"""Levelling rounds before paths: more rounds gain less than the paths they would save."""

# Steps around the circle in 1/2^64: two powers of the plastic number, which are independent of
# each other, and the golden section.
_HOST_STEP = np.uint64(0xC13FA9A902A6328F)
_ORDER_STEP = np.uint64(0x91E10DA5C79E7B1D)
_REPLICA_STEP = np.uint64(0x9E3779B97F4A7C15)
_SALT_STEP = np.uint64(0xD1B54A32D192ED03)
_HALF = np.uint64(32)
# Each expert's step differs by up to 1/64 of the circle: with equal steps, the choices of two
# experts would stay in one fixed relation, and the second of them would not be even.
_DRIFT = np.uint64(6)


@njit(cache=True, nogil=True)
def turn(tie_offset: int, salt: int, step: np.uint64, choices: int) -> int:
    """Where `tie_offset` steps from a start given by `salt` lead, as an index in [0, choices)."""
    own = np.uint64(salt) * _SALT_STEP
    point = np.uint64(tie_offset) * (step + (own >> _DRIFT)) + own
    return np.int64(((point >> _HALF) * np.uint64(choices)) >> _HALF)  # type: ignore[return-value]


@njit(cache=True, nogil=True)
def check_counts(counts: Int64Array, backlog: Int64Array, host_ptr: Int64Array) -> tuple[int, int]:
    """(GOOD, 0), or a status and the index at fault."""
    total = 0
    for expert in range(counts.shape[0]):
        count = counts[expert]
        if count < 0:
            return NEGATIVE_COUNT, expert
        if count > 0 and host_ptr[expert] == host_ptr[expert + 1]:
            return NO_REPLICA, expert
        if count >= TOTAL_MAX - total:
            return TOO_LARGE, expert
        total += count
    for rank in range(backlog.shape[0]):
        if backlog[rank] < 0:
            return NEGATIVE_BACKLOG, rank
        if backlog[rank] >= TOTAL_MAX - total:
            return TOO_LARGE, counts.shape[0] + rank
        total += backlog[rank]
    return GOOD, 0


@njit(cache=True, nogil=True)
def pour(
    weight: int,
    first: int,
    last: int,
    tie_offset: int,
    salt: int,
    host_rank: Int64Array,
    flow: Int64Array,
    load: Int64Array,
) -> None:
    """Pour one expert's `weight` over hosts first .. last - 1: writes `flow`, adds to `load`.

    `load` must not hold a flow of this expert on entry.
    """
    total = weight
    for host in range(first, last):
        total += load[host_rank[host]]
        flow[host] = 0
    filled = last - first
    level = total // filled
    settled = False
    while not settled:
        settled = True
        for host in range(first, last):
            here = load[host_rank[host]]
            if flow[host] == 0 and here > level:
                flow[host] = -1  # stands above the water: takes nothing
                total -= here
                filled -= 1
                settled = False
        if not settled:
            level = total // filled
    odd = total - level * filled
    place = -turn(tie_offset, salt, _HOST_STEP, filled)
    for host in range(first, last):
        if flow[host] < 0:
            flow[host] = 0
            continue
        rank = host_rank[host]
        give = level - load[rank]
        if place < odd - filled or 0 <= place < odd:
            give += 1
        place += 1
        flow[host] = give
        load[rank] += give


@njit(cache=True, nogil=True)
def force(
    weights: Int64Array,
    tie_offset: int,
    host_ptr: Int64Array,
    host_rank: Int64Array,
    shared: Int64Array,
    flow: Int64Array,
    load: Int64Array,
    order: Int64Array,
) -> tuple[int, int]:
    """Place what has one host, list the others -> (listed, lower bound of the maximum).

    order: shared experts with weight, from a turning place on, forwards or backwards: the first to
    pour spreads evenly and the next ones fill up, so in one fixed order some ranks get less.
    """
    total = 0
    for rank in range(load.shape[0]):
        total += load[rank]
    for expert in range(weights.shape[0]):
        first = host_ptr[expert]
        weight = weights[expert]
        total += weight
        if weight > 0 and host_ptr[expert + 1] - first == 1:
            flow[first] = weight
            load[host_rank[first]] += weight
    bound = (total + load.shape[0] - 1) // load.shape[0]
    for rank in range(load.shape[0]):
        bound = max(bound, load[rank])
    listed = 0
    start = turn(tie_offset, 0, _ORDER_STEP, shared.shape[0])
    forwards = turn(tie_offset, 0, _REPLICA_STEP, 2) == 0
    for i in range(shared.shape[0]):
        at = start + i if forwards else start - i
        if at >= shared.shape[0]:
            at -= shared.shape[0]
        elif at < 0:
            at += shared.shape[0]
        if weights[shared[at]] > 0:
            order[listed] = shared[at]
            listed += 1
    return listed, bound


@njit(cache=True, nogil=True)
def sweep(
    weights: Int64Array,
    tie_offset: int,
    host_ptr: Int64Array,
    host_rank: Int64Array,
    first_slot: Int64Array,
    order: Int64Array,
    flow: Int64Array,
    load: Int64Array,
) -> int:
    """Take up and pour again every expert of `order` -> a measure of the change, 0 for none.

    Never raises the maximum.
    """
    changed = 0
    for i in range(order.shape[0]):
        expert = order[i]
        first = host_ptr[expert]
        last = host_ptr[expert + 1]
        held = flow[first]
        for host in range(first, last):
            load[host_rank[host]] -= flow[host]
        pour(weights[expert], first, last, tie_offset, first_slot[expert], host_rank, flow, load)
        changed += abs(flow[first] - held)
    return changed


@njit(cache=True, nogil=True)
def reach(
    hot: int,
    bound: int,
    host_ptr: Int64Array,
    host_rank: Int64Array,
    host_expert: Int64Array,
    rank_host_ptr: Int64Array,
    rank_host: Int64Array,
    flow: Int64Array,
    load: Int64Array,
    gave: Int64Array,
    took: Int64Array,
    expert_seen: ByteArray,
    queue: Int64Array,
) -> tuple[int, int]:
    """Breadth-first from `hot` -> (nearest rank below `bound` or -1, ranks reached, in `queue`).

    gave[rank], took[rank]: hosts by which tokens leave the rank before and enter this one; gave =
    -1 not reached.
    """
    gave[:] = -1
    expert_seen[:] = 0
    gave[hot] = 0
    queue[0] = hot
    head = 0
    tail = 1
    while head < tail:
        rank = queue[head]
        head += 1
        for i in range(rank_host_ptr[rank], rank_host_ptr[rank + 1]):
            giver = rank_host[i]
            expert = host_expert[giver]
            if flow[giver] <= 0 or expert_seen[expert] != 0:
                continue
            expert_seen[expert] = 1
            for taker in range(host_ptr[expert], host_ptr[expert + 1]):
                other = host_rank[taker]
                if gave[other] >= 0:
                    continue
                gave[other] = giver
                took[other] = taker
                if load[other] < bound:
                    return other, tail
                queue[tail] = other
                tail += 1
    return -1, tail


@njit(cache=True, nogil=True)
def cool(
    bound: int,
    host_ptr: Int64Array,
    host_rank: Int64Array,
    host_expert: Int64Array,
    rank_host_ptr: Int64Array,
    rank_host: Int64Array,
    flow: Int64Array,
    load: Int64Array,
) -> tuple[int, int]:
    """Move tokens along paths until no rank is above the bound -> (bound, paths).

    bound: a lower limit of the maximum on entry; raised where a closed set proves a higher one.
    """
    num_ranks = load.shape[0]
    gave = np.empty(num_ranks, np.int64)
    took = np.empty(num_ranks, np.int64)
    queue = np.empty(num_ranks, np.int64)
    expert_seen = np.empty(host_ptr.shape[0], np.uint8)
    paths = 0
    while True:
        hot = 0
        for rank in range(1, num_ranks):
            if load[rank] > load[hot]:
                hot = rank
        if load[hot] <= bound:
            return bound, paths
        cold, reached = reach(
            hot,
            bound,
            host_ptr,
            host_rank,
            host_expert,
            rank_host_ptr,
            rank_host,
            flow,
            load,
            gave,
            took,
            expert_seen,
            queue,
        )
        if cold < 0:
            closed = 0
            for i in range(reached):
                closed += load[queue[i]]
            bound = (closed + reached - 1) // reached
            continue
        amount = min(load[hot] - bound, bound - load[cold])
        rank = cold
        while rank != hot:
            amount = min(amount, flow[gave[rank]])
            rank = host_rank[gave[rank]]
        rank = cold
        while rank != hot:
            flow[gave[rank]] -= amount
            flow[took[rank]] += amount
            rank = host_rank[gave[rank]]
        load[hot] -= amount
        load[cold] += amount
        paths += 1


@njit(cache=True, nogil=True)
def level_hosts(
    weights: Int64Array,
    tie_offset: int,
    host_ptr: Int64Array,
    host_rank: Int64Array,
    host_expert: Int64Array,
    shared: Int64Array,
    rank_host_ptr: Int64Array,
    rank_host: Int64Array,
    first_slot: Int64Array,
    flow: Int64Array,
    load: Int64Array,
) -> tuple[int, int]:
    """Weights [E] onto hosts with the least possible maximum -> (that maximum, paths).

    flow: [H], zeros on entry. load: [D], backlog on entry, with the weights on return.
    """
    order = np.empty(shared.shape[0], np.int64)
    listed, bound = force(weights, tie_offset, host_ptr, host_rank, shared, flow, load, order)
    order = order[:listed]
    for i in range(listed):
        expert = order[i]
        pour(
            weights[expert],
            host_ptr[expert],
            host_ptr[expert + 1],
            tie_offset,
            first_slot[expert],
            host_rank,
            flow,
            load,
        )
    for _ in range(SWEEPS_MAX):
        if sweep(weights, tie_offset, host_ptr, host_rank, first_slot, order, flow, load) <= 1:
            break
    bound, paths = cool(
        bound, host_ptr, host_rank, host_expert, rank_host_ptr, rank_host, flow, load
    )
    if paths > 0:
        sweep(weights, tie_offset, host_ptr, host_rank, first_slot, order, flow, load)
    return bound, paths


@njit(cache=True, nogil=True)
def split_batch(
    counts: Int64Array,
    backlog: Int64Array,
    tie_offset: int,
    one_replica: bool,
    host_ptr: Int64Array,
    host_rank: Int64Array,
    host_expert: Int64Array,
    host_replica_ptr: Int64Array,
    shared: Int64Array,
    rank_host_ptr: Int64Array,
    rank_host: Int64Array,
    first_slot: Int64Array,
    quotas: Int64Array,
) -> tuple[int, int]:
    """Tokens per replica into `quotas` [R] -> (status, index at fault).

    one_replica: level experts instead of tokens, each with all its tokens on one replica.
    """
    status, where = check_counts(counts, backlog, host_ptr)
    if status != GOOD:
        return status, where
    weights = np.minimum(counts, 1) if one_replica else counts
    flow = np.zeros(host_rank.shape[0], np.int64)
    load = backlog.copy()
    level_hosts(
        weights,
        tie_offset,
        host_ptr,
        host_rank,
        host_expert,
        shared,
        rank_host_ptr,
        rank_host,
        first_slot,
        flow,
        load,
    )
    for host in range(flow.shape[0]):
        expert = host_expert[host]
        first = host_replica_ptr[host]
        replicas = host_replica_ptr[host + 1] - first
        start = turn(tie_offset, first_slot[expert], _REPLICA_STEP, replicas) if replicas > 1 else 0
        each = 0 if one_replica else flow[host] // replicas
        odd = flow[host] - each * replicas
        unit = counts[expert] if one_replica else 1
        for i in range(replicas):
            at = start + i
            if at >= replicas:
                at -= replicas
            quotas[first + at] = each + (unit if i < odd else 0)
    return GOOD, 0


def frozen(*values: int) -> Int64Array:
    """`values` as int64 that numba sees as the read-only arrays of a `CompiledLayer`."""
    array = np.array(values, np.int64)
    array.flags.writeable = False
    return array


def warm() -> None:
    """Compile `split_batch` for the types of production, by one call on a tiny layer."""
    counts, backlog, quotas = np.ones(1, np.int64), np.zeros(1, np.int64), np.zeros(1, np.int64)
    index = (
        frozen(0, 1),
        frozen(0),
        frozen(0),
        frozen(0, 1),
        frozen(),
        frozen(0, 0),
        frozen(),
        frozen(0),
    )
    status, _ = split_batch(counts, backlog, 0, False, *index, quotas)
    assert status == GOOD
    assert quotas[0] == 1
