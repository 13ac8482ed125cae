"""Bytes of events and effects for the journal and for commands to shards: msgpack, arrays as dtype,
shape and raw bytes.

Never pickle. Arrays come back read-only. Encoding is deterministic: equal values give equal bytes.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec
import numpy as np

from placement.messages.effects import AnyCommand, Effects
from placement.messages.events import AnyEvent

_T = TypeVar("_T")
_DTYPES = frozenset({"<i4", "<i8", "<f4", "<f8", "|u1", "|b1", "<u8"})


def _enc(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        array = np.ascontiguousarray(value)
        return {"d": array.dtype.str, "s": list(array.shape), "b": array.tobytes()}
    if isinstance(value, np.integer):
        return int(value)
    if isinstance(value, np.floating):
        return float(value)
    raise NotImplementedError(f"cannot encode {type(value).__name__}")


def _array(value: dict[str, Any]) -> np.ndarray[Any, Any]:
    if value.get("d") not in _DTYPES:
        raise ValueError(f"array dtype {value.get('d')!r} is not one of {sorted(_DTYPES)}")
    array = np.frombuffer(value["b"], dtype=np.dtype(value["d"]))
    return array.reshape([int(n) for n in value["s"]])


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


def decode_event(data: bytes) -> AnyEvent:
    """Event from its bytes. Raises msgspec.ValidationError on anything else."""
    return _EVENT.decode(data)


def decode_command(data: bytes) -> AnyCommand:
    """Command from its bytes. Raises msgspec.ValidationError on anything else."""
    return _COMMAND.decode(data)


def decode_effects(data: bytes) -> Effects:
    """Effects from their bytes. Raises msgspec.ValidationError on anything else."""
    return _EFFECTS.decode(data)


def decode_as(data: bytes, kind: type[_T]) -> _T:
    """Any struct of this package (RoutingTable, LoadWindow, engine snapshot ...) from its bytes."""
    return msgspec.msgpack.decode(data, type=kind, dec_hook=_dec)
