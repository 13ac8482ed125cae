"""The one form in which an expert's weights are held, copied and digested.

Responsible for: making that form from a checkpoint's matrices, viewing it, and its digest.
Must never: open files, or convert between serving dtypes once the form is made.
Called by: `checkpoint`, `build`; the shard for its slots and copies.

Canonical bytes of an expert with hidden size H and width F, in the serving dtype, row-major,
little-endian, without padding:

    gate_up [H, 2F]   columns 0..F-1 gate, F..2F-1 up       2*H*F elements
    down    [F, H]                                            H*F elements

so that y = (silu(g) * u) @ down with g, u = the halves of x @ gate_up. Checkpoints store the
transposes. Worked example: H = 128, F = 64, float32 -> 3 * 128 * 64 * 4 = 98,304 bytes.
"""

from __future__ import annotations

import hashlib
import sys
from typing import Any, Final, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from moe_serve.weights.dtypes import ServingDtype, numpy_dtype
from moe_serve.weights.errors import ShapeMismatch

Projection = Literal["gate", "up", "down"]

PROJECTIONS: Final[tuple[Projection, ...]] = ("gate", "up", "down")

_TILE = 128
"""Side of the square blocks in which matrices are transposed; three times faster than at once for
7168 x 2048, because a block of source and target fits in the first-level cache."""

assert sys.byteorder == "little", "canonical bytes are defined on little-endian machines only"


class ExpertViews(NamedTuple):
    """Arrays over canonical bytes, without a copy: gate_up [H, 2F], down [F, H]."""

    gate_up: npt.NDArray[Any]
    down: npt.NDArray[Any]

    def projection(self, which: Projection) -> npt.NDArray[Any]:
        """The part that holds one projection, in canonical (transposed) orientation."""
        width = self.down.shape[0]
        if which == "gate":
            return self.gate_up[:, :width]
        return self.gate_up[:, width:] if which == "up" else self.down


def expert_bytes(hidden_size: int, intermediate_size: int, dtype: ServingDtype) -> int:
    """Length of an expert's canonical form, in bytes: 3 * H * F * size of the dtype."""
    return 3 * hidden_size * intermediate_size * numpy_dtype(dtype).itemsize


def canonical_views(
    buffer: npt.NDArray[np.uint8] | memoryview | bytes | bytearray,
    hidden_size: int,
    intermediate_size: int,
    dtype: ServingDtype,
) -> ExpertViews:
    """Matrices over `buffer`, which holds exactly one expert; writable exactly if `buffer` is.

    Raises `ShapeMismatch` if the length differs.
    """
    flat = np.frombuffer(buffer, np.uint8)
    expected = expert_bytes(hidden_size, intermediate_size, dtype)
    if flat.size != expected:
        raise ShapeMismatch(
            f"a buffer of {flat.size} bytes cannot hold an expert of hidden size {hidden_size}, "
            f"width {intermediate_size} and dtype {dtype}, which has {expected} bytes; "
            "size it by expert_bytes()"
        )
    values = flat.view(numpy_dtype(dtype))
    split = 2 * hidden_size * intermediate_size
    return ExpertViews(
        gate_up=values[:split].reshape(hidden_size, 2 * intermediate_size),
        down=values[split:].reshape(intermediate_size, hidden_size),
    )


def write_projection(views: ExpertViews, which: Projection, matrix: npt.NDArray[Any]) -> None:
    """Write one checkpoint matrix (gate, up [F, H]; down [H, F]) transposed into its place.

    Values are rounded to nearest-even if the dtypes differ; one that is too large becomes an
    infinity, which is for the caller to find. Raises `ShapeMismatch`.
    """
    target = views.projection(which)
    if matrix.shape != target.shape[::-1]:
        raise ShapeMismatch(
            f"{which} matrix has shape {list(matrix.shape)}, expected "
            f"{list(target.shape[::-1])}; check hidden size and expert width"
        )
    if matrix.dtype == target.dtype:
        # As integers: moving the two-byte values of an extension dtype is much slower.
        bits = np.dtype(f"u{target.dtype.itemsize}")
        matrix, target = matrix.view(bits), target.view(bits)
    rows, columns = matrix.shape
    with np.errstate(over="ignore"):
        for row in range(0, rows, _TILE):
            for column in range(0, columns, _TILE):
                block = matrix[row : row + _TILE, column : column + _TILE]
                target[column : column + _TILE, row : row + _TILE] = block.T


def canonical_from_projections(
    gate: npt.NDArray[Any],
    up: npt.NDArray[Any],
    down: npt.NDArray[Any],
    dtype: ServingDtype,
) -> npt.NDArray[np.uint8]:
    """Canonical bytes, as a new uint8 array, from gate [F, H], up [F, H] and down [H, F]."""
    if gate.ndim != 2:
        raise ShapeMismatch(f"gate matrix has {gate.ndim} dimensions, expected 2 ([F, H])")
    width, hidden = gate.shape
    out = np.empty(expert_bytes(hidden, width, dtype), np.uint8)
    views = canonical_views(out, hidden, width, dtype)
    for which, matrix in zip(PROJECTIONS, (gate, up, down), strict=True):
        write_projection(views, which, matrix)
    return out


def canonical_digest(buffer: npt.NDArray[np.uint8] | memoryview | bytes | bytearray) -> str:
    """SHA-256 of canonical bytes, in lower-case hex (64 characters)."""
    content = buffer.data if isinstance(buffer, np.ndarray) else buffer
    return hashlib.sha256(content).hexdigest()
