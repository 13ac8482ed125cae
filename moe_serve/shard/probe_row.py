"""The probe row of a verification: what a slot computes against what its canonical bytes say.

Responsible for one comparison. Must never load or change a slot. Called by the shard's commands,
after the digest.

The digest proves that the bytes are right; the probe row proves that the backend made the right
thing of them (layout, derived form).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from moe_serve.shard.compute.base import ExpertSpec
from moe_serve.shard.rows import raw_dtype, to_float32

RELATIVE_ERROR_MAX = 2e-2
"""Of the largest element: what bfloat16 arithmetic may be off; a wrong layout is off by about 1."""


def probe_input(hidden_size: int) -> npt.NDArray[np.float32]:
    """The row: float32 [H], fixed, of alternating sign and no symmetry that a transposed matrix
    would keep."""
    index = np.arange(hidden_size, dtype=np.float64)
    return np.cos(1.0 + 0.7 * index + 0.003 * index * index).astype(np.float32)


def probe_problem(
    spec: ExpertSpec,
    canonical: npt.NDArray[np.uint8],
    out: npt.NDArray[np.float32],
    simulated: bool,
) -> str:
    """What is wrong with the backend's output [H] for the probe row; "" where nothing is.

    A simulated backend computes something else by declaration; its output must only be finite.
    """
    if not np.isfinite(out).all():
        return "the probe row gives a NaN or an infinity"
    if simulated:
        return ""
    want = _reference(spec, canonical)
    scale = float(np.abs(want).max())
    error = float(np.abs(out - want).max())
    if error > RELATIVE_ERROR_MAX * scale + 1e-30:
        return f"the probe row is off by {error:.3g} at a scale of {scale:.3g}"
    return ""


def _reference(spec: ExpertSpec, canonical: npt.NDArray[np.uint8]) -> npt.NDArray[np.float64]:
    """The expert applied to the probe row, in float64, by the definition of the canonical form."""
    weights = to_float32(canonical.view(raw_dtype(spec.dtype)), spec.dtype)
    hidden, inner = spec.hidden_size, spec.intermediate_size
    gate_up = weights[: spec.gate_up_elements].reshape(hidden, 2 * inner)
    down = weights[spec.gate_up_elements :].reshape(inner, hidden)
    both = probe_input(hidden).astype(np.float64) @ gate_up
    gate, up = both[:inner], both[inner:]
    with np.errstate(over="ignore"):  # exp of a large negative gate: silu is 0 there
        result: npt.NDArray[np.float64] = (gate / (1.0 + np.exp(-gate)) * up) @ down
    return result
