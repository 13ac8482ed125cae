"""Which library multiplies rows by weights on this CPU.

Responsible for measuring the candidates once and for the choice by number of rows. Must never
choose anew while serving: the same batch gives the same bits as long as the process lives. Called
by the numpy backend.

Which library is fastest depends on the CPU and on how many rows share an expert, by factors: with
1024 x 1024 weights and 8 rows, OpenBLAS measured 1.5 times slower than MKL on one machine, and 1.4
times faster on another. So it is measured on the machine and the shape that will be served.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moe_serve.shard.compute.base import ExpertSpec
from moe_serve.shard.kernels import skinny_matmul

Product = Callable[[NDArray[np.float32], NDArray[np.float32], NDArray[np.float32]], None]
"""Writes rows [n, K] @ weights [K, N] to out [n, N]; all C-contiguous float32."""

ROW_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128)
"""Numbers of rows that are measured; other numbers use the next one above, or the last."""

SKINNY_ROWS_MAX = 16
"""Most rows for which the compiled product is a candidate; it has no blocking for caches."""

TORCH_LEAST_ELEMENTS = 1 << 18
"""Elements of an expert from which torch is a candidate: for smaller ones a call costs more than it
could gain, and a shard of small experts starts faster without importing it."""

_REPEATS = 3
_WORKING_SET_BYTES = 32 << 20
_MATRICES_MAX = 8


@dataclass(frozen=True, slots=True)
class ProductTable:
    """The chosen product of each bucket: names for reports, functions for use."""

    names: tuple[str, ...]
    products: tuple[Product, ...]

    def of(self, num_rows: int) -> Product:
        """The product for so many rows (at least 1)."""
        return self.products[min(bisect_left(ROW_BUCKETS, num_rows), len(ROW_BUCKETS) - 1)]


def numpy_product(
    rows: NDArray[np.float32], weights: NDArray[np.float32], out: NDArray[np.float32]
) -> None:
    """numpy's BLAS."""
    np.matmul(rows, weights, out=out)


def unmeasured_products() -> ProductTable:
    """numpy's BLAS for everything: what is used before the choice."""
    return ProductTable(
        names=("numpy",) * len(ROW_BUCKETS), products=(numpy_product,) * len(ROW_BUCKETS)
    )


def measured_products(
    spec: ExpertSpec, clock: Callable[[], float] = time.thread_time
) -> ProductTable:
    """Time every candidate on gate|up matrices of `spec` and keep the fastest for each bucket.

    Takes some 50 ms for experts of a few million elements and a second for the largest, and up to
    32 MiB (or one matrix) for its duration. `clock` gives seconds; the thread's own, so that load
    of the machine does not decide. The first candidate wins a tie.
    """
    weights = _weights(spec)
    candidates: dict[str, Product] = {"numpy": numpy_product, "compiled": skinny_matmul}
    if spec.elements >= TORCH_LEAST_ELEMENTS:
        candidates["torch"] = _torch_product()
    names, products = [], []
    for num_rows in ROW_BUCKETS:
        rows = np.ones((num_rows, spec.hidden_size), np.float32)
        out = np.empty((num_rows, 2 * spec.intermediate_size), np.float32)
        best_s: dict[str, float] = {}
        for name, product in candidates.items():
            if name != "compiled" or num_rows <= SKINNY_ROWS_MAX:
                best_s[name] = _best_s(product, rows, weights, out, clock)
        chosen = min(best_s, key=lambda name: best_s[name])
        names.append(chosen)
        products.append(candidates[chosen])
    return ProductTable(names=tuple(names), products=tuple(products))


def _best_s(
    product: Product,
    rows: NDArray[np.float32],
    weights: list[NDArray[np.float32]],
    out: NDArray[np.float32],
    clock: Callable[[], float],
) -> float:
    """Least seconds of a round over all matrices; the first round, which also warms up, not
    counted.
    """
    best_s = float("inf")
    for attempt in range(1 + _REPEATS):
        begun_s = clock()
        for matrix in weights:
            product(rows, matrix, out)
        if attempt:
            best_s = min(best_s, clock() - begun_s)
    return best_s


def _weights(spec: ExpertSpec) -> list[NDArray[np.float32]]:
    """Several matrices, because one would stay in the caches, where experts in use do not."""
    count = max(1, min(_MATRICES_MAX, _WORKING_SET_BYTES // (spec.gate_up_elements * 4)))
    shape = (spec.hidden_size, 2 * spec.intermediate_size)
    return [np.ones(shape, np.float32) for _ in range(count)]


def _torch_product() -> Product:
    """torch's BLAS, on the same memory."""
    import torch

    def product(
        rows: NDArray[np.float32], weights: NDArray[np.float32], out: NDArray[np.float32]
    ) -> None:
        torch.mm(torch.from_numpy(rows), torch.from_numpy(weights), out=torch.from_numpy(out))

    return product
