"""Which experts requests choose: by a law of popularity, by one that shifts, or as recorded.

Responsible for drawing them before the load begins, so that the generator does not lag behind its
own clock. Deterministic for a seed. Called by `load`.
"""

from __future__ import annotations

from collections.abc import Callable
from math import ceil
from typing import Any

import numpy as np
import numpy.typing as npt

from moe_serve.errors import InvalidArgument

IdArray = npt.NDArray[np.int32]
Choices = Callable[[int, int, float], IdArray]
"""(number of the request, layer, seconds since the load began) -> expert ids [tokens, k], distinct
in a row."""

POOL = 64
"""Drawn sets of ids a layer and period, used in turn."""
PERIODS_MAX = 64
"""Hot sets of a shifting load; afterwards they come again."""
CELLS_MAX = 1 << 26
"""Ids that are drawn at most: 256 MiB."""


def zipf_choices(
    *, layers: int, experts: int, top_k: int, tokens: int, exponent: float, seed: int
) -> Choices:
    """Popularity 1 / rank ^ exponent, the ranks in another order in each layer; 0 = all alike.

    Raises InvalidArgument where the drawn ids are too many to keep.
    """
    return shifting_choices(
        layers=layers,
        experts=experts,
        top_k=top_k,
        tokens=tokens,
        exponent=exponent,
        seed=seed,
        every_s=0.0,
        seconds=0.0,
    )


def shifting_choices(
    *,
    layers: int,
    experts: int,
    top_k: int,
    tokens: int,
    exponent: float,
    seed: int,
    every_s: float,
    seconds: float,
) -> Choices:
    """The same with another order of popularity every `every_s` seconds; 0 = never."""
    periods = min(PERIODS_MAX, max(1, ceil(seconds / every_s))) if every_s > 0 else 1
    pool = max(1, min(POOL, CELLS_MAX // (periods * layers * tokens * top_k)))
    if periods * layers * tokens * top_k > CELLS_MAX:
        raise InvalidArgument(
            f"--tokens {tokens}: {periods} hot sets of {layers} layers are more than {CELLS_MAX} "
            "ids; give fewer tokens or a longer --shift"
        )
    rng = np.random.default_rng(seed)
    popularity = -exponent * np.log(np.arange(1, experts + 1))
    drawn = np.empty((periods, layers, pool, tokens, top_k), dtype=np.int32)
    for period in range(periods):
        for layer in range(layers):
            scores = popularity[rng.permutation(experts)]
            for one in range(pool):
                drawn[period, layer, one] = _distinct(rng, scores, tokens, top_k)

    def choose(request: int, layer: int, at_s: float) -> IdArray:
        period = int(at_s // every_s) % periods if every_s > 0 else 0
        ids: IdArray = drawn[period, layer, request % pool]
        return ids

    return choose


def _distinct(
    rng: np.random.Generator, scores: npt.NDArray[np.float64], tokens: int, top_k: int
) -> IdArray:
    """Ids [tokens, top_k] drawn without replacement, in proportion to exp(scores): the greatest of
    scores + Gumbel noise are such a draw."""
    noisy = scores + rng.gumbel(size=(tokens, len(scores)))
    return np.argpartition(noisy, -top_k, axis=1)[:, -top_k:].astype(np.int32)


def traced_choices(
    ids: npt.NDArray[np.integer[Any]], *, layers: int, experts: int, top_k: int, tokens: int
) -> Choices:
    """Recorded ids [tokens, layers, k], in order, from the beginning again at their end.

    Raises InvalidArgument where they are of another model.
    """
    recorded, of_layers, k = ids.shape
    if of_layers > layers or k > top_k or int(ids.max()) >= experts:
        raise InvalidArgument(
            f"the trace has {of_layers} layers, top-{k} and expert {int(ids.max())}; the service "
            f"has {layers} layers of {experts} experts, top-{top_k}; record the served model"
        )
    if recorded < tokens:
        raise InvalidArgument(f"the trace has {recorded} tokens, fewer than --tokens {tokens}")
    parts = recorded // tokens

    def choose(request: int, layer: int, at_s: float) -> IdArray:
        start = request % parts * tokens
        return ids[start : start + tokens, layer % of_layers].astype(np.int32)

    return choose
