"""Bytes of events and effects for the journal and for commands to shards: msgpack, arrays as dtype,
shape and raw bytes.

Never pickle. Arrays come back read-only. Encoding is deterministic: equal values give equal bytes,
but for sets of numbers, whose order depends on how they came to be. Bytes that are no such message,
whatever else they are, raise `msgspec.ValidationError` and nothing else.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
import numpy as np

from placement.messages.effects import AnyCommand, Effects
from placement.messages.events import AnyEvent

_T = TypeVar("_T")
_DTYPES = frozenset({"<i4", "<i8", "<f4", "<f8", "|u1", "|b1", "<u8"})
_AXES_MAX = 8
_MALFORMED = (
    msgspec.DecodeError,  # cut off, or no msgpack
    RecursionError,  # nested deeper than the interpreter's stack
    ValueError,
    TypeError,
    LookupError,
    AttributeError,
    ArithmeticError,
)
"""What reading foreign bytes may raise: msgspec, and the checks and conversions of what it
builds."""


def _enc(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        array = np.ascontiguousarray(value)
        return {"d": array.dtype.str, "s": list(array.shape), "b": array.tobytes()}
    if isinstance(value, np.integer):
        return int(value)
    if isinstance(value, np.floating):
        return float(value)
    raise NotImplementedError(f"cannot encode {type(value).__name__}")


def _array(value: Any) -> np.ndarray[Any, Any]:
    if not isinstance(value, dict) or value.keys() != {"d", "s", "b"}:
        raise ValueError("an array is a map of d (dtype), s (shape) and b (bytes)")
    kind, shape, data = value["d"], value["s"], value["b"]
    if not isinstance(kind, str) or kind not in _DTYPES:
        raise ValueError(f"array dtype {kind!r:.40} is not one of {sorted(_DTYPES)}")
    if not isinstance(shape, list) or len(shape) > _AXES_MAX:
        raise ValueError(f"array shape must be a list of at most {_AXES_MAX} lengths")
    if not all(type(length) is int and length >= 0 for length in shape):
        raise ValueError("array shape must hold whole numbers from 0")
    dtype = np.dtype(kind)
    # In Python's integers, so that no product of declared lengths overflows.
    if not isinstance(data, bytes) or len(data) != math.prod(shape) * dtype.itemsize:
        raise ValueError("array bytes are not those that dtype and shape make")
    return np.frombuffer(data, dtype=dtype).reshape(shape)


def _dec(kind: type, value: Any) -> Any:
    origin = getattr(kind, "__origin__", kind)
    if origin is np.ndarray:
        return _array(value)
    raise NotImplementedError(f"cannot decode {kind!r}")


_ENCODER = msgspec.msgpack.Encoder(enc_hook=_enc)
_EVENT = msgspec.msgpack.Decoder(AnyEvent, dec_hook=_dec)
_COMMAND = msgspec.msgpack.Decoder(AnyCommand, dec_hook=_dec)
_EFFECTS = msgspec.msgpack.Decoder(Effects, dec_hook=_dec)


def encode(value: object) -> bytes:
    """Canonical msgpack bytes of any event, command, effects, record, table or window."""
    return _ENCODER.encode(value)


def _decoded(decode: Callable[[bytes], _T], data: bytes) -> _T:
    try:
        return decode(data)
    except _MALFORMED as problem:
        # Cut, since it may quote what was sent, of whatever length.
        raise msgspec.ValidationError(
            f"no message of this version ({problem!s:.200}); run one version on all parts"
        ) from problem


def decode_event(data: bytes) -> AnyEvent:
    """Event from its bytes. Raises msgspec.ValidationError on anything else."""
    return _decoded(_EVENT.decode, data)


def decode_command(data: bytes) -> AnyCommand:
    """Command from its bytes. Raises msgspec.ValidationError on anything else."""
    return _decoded(_COMMAND.decode, data)


def decode_effects(data: bytes) -> Effects:
    """Effects from their bytes. Raises msgspec.ValidationError on anything else."""
    return _decoded(_EFFECTS.decode, data)


def decode_as(data: bytes, kind: type[_T]) -> _T:
    """Any struct of this package (RoutingTable, LoadWindow, engine snapshot ...) from its bytes.
    Raises msgspec.ValidationError on anything else."""
    return _decoded(lambda given: msgspec.msgpack.decode(given, type=kind, dec_hook=_dec), data)
