"""Traffic as arrays: pairs wanted in each window, drawn from a seed.

Responsible for demand that shifts. Called by the runner and by tests.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from placement.topology import MoeSpec

Counts = npt.NDArray[np.int64]


def shifting_zipf(
    spec: MoeSpec,
    *,
    windows: int,
    tokens: int,
    shift_every: int,
    exponent: float,
    rng: np.random.Generator,
    calm: int = 0,
) -> Counts:
    """Pairs int64 [windows, layers, experts]: tokens x top_k a layer, Zipf popularity whose order
    is drawn anew.

    The order of experts changes every `shift_every` windows (0: never), and not in the last `calm`
    windows; within a window counts are multinomial.
    """
    weight = 1.0 / np.arange(1, spec.num_experts + 1) ** exponent
    weight /= weight.sum()
    demand = np.zeros((windows, spec.num_layers, spec.num_experts), dtype=np.int64)
    order = np.zeros((spec.num_layers, spec.num_experts), dtype=np.int64)
    for window in range(windows):
        shifts = shift_every and window % shift_every == 0 and window < windows - calm
        if window == 0 or shifts:
            order = np.stack([rng.permutation(spec.num_experts) for _ in range(spec.num_layers)])
        for layer in range(spec.num_layers):
            counts = rng.multinomial(tokens * spec.top_k, weight)
            demand[window, layer, order[layer]] = counts
    return demand
