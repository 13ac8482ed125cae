"""Checks of a caller's arguments that must come before anything is cut or encoded. Pure.

Responsible for what would otherwise be misread silently (a mask of the wrong length, an id that
wraps), raise an untyped error, or end a stream that others use. Must never repeat what the router
checks: ids, gates, phase and k are its business. Called by AsyncClient.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from moe_serve.client.model_spec import ModelSpec
from moe_serve.errors import FieldViolation, InvalidArgument

Array = npt.NDArray[Any]

TIMEOUT_S_MAX = 3600.0
"""Longest deadline of a call, seconds."""
REQUEST_ID_CHARS_MAX = 128
"""The API's limit. It is checked here too: a longer one could push a message over the transport's
limit, which ends the whole stream."""


def check_shapes(
    hidden: Array,
    ids: Array,
    weights: Array,
    row_valid: Array | None = None,
    pair_valid: Array | None = None,
) -> None:
    """Shapes and kinds must agree. Raises InvalidArgument."""
    if hidden.ndim != 2:
        raise invalid("hidden", f"has shape {hidden.shape}; want [rows, hidden_size]")
    if ids.ndim != 2 or ids.shape[0] != hidden.shape[0]:
        raise invalid("topk_ids", f"has shape {ids.shape}; want [{hidden.shape[0]}, k]")
    if weights.shape != ids.shape:
        raise invalid(
            "topk_weights", f"has shape {weights.shape}; want that of topk_ids {ids.shape}"
        )
    if not np.issubdtype(ids.dtype, np.integer):
        raise invalid("topk_ids", f"is {ids.dtype}; want integers")
    if weights.dtype.kind in "bcOSUMm":
        raise invalid("topk_weights", f"is {weights.dtype}; want float32")
    for field, mask, shape in (
        ("row_valid", row_valid, hidden.shape[:1]),
        ("pair_valid", pair_valid, ids.shape),
    ):
        if mask is not None and (mask.shape != shape or mask.dtype != np.bool_):
            raise invalid(field, f"is {mask.dtype} {mask.shape}; want bool {shape}")


def check_model_fit(spec: ModelSpec, layer: int, hidden: Array) -> None:
    """The layer exists and rows have the model's size. Raises InvalidArgument."""
    if not 0 <= layer < spec.num_layers:
        raise invalid("layer", f"must be in [0, {spec.num_layers}), got {layer}")
    if hidden.shape[1] != spec.hidden_size:
        raise invalid("hidden", f"has shape {hidden.shape}; want [rows, {spec.hidden_size}]")


def check_request_id(request_id: str) -> None:
    """Raises InvalidArgument where a request id is too long."""
    if len(request_id) > REQUEST_ID_CHARS_MAX:
        raise invalid(
            "request_id", f"may have {REQUEST_ID_CHARS_MAX} characters, got {len(request_id)}"
        )


def check_timeout(timeout_s: float) -> float:
    """The timeout, seconds. 0 and below is a deadline that is over, not an error here. Raises
    InvalidArgument for NaN and above TIMEOUT_S_MAX."""
    if math.isnan(timeout_s) or timeout_s > TIMEOUT_S_MAX:
        raise invalid("timeout_s", f"must be at most {TIMEOUT_S_MAX:.0f}, got {timeout_s}")
    return timeout_s


def narrow_ids(ids: Array) -> npt.NDArray[np.int32]:
    """ids as int32 without wrapping: what does not fit is refused here, since it could wrap into a
    valid id."""
    if ids.size and (int(ids.min()) < -(2**31) or int(ids.max()) >= 2**31):
        raise invalid("topk_ids", f"lie in {int(ids.min())}..{int(ids.max())}; want int32")
    return np.ascontiguousarray(ids, dtype=np.int32)


def narrow_weights(weights: Array) -> npt.NDArray[np.float32]:
    """Gate weights as float32. What is too large becomes infinite, which the router refuses with
    its place."""
    with np.errstate(over="ignore"):
        return np.ascontiguousarray(weights, dtype=np.float32)


def invalid(field: str, description: str) -> InvalidArgument:
    """InvalidArgument that names one field."""
    return InvalidArgument(
        f"{field}: {description}", violations=(FieldViolation(field, description),)
    )
