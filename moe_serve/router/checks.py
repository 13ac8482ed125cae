"""Every check of a Forward request, before anything is allocated for it: one function a group of
fields.

All faults that can be told apart are reported at once, each with its field, the limit and the
value. Hidden states are not looked at: NaN and Inf are computed as they are and stay in their row.
Ids and gates of invalid pairs are not looked at either: a front end's padding id (`num_experts`) is
sent as an invalid pair, as an id it is refused.

Responsible for what a request may hold. Must never change it. Called by `service`; shards check
their part again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from moe_serve.errors import FieldViolation, InvalidArgument, ResourceExhausted
from moe_serve.ports import DType
from moe_serve.router.kernels import ABOVE, BELOW, GOOD, first_bad_gate, first_bad_id, frozen
from moe_serve.rpc import codec, dispatch_pb2
from placement.topology import MoeSpec, Phase

REQUEST_ID_CHARS_MAX = 128
ATTEMPT_MAX = 100
OTHER_FIELDS_BYTES = 1024
"""More than tags, shapes and numbers of a message take beside its bytes and strings."""
_PHASES = {
    int(dispatch_pb2.FORWARD_PHASE_PREFILL): Phase.PREFILL,
    int(dispatch_pb2.FORWARD_PHASE_DECODE): Phase.DECODE,
}


@dataclass(frozen=True, slots=True, eq=False)
class ForwardInput:
    """A checked request: T rows, k pairs a row.

    hidden: raw [T, H] of `dtype`, read-only. topk_ids: int32 [T, k]. gates: float32 [T, k]. valid:
    uint8 [T, k], 1 where both the row and the pair are valid; only there ids and gates mean
    anything.
    """

    layer: int
    phase: Phase
    dtype: DType
    hidden: npt.NDArray[Any]
    topk_ids: npt.NDArray[np.int32]
    gates: npt.NDArray[np.float32]
    valid: npt.NDArray[np.uint8]
    request_id: str
    attempt: int
    trace: str = ""
    """`traceparent` of the router's span of the request, "" where it has none."""


@dataclass(frozen=True, slots=True)
class RawBytes:
    """The bytes of a request's tensors, taken out of the message once: each access copies."""

    hidden: bytes
    ids: bytes
    gates: bytes


def check_forward(
    request: dispatch_pb2.ForwardRequest, spec: MoeSpec, max_message_bytes: int
) -> ForwardInput:
    """The request as arrays. Raises InvalidArgument or ResourceExhausted, naming fields."""
    raw = RawBytes(request.hidden_states.raw, request.topk_ids.raw, request.topk_weights.raw)
    check_size(request, raw, max_message_bytes)
    check_model(request.model, spec)
    faults = [*check_header(request, spec), *check_hidden(request, raw, spec)]
    faults += check_pairs(request, raw, spec)
    _refuse(faults)
    rows, width = int(request.topk_ids.shape[0]), int(request.topk_ids.shape[1])
    _refuse(check_bitmaps(request, rows, width))
    ids = codec.tensor_array("topk_ids", request.topk_ids, (codec.INT32,), raw.ids)
    gates = codec.tensor_array("topk_weights", request.topk_weights, (codec.FP32,), raw.gates)
    hidden = codec.tensor_array(
        "hidden_states", request.hidden_states, codec.HIDDEN_TYPES, raw.hidden
    )
    valid = frozen(valid_pairs(request, rows, width))
    _refuse([*check_ids(ids, valid, spec.num_experts), *check_gates(gates, valid)])
    return ForwardInput(
        layer=request.layer,
        phase=_PHASES[request.phase],
        dtype=DType(request.hidden_states.data_type),
        hidden=hidden,
        topk_ids=ids,
        gates=gates,
        valid=valid,
        request_id=request.request_id,
        attempt=request.attempt,
    )


def check_size(request: dispatch_pb2.ForwardRequest, raw: RawBytes, max_message_bytes: int) -> None:
    """Refuse a message above the advertised limit. Raises ResourceExhausted."""
    size = len(raw.hidden) + len(raw.ids) + len(raw.gates)
    size += len(request.row_valid) + len(request.pair_valid)
    names = len(request.model) + len(request.request_id)
    size += 4 * (names + len(request.traceparent) + len(request.tracestate))
    # The exact size costs a pass over the message; it is only asked for near the limit.
    if size + OTHER_FIELDS_BYTES > max_message_bytes:
        size = request.ByteSize()
    if size > max_message_bytes:
        text = f"the message has {size} bytes, the limit is {max_message_bytes}; split the batch"
        raise ResourceExhausted(text, violations=(FieldViolation("hidden_states", text),))


def check_model(model: str, spec: MoeSpec) -> None:
    """Refuse another model than the one served; "" means it. Raises InvalidArgument."""
    if model and model != spec.model:
        text = f"{model[:64]!r} is not served here; use {spec.model!r} or leave it empty"
        raise InvalidArgument(f"model: {text}", violations=(FieldViolation("model", text),))


def check_header(request: dispatch_pb2.ForwardRequest, spec: MoeSpec) -> list[FieldViolation]:
    """Layer, phase, request id and attempt."""
    faults = []
    if not 0 <= request.layer < spec.num_layers:
        faults.append(
            FieldViolation("layer", f"must be in [0, {spec.num_layers}), got {request.layer}")
        )
    if request.phase not in _PHASES:
        faults.append(
            FieldViolation("phase", f"must be PREFILL (1) or DECODE (2), got {request.phase}")
        )
    if len(request.request_id) > REQUEST_ID_CHARS_MAX:
        got = len(request.request_id)
        faults.append(
            FieldViolation("request_id", f"may have {REQUEST_ID_CHARS_MAX} characters, got {got}")
        )
    if not 0 <= request.attempt <= ATTEMPT_MAX:
        faults.append(
            FieldViolation("attempt", f"must be in [0, {ATTEMPT_MAX}], got {request.attempt}")
        )
    return faults


def check_hidden(
    request: dispatch_pb2.ForwardRequest, raw: RawBytes, spec: MoeSpec
) -> list[FieldViolation]:
    """Type, shape [T, H] and bytes of the hidden states."""
    tensor = request.hidden_states
    fault = codec.tensor_fault("hidden_states", tensor, len(raw.hidden), codec.HIDDEN_TYPES)
    if fault is not None:
        return [fault]
    if len(tensor.shape) != 2 or tensor.shape[1] != spec.hidden_size:
        return [
            FieldViolation(
                "hidden_states.shape",
                f"must be [rows, {spec.hidden_size}], got {list(tensor.shape)}",
            )
        ]
    limit = codec.rows_max(spec.top_k)
    if tensor.shape[0] > limit:
        return [
            FieldViolation(
                "hidden_states.shape",
                f"may have {limit} rows, got {tensor.shape[0]}; send them in parts",
            )
        ]
    return []


def check_pairs(
    request: dispatch_pb2.ForwardRequest, raw: RawBytes, spec: MoeSpec
) -> list[FieldViolation]:
    """Types, shapes [T, k] and bytes of ids and gates, and that both have the rows of the hidden
    states.
    """
    faults = []
    ids, gates = request.topk_ids, request.topk_weights
    for field, tensor, size, kind in (
        ("topk_ids", ids, len(raw.ids), codec.INT32),
        ("topk_weights", gates, len(raw.gates), codec.FP32),
    ):
        fault = codec.tensor_fault(field, tensor, size, (kind,))
        if fault is not None:
            faults.append(fault)
        elif len(tensor.shape) != 2:
            faults.append(
                FieldViolation(f"{field}.shape", f"must be [rows, k], got {list(tensor.shape)}")
            )
    if faults:
        return faults
    if not 1 <= ids.shape[1] <= spec.top_k:
        faults.append(
            FieldViolation("topk_ids.shape", f"k must be in [1, {spec.top_k}], got {ids.shape[1]}")
        )
    hidden = request.hidden_states.shape
    if len(hidden) == 2 and ids.shape[0] != hidden[0]:
        faults.append(
            FieldViolation(
                "topk_ids.shape",
                f"must have the {hidden[0]} rows of hidden_states, got {ids.shape[0]}",
            )
        )
    if list(gates.shape) != list(ids.shape):
        faults.append(
            FieldViolation(
                "topk_weights.shape",
                f"must be that of topk_ids, {list(ids.shape)}, got {list(gates.shape)}",
            )
        )
    return faults


def check_bitmaps(
    request: dispatch_pb2.ForwardRequest, rows: int, width: int
) -> list[FieldViolation]:
    """Lengths of row_valid and pair_valid; empty means all valid."""
    faults = []
    for field, size, bits in (
        ("row_valid", len(request.row_valid), rows),
        ("pair_valid", len(request.pair_valid), rows * width),
    ):
        wanted = codec.bitmap_bytes(bits)
        if size not in (0, wanted):
            faults.append(
                FieldViolation(field, f"{bits} bits need {wanted} bytes (or none), got {size}")
            )
    return faults


def valid_pairs(
    request: dispatch_pb2.ForwardRequest, rows: int, width: int
) -> npt.NDArray[np.uint8]:
    """uint8 [rows, width]: 1 where row and pair are valid."""
    valid = np.ones((rows, width), np.uint8)
    if request.row_valid:
        valid &= codec.unpack_bits(request.row_valid, (rows, 1)).view(np.uint8)
    if request.pair_valid:
        valid &= codec.unpack_bits(request.pair_valid, (rows, width)).view(np.uint8)
    return valid


def check_ids(
    ids: npt.NDArray[np.int32], valid: npt.NDArray[np.uint8], num_experts: int
) -> list[FieldViolation]:
    """Ids of valid pairs: in [0, num_experts), distinct in a row. Names the first that is not."""
    status, at = first_bad_id(frozen(ids), frozen(valid), num_experts)
    if status == GOOD:
        return []
    row, j = divmod(at, ids.shape[1])
    got = int(ids[row, j])
    if status in (BELOW, ABOVE):
        text = f"must be in [0, {num_experts}), got {got}; mark padding invalid with pair_valid"
    else:
        text = f"expert {got} is twice in row {row}; the ids of a row are distinct"
    return [FieldViolation(f"topk_ids[{row}][{j}]", text)]


def check_gates(
    gates: npt.NDArray[np.float32], valid: npt.NDArray[np.uint8]
) -> list[FieldViolation]:
    """Gate weights of valid pairs are finite; any sign. Names the first that is not."""
    at = first_bad_gate(frozen(gates), frozen(valid))
    if at < 0:
        return []
    row, j = divmod(at, gates.shape[1])
    return [
        FieldViolation(
            f"topk_weights[{row}][{j}]",
            f"must be finite, got {gates[row, j]}; mark padding invalid with row_valid",
        )
    ]


def _refuse(faults: list[FieldViolation]) -> None:
    if faults:
        text = "; ".join(f"{fault.field}: {fault.description}" for fault in faults)
        raise InvalidArgument(text, violations=tuple(faults))
