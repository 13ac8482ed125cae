"""A CUDA kernel that finds its weights by slot, a block of rows at a time.

Responsible for parts[p] = expert(slot of sorted pair p)(row of p) with two launches a batch,
whatever slots it names and wherever they lie. Must never gather weights or copy rows. Called by the
torch backend, which imports it only where triton is installed.

Each program handles up to BLOCK_M sorted pairs of one slot and BLOCK_N columns. It gets the address
of that slot's canonical form from a table, so slots may lie in any slab.
"""

# The compiler evaluates annotations of a kernel, so its arguments have none.
# ruff: noqa: PLR0913, PLR0917 - a kernel takes its pointers, sizes and block shape one by one

from __future__ import annotations

from typing import Any

import torch
import triton  # type: ignore[import-not-found, import-untyped, unused-ignore]
import triton.language as tl  # type: ignore[import-not-found, import-untyped, unused-ignore]

from moe_serve.shard.compute.base import ExpertSpec

BLOCK_ROWS = 16
"""Least rows of a block (the tensor cores' own); also the unit by which time is shared out among
slots.
"""

WIDE_BLOCK_ROWS = 64
"""Rows of a block once a slot sees more than that many."""


def block_rows_for(most_pairs: int) -> int:
    """Rows a block: small where few rows share a slot and weights are what is read, wide where rows
    are.
    """
    return BLOCK_ROWS if most_pairs <= WIDE_BLOCK_ROWS else WIDE_BLOCK_ROWS


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _gate_up_kernel(  # type: ignore[no-untyped-def]
    rows,
    pair_row,
    act,
    block_begin,
    block_end,
    block_weights,
    H,
    F,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """act[p, n] = silu(rows[pair_row[p]] @ gate)[n] * (rows[pair_row[p]] @ up)[n]."""
    block = tl.program_id(0)
    weights = tl.load(block_weights + block).to(tl.pointer_type(rows.dtype.element_ty))
    p = tl.load(block_begin + block) + tl.arange(0, BLOCK_M)
    in_m = p < tl.load(block_end + block)
    row = tl.load(pair_row + p, mask=in_m, other=0).to(tl.int64)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_n = n < F
    gate = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    up = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for begin in range(0, H, BLOCK_K):
        k = begin + tl.arange(0, BLOCK_K)
        in_k = k < H
        x = tl.load(
            rows + row[:, None] * H + k[None, :], mask=in_m[:, None] & in_k[None, :], other=0.0
        )
        place = k[:, None] * (2 * F) + n[None, :]
        in_w = in_k[:, None] & in_n[None, :]
        gate = tl.dot(
            x, tl.load(weights + place, mask=in_w, other=0.0), gate, input_precision="ieee"
        )
        up = tl.dot(
            x, tl.load(weights + place + F, mask=in_w, other=0.0), up, input_precision="ieee"
        )
    value = gate * tl.sigmoid(gate) * up
    tl.store(
        act + p.to(tl.int64)[:, None] * F + n[None, :],
        value.to(act.dtype.element_ty),
        mask=in_m[:, None] & in_n[None, :],
    )


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _down_kernel(  # type: ignore[no-untyped-def]
    act,
    parts,
    block_begin,
    block_end,
    block_weights,
    H,
    F,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """parts[p, n] = (act[p] @ down)[n], float32; the down matrix follows H * 2F elements of
    gate|up.
    """
    block = tl.program_id(0)
    weights = tl.load(block_weights + block).to(tl.pointer_type(act.dtype.element_ty)) + 2 * F * H
    p = tl.load(block_begin + block) + tl.arange(0, BLOCK_M)
    in_m = p < tl.load(block_end + block)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_n = n < H
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for begin in range(0, F, BLOCK_K):
        k = begin + tl.arange(0, BLOCK_K)
        in_k = k < F
        x = tl.load(
            act + p.to(tl.int64)[:, None] * F + k[None, :],
            mask=in_m[:, None] & in_k[None, :],
            other=0.0,
        )
        w = tl.load(
            weights + k[:, None] * H + n[None, :], mask=in_k[:, None] & in_n[None, :], other=0.0
        )
        total = tl.dot(x, w, total, input_precision="ieee")
    tl.store(
        parts + p.to(tl.int64)[:, None] * H + n[None, :],
        total,
        mask=in_m[:, None] & in_n[None, :],
    )


def triton_parts(
    spec: ExpertSpec,
    rows: torch.Tensor,
    pair_row: torch.Tensor,
    blocks: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    block_rows: int,
    parts: torch.Tensor,
) -> None:
    """Launch both kernels for a batch on the current stream.

    rows [R, H] in the serving dtype; pair_row int32 [P] of the sorted pairs; blocks = begin int32
    [B], end int32 [B] and the address int64 [B] of each block's slot; parts float32 [P or more, H],
    written up to P.
    """
    begin, end, address = blocks
    num_blocks = begin.shape[0]
    if num_blocks == 0:
        return
    hidden, inner = spec.hidden_size, spec.intermediate_size
    act = torch.empty((pair_row.shape[0], inner), dtype=rows.dtype, device=rows.device)
    columns, depth = 64, 32 if rows.dtype == torch.float32 else 64
    sizes: dict[str, Any] = {"BLOCK_M": block_rows, "BLOCK_N": columns, "BLOCK_K": depth}
    _gate_up_kernel[(num_blocks, triton.cdiv(inner, columns))](
        rows, pair_row, act, begin, end, address, hidden, inner, **sizes
    )
    _down_kernel[(num_blocks, triton.cdiv(hidden, columns))](
        act, parts, begin, end, address, hidden, inner, **sizes
    )
