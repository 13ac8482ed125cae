"""Few writes for engines that share an expert's tokens equally among its replicas.

Responsible for the search under the equal split, which the incremental policy does not know: it
plans for a router that levels. Called by `placement.eplb.pool`.

The search makes the best change it finds, again and again: one slot that holds a surplus replica is
given another expert, or two slots of two gpus are exchanged. Of all states passed through it keeps
the one with the lowest (load of the hottest gpu + `gain_min` x even load x writes): a write that
does not take that much off the hottest gpu, alone or with the ones after it, is not made. The
search from there passes the same states and stays where it is.
"""

from __future__ import annotations

import numpy as np

from placement.eplb.even.kernels import descend, make_state
from placement.eplb.tensors import FloatArray, IntArray


def search_even(
    rows: IntArray,
    demand: FloatArray,
    weights: FloatArray,
    writes: int | None,
    *,
    enough: float,
    gain_min: float,
) -> IntArray:
    """The rows after the writes that pay: int64 [gpus, slots], no slot empty.

    rows: int64 [gpus, slots], no slot empty, every expert somewhere. demand: float64 [scenarios,
    experts]. weights: float64 [scenarios]. writes: most slots written, None = no limit. enough:
    even load / hottest load at or above which nothing is touched. gain_min: share of the even load
    that a write must save.

    Rank 0 has experts 0 and 1, rank 1 experts 2 and 3, and a slot each for a second replica:

    >>> rows = np.array([[0, 1, 2], [2, 3, 3]])
    >>> demand = np.array([[8.0, 1.0, 1.0, 1.0]])
    >>> search_even(rows, demand, np.ones(1), None, enough=0.98, gain_min=0.002).tolist()
    [[0, 1, 2], [2, 0, 3]]
    """
    # Copies: a read-only array is another type to numba, which would compile anew.
    state = make_state(
        np.array(rows, order="C"), np.array(demand, order="C"), np.array(weights, order="C")
    )
    descend(state, rows.size if writes is None else writes, enough, gain_min)
    return state.rows
