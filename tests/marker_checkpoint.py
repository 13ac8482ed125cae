"""A real checkpoint of marker experts: expert e of layer l multiplies its row by e + 1 + 100 * l.

Wrong weights therefore show in the output of every pair: another expert, another layer, a slot that
was refilled. It holds for rows whose last coordinate is 1, which `marker_rows` makes.

Worked example (H = F = 8): every row of the gate matrix picks that last coordinate times GATE, so
silu(gate) is the constant s = silu(GATE); up is the identity; down is diag((e + 1 + 100 * l) / s).
Expert 2 of layer 0 gives down(s * x) = 3 * x.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import numpy.typing as npt

from tests.checkpoint_builder import config, expert_name, write_checkpoint

LAYERS, EXPERTS, TOP_K, HIDDEN = 2, 8, 2, 8
LAYER_STEP = 100.0
GATE = 2.0
SILU = GATE / (1.0 + math.exp(-GATE))

Floats = npt.NDArray[np.float32]


def factor(layer: int, expert: int) -> float:
    return expert + 1 + LAYER_STEP * layer


def write_marker_checkpoint(folder: Path, *, experts: int = EXPERTS, hidden: int = HIDDEN) -> Path:
    """Qwen3-MoE naming, two layers, one weights file, width equal to `hidden`; an expert has
    12 * hidden^2 bytes."""
    gate = np.zeros((hidden, hidden), np.float32)
    gate[:, -1] = GATE
    up = np.eye(hidden, dtype=np.float32)
    made = {}
    for layer in range(LAYERS):
        for expert in range(experts):
            down = up * np.float32(factor(layer, expert) / SILU)
            for projection, matrix in (("gate", gate), ("up", up), ("down", down)):
                made[expert_name(layer, expert, projection)] = matrix
    settings = config(
        hidden_size=hidden,
        num_experts=experts,
        moe_intermediate_size=hidden,
        num_hidden_layers=LAYERS,
        num_experts_per_tok=TOP_K,
    )
    return write_checkpoint(folder, settings=settings, made=made)


def marker_rows(rng: np.random.Generator, rows: int, hidden: int = HIDDEN) -> Floats:
    """Random rows that the markers multiply exactly: the last coordinate is 1."""
    made = rng.standard_normal((rows, hidden)).astype(np.float32)
    made[:, -1] = 1.0
    return made


def marker_oracle(
    layer: int, hidden: Floats, ids: npt.NDArray[np.int32], gates: Floats
) -> npt.NDArray[np.float64]:
    """float64 [T, H]: sum over a row's experts of gate * factor * row."""
    factors = ids.astype(np.float64) + 1 + LAYER_STEP * layer
    scale = (factors * gates.astype(np.float64)).sum(axis=1, keepdims=True)
    product: npt.NDArray[np.float64] = scale * hidden.astype(np.float64)
    return product
