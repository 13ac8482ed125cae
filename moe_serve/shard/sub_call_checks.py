"""Checks of every field of a sub-call, again at the shard: the router's checks are not trusted.

Responsible for refusing what could read outside an array, poison another row or count wrongly. Must
never look into hidden states: a row that is not finite is served as it is and stays in its row.
Called on the wire thread before a sub-call is queued.
"""

from __future__ import annotations

import math
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from moe_serve.errors import FieldViolation, InvalidArgument
from moe_serve.ports import Cause, SubCall
from moe_serve.shard.kernels import count_unsound
from moe_serve.shard.served_model import ServedModel
from placement.topology import NUM_PHASES

_INT32_MAX: Final = int(np.iinfo(np.int32).max)


def check_sub_call(call: SubCall, model: ServedModel) -> None:
    """Raise InvalidArgument naming every field that is wrong, with its limit."""
    found = [*_scalars(call, model), *_rows(call, model)]
    if not found and _sound(call, model):
        return
    found += _shapes(call, model)
    if not found:
        # Contents are only looked at where shapes hold.
        found = list(_contents(call, model))
    if found:
        raise InvalidArgument(
            "; ".join(f"{v.field}: {v.description}" for v in found), violations=tuple(found)
        )


def _scalars(call: SubCall, model: ServedModel) -> list[FieldViolation]:
    found = []
    for name, value, limit in (
        ("layer", call.layer, model.num_layers),
        ("phase", call.phase, NUM_PHASES),
        ("cause", int(call.cause), len(Cause)),
    ):
        if not 0 <= value < limit:
            found.append(FieldViolation(name, f"must lie in [0, {limit}) (got {value})"))
    if not (call.timeout_s > 0 and math.isfinite(call.timeout_s)):
        found.append(
            FieldViolation("timeout_s", f"must be finite and above 0 (got {call.timeout_s})")
        )
    return found


def _sound(call: SubCall, model: ServedModel) -> bool:
    """Whether the index block needs no second look: one pass over all of it."""
    num_pairs = len(call.pair_row)
    if call.pair_tag.shape != (num_pairs,) or call.pair_tag.dtype != np.int64:
        return False
    if call.row_id.shape != (len(call.rows),):
        return False
    try:
        unsound = count_unsound(
            call.row_id,
            call.pair_row,
            call.pair_slot,
            call.pair_gate,
            call.pair_k,
            call.pair_expert,
            model.num_experts,
            model.top_k,
        )
    except TypeError:  # another dtype, another number of axes, or not contiguous
        return False
    return bool(unsound == 0)


def _rows(call: SubCall, model: ServedModel) -> list[FieldViolation]:
    found = []
    hidden, rows = model.expert.hidden_size, call.rows
    if rows.ndim != 2 or rows.shape[1] != hidden:
        found.append(FieldViolation("rows", f"must be [rows, {hidden}] (got {list(rows.shape)})"))
    if rows.dtype != call.dtype.numpy:
        found.append(FieldViolation("rows", f"must be {call.dtype.numpy} (got {rows.dtype})"))
    return found


def _shapes(call: SubCall, model: ServedModel) -> list[FieldViolation]:
    found = []
    num_rows = call.rows.shape[0] if call.rows.ndim else 0
    num_pairs = call.pair_row.shape[0] if call.pair_row.ndim else 0
    vectors: tuple[tuple[str, npt.NDArray[Any], type[np.generic], int], ...] = (
        ("row_id", call.row_id, np.int32, num_rows),
        ("pair_row", call.pair_row, np.int32, num_pairs),
        ("pair_slot", call.pair_slot, np.int32, num_pairs),
        ("pair_tag", call.pair_tag, np.int64, num_pairs),
        ("pair_gate", call.pair_gate, np.float32, num_pairs),
        ("pair_k", call.pair_k, np.int32, num_pairs),
        ("pair_expert", call.pair_expert, np.int32, num_pairs),
    )
    for name, array, dtype, length in vectors:
        if array.shape != (length,) or array.dtype != dtype:
            problem = f"must be {dtype.__name__} [{length}] (got {array.dtype} {list(array.shape)})"
            found.append(FieldViolation(name, problem))
        elif not array.flags.c_contiguous:
            # Compiled loops take no other form; what they refuse would end the computing thread.
            found.append(FieldViolation(name, "must be contiguous (it has gaps)"))
    if num_pairs > num_rows * model.top_k:
        found.append(
            FieldViolation(
                "pairs", f"{num_rows} rows have at most {model.top_k} pairs each (got {num_pairs})"
            )
        )
    return found


def _contents(call: SubCall, model: ServedModel) -> list[FieldViolation]:
    found = []
    for name, array, limit in (
        ("pair_row", call.pair_row, call.rows.shape[0]),
        ("pair_expert", call.pair_expert, model.num_experts),
        ("pair_k", call.pair_k, model.top_k),
        ("row_id", call.row_id, _INT32_MAX),
        ("pair_slot", call.pair_slot, _INT32_MAX),
    ):
        # Read as unsigned a negative number is above every limit: one pass instead of two.
        if array.size and int(array.view(np.uint32).max()) >= limit:
            found.append(
                FieldViolation(
                    name, f"must lie in [0, {limit}) (got {int(array.min())}..{int(array.max())})"
                )
            )
    if not np.isfinite(call.pair_gate).all():
        bad = int(np.flatnonzero(~np.isfinite(call.pair_gate))[0])
        found.append(FieldViolation("pair_gate", f"must be finite (pair {bad} is not)"))
    if not found and call.pair_row.size:
        place = call.pair_row.astype(np.int64) * model.top_k + call.pair_k
        if np.bincount(place).max() > 1:
            twice = int(np.bincount(place).argmax())
            found.append(
                FieldViolation(
                    "pair_k",
                    f"row {twice // model.top_k} names k-slot {twice % model.top_k} more than once",
                )
            )
    return found
