"""The path of small changes that a layer would take, compiled.

The theory, in plain words. Of the changes on the shortlist (`candidates`), each is levelled for two
rounds, and the one that saves most value a slot write wins. It is made, the layer is levelled from
nothing, and so on, until nothing pays or a limit is reached.

Responsible for the changes of one layer alone. Must never look at another layer, use fastmath, or
break a tie by anything but the lowest id. Called by `incremental_search`.
"""

import numpy as np
from numba import njit

from placement.policy.candidates.estimates.kernels import Shortlist, shortlist_for
from placement.policy.candidates.kernels import (
    CONNECT,
    EXCHANGE,
    REPLICATE_SPARE,
    Room,
    collect,
    far_writes,
    prepare,
    tiny_room,
)
from placement.policy.leveled.drops.kernels import may_leave
from placement.policy.leveled.kernels import (
    FloatArray,
    IntArray,
    Layer,
    Scratch,
    World,
    add_host,
    drop_host,
    relevel,
    restore_hosts,
    save_hosts,
    tiny_layer,
    trial_value,
)

FAILED_MAX = 3
"""Candidates in a row that may disappoint when levelled from nothing, before a path ends."""
FAR = 0.05
"""Share by which a write counts less whose nearest source is on another node."""

KIND, EXPERT, HOT, COLD, OTHER, LEFT, TAKEN = range(7)
"""Columns of a path's rows. LEFT: 1 where the expert then left the hot rank (a migration). TAKEN:
1 where the slot is another layer's victim's."""
SCORE, VALUE, SLOWEST, PRICE = range(4)
"""Columns of a path's figures: gain a write with bonuses; value and seconds of the slowest rank
after the change; what it was taken to cost elsewhere."""

CUT, NOTHING_PAYS, DISAPPOINTED = range(3)
"""How a path ends: at a limit; with no candidate that pays, alone or beside others; with too many
in a row that did not keep what they promised, and others never looked at."""


@njit(cache=True, nogil=True, error_model="numpy")
def change_hosts(layer: Layer, scratch: Scratch, row: IntArray) -> None:
    """Give the layer the hosts that a candidate would, and remember the old ones."""
    kind, expert, hot, cold, other = row[KIND], row[EXPERT], row[HOT], row[COLD], row[OTHER]
    save_hosts(layer, 0, expert, scratch)
    if other >= 0:
        save_hosts(layer, 1, other, scratch)
    add_host(layer, expert, cold)
    if kind == EXCHANGE:
        drop_host(layer, expert, hot)
        add_host(layer, other, hot)
    if other >= 0:
        drop_host(layer, other, cold)


@njit(cache=True, nogil=True, error_model="numpy")
def change_back(layer: Layer, scratch: Scratch, row: IntArray) -> None:
    """Undo `change_hosts`."""
    restore_hosts(layer, 0, row[EXPERT], scratch)
    if row[OTHER] >= 0:
        restore_hosts(layer, 1, row[OTHER], scratch)


@njit(cache=True, nogil=True, error_model="numpy")
def terms(room: Room, short: Shortlist, row: IntArray) -> tuple[int, int, float, float]:
    """(writes, those of them from another node, cost elsewhere, factor on its gain a write) of a
    candidate.
    """
    kind, expert, hot, cold, other = row[KIND], row[EXPERT], row[HOT], row[COLD], row[OTHER]
    writes = 2 if kind == EXCHANGE else 1
    far = far_writes(room, kind, expert, hot, cold, other)
    cost, factor = 0.0, 1.0 - FAR * far / writes
    if kind == REPLICATE_SPARE:
        cost = room.resident_price if room.free[cold] > 0 else room.victim_loss[cold]
    if kind != EXCHANGE and short.component[hot] != short.component[cold]:
        factor *= 1.0 + CONNECT
    return writes, far, cost, factor


@njit(cache=True, nogil=True, error_model="numpy")
def best_change(
    layer: Layer, world: World, scratch: Scratch, room: Room, short: Shortlist, value: float
) -> int:
    """Number on the shortlist of the change that is not barred and saves most value a slot write;
    -1 if none saves enough. `value` is the layer's now.
    """
    prepare(layer, world, short)
    found = collect(layer, world, room, short)
    best, score = -1, 0.0
    for i in np.argsort(-short.gains[:found], kind="mergesort"):
        if short.barred[i]:
            continue
        row = short.rows[i]
        writes, _, cost, factor = terms(room, short, row)
        # what it must reach to be taken, and to be the best
        limit = value - cost - max(room.gain_min * writes, score * writes / factor)
        change_hosts(layer, scratch, row)
        after = trial_value(layer, world, scratch, row[EXPERT], row[OTHER], limit)
        change_back(layer, scratch, row)
        reached = (value - after - cost) / writes * factor
        if after < limit and reached > score:
            best, score = i, reached
    return best


@njit(cache=True, nogil=True, error_model="numpy")
def leaves_behind(layer: Layer, world: World, room: Room, row: IntArray) -> bool:
    """Whether the expert, replicated elsewhere, should leave the hot rank: that is full, and no
    scenario uses the replica any more.
    """
    expert, rank = row[EXPERT], row[HOT]
    if row[KIND] == EXCHANGE or room.free[rank] > 0:
        return False
    if not may_leave(layer, world, expert, rank, -1):
        return False
    for i in range(layer.host_count[expert]):
        if layer.host_rank[expert, i] == rank:
            for s in range(layer.demand.shape[0]):
                if layer.flow[s, expert, i] > 0.0:
                    return False
    return True


@njit(cache=True, nogil=True, error_model="numpy")
def spend(room: Room, row: IntArray, writes: int, far: int, left: bool) -> Room:
    """What is left after a change."""
    if row[KIND] == REPLICATE_SPARE:
        if room.free[row[COLD]] > 0:
            room.free[row[COLD]] -= 1
        else:
            room.victim_loss[row[COLD]] = np.inf
    if left:
        room.free[row[HOT]] += 1
    return Room(
        room.free,
        room.victim_loss,
        room.near,
        room.resident_price,
        room.gain_min,
        room.slowest_enough,
        room.writes_left - writes,
        room.far_left - far,
    )


@njit(cache=True, nogil=True, error_model="numpy")
def improve(
    layer: Layer,
    world: World,
    scratch: Scratch,
    room: Room,
    short: Shortlist,
    rows: IntArray,
    figures: FloatArray,
) -> tuple[int, int]:
    """Change the layer's hosts, best change first, and write the path down; (changes, how it
    ended: CUT, NOTHING_PAYS or DISAPPOINTED).

    rows: int64 [limit, 7], figures: float64 [limit, 4], by the columns above. The layer's hosts are
    then those at the path's end.
    """
    value, slowest = relevel(layer, world, scratch)
    done, failed = 0, 0
    short.barred[:] = False
    while done < rows.shape[0] and room.writes_left > 0:
        if slowest <= room.slowest_enough:
            return done, NOTHING_PAYS
        best = best_change(layer, world, scratch, room, short, value)
        if best < 0:
            return done, NOTHING_PAYS
        row = short.rows[best].copy()
        writes, far, cost, factor = terms(room, short, row)
        change_hosts(layer, scratch, row)
        after, slowest_after = relevel(layer, world, scratch)
        left = leaves_behind(layer, world, room, row)
        if left:
            drop_host(layer, row[EXPERT], row[HOT])
            after, slowest_after = relevel(layer, world, scratch)
        gain = value - after - cost
        if gain < room.gain_min * writes or gain <= 0.0:
            # two rounds promised what levelling from nothing does not keep: the next best, then
            change_back(layer, scratch, row)
            relevel(layer, world, scratch)
            short.barred[best] = True
            failed += 1
            if failed > FAILED_MAX:
                return done, DISAPPOINTED
            continue
        rows[done, : OTHER + 1] = row
        rows[done, LEFT] = left
        rows[done, TAKEN] = row[KIND] == REPLICATE_SPARE and room.free[row[COLD]] < 1
        figures[done, SCORE], figures[done, VALUE] = gain / writes * factor, after
        figures[done, SLOWEST], figures[done, PRICE] = slowest_after, cost
        room = spend(room, row, writes, far, left)
        done += 1
        failed = 0
        short.barred[:] = False
        value, slowest = after, slowest_after
    return done, CUT


def warm() -> None:
    """Compile what is called from Python, with the types it is called with."""
    layer, world, scratch = tiny_layer()
    rows, figures = np.zeros((2, TAKEN + 1), np.int64), np.zeros((2, PRICE + 1))
    improve(layer, world, scratch, tiny_room(), shortlist_for(2, 2, 1), rows, figures)
