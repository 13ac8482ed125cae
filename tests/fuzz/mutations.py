"""Changes to inputs that keep most of their form, so that they come past a decoder's first look.

Every function is (bytes, generator) -> bytes and takes any bytes: what it cannot read it changes
byte by byte.
"""

from __future__ import annotations

import copy
import json
import random
import struct
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import yaml
from google.protobuf.message import DecodeError, Message

from tests.fuzz.target import Mutate, joined, pieces

INTEGERS = (
    *(0, 1, 2, 3, 7, 8, 127, 128, 255, 256, 65_535, 65_536, 2**24, 2**31 - 1, 2**31, 2**32 - 1),
    *(2**32, 2**40, 2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 1, -1, -2, -128, -(2**31), -(2**63)),
)
FLOATS = (0.0, -0.0, 1.0, -1.0, 0.5, 1e-9, 1e300, float("nan"), float("inf"), float("-inf"))
TEXTS = (
    "",
    "a",
    "é",
    "\0",
    "..",
    "../x",
    "%2e%2e",
    "a" * 129,
    "9" * 30,
    "9" * 5000,
    "0x" + "f" * 5000,
)
UNREADABLE = (
    ValueError,
    TypeError,
    RecursionError,
    LookupError,
    AttributeError,
    ArithmeticError,
    yaml.YAMLError,
)
DEPTH = 1500
"""Deeper than the interpreter's stack."""


def raw(data: bytes, rng: random.Random) -> bytes:
    """One change to some bytes."""
    if not data:
        return rng.randbytes(rng.randint(1, 16))
    at = rng.randrange(len(data))
    end = min(len(data), at + rng.choice((1, 1, 2, 4, 8, 16, 64)))
    match rng.randrange(7):
        case 0:
            return data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :]
        case 1:
            return data[:at] + rng.randbytes(end - at) + data[end:]
        case 2:
            return data[:at] + data[end:]
        case 3:
            return data[:at] + data[at:end] * rng.choice((2, 3, 50)) + data[end:]
        case 4:
            return data[:at]
        case 5:
            size = rng.choice((1, 2, 4, 8))
            value = rng.choice(INTEGERS) % (1 << 8 * size)
            number = value.to_bytes(size, rng.choice(("little", "big")))
            return data[:at] + number + data[at + size :]
        case _:
            other = rng.randrange(len(data))
            return data[:at] + data[other : other + 16] + data[at:]


def words_of(words: Sequence[bytes]) -> Mutate:
    """Puts words of a language into bytes, besides other changes."""

    def mutate(data: bytes, rng: random.Random) -> bytes:
        if not words or rng.random() < 0.5:
            return raw(data, rng)
        at = rng.randint(0, len(data))
        end = at if rng.random() < 0.5 else min(len(data), at + rng.randint(1, 8))
        return data[:at] + rng.choice(words) + data[end:]

    return mutate


def either(*several: Mutate) -> Mutate:
    """Any of several."""
    return lambda data, rng: rng.choice(several)(data, rng)


def of_trees(
    loads: Callable[[bytes], Any], dumps: Callable[[Any], bytes], deep: tuple[bytes, bytes]
) -> Mutate:
    """Changes one value of nested lists and maps. deep: bytes that open and close a nested list."""

    def mutate(data: bytes, rng: random.Random) -> bytes:
        choice = rng.random()
        if choice < 0.3:
            return raw(data, rng)
        if choice < 0.302:
            return _deeper(data, deep, rng)
        try:
            return dumps(_changed(loads(data), rng))
        except UNREADABLE:
            return raw(data, rng)

    return mutate


def _deeper(data: bytes, deep: tuple[bytes, bytes], rng: random.Random) -> bytes:
    at = rng.randint(0, len(data))
    depth = rng.choice((50, DEPTH))
    return data[:at] + deep[0] * depth + deep[1] * depth + data[at:]


def _changed(tree: Any, rng: random.Random) -> Any:
    for change in range(rng.choice((1, 1, 2, 4))):
        place = _place(tree, rng)
        if place is None:
            return _value(tree, rng)
        holder, key = place
        match rng.randrange(6):
            case 0:
                del holder[key]
            case 1 if isinstance(holder, list):
                # Many once: many of many would take the memory that is watched.
                holder[key:key] = [holder[key]] * rng.choice((1, 2, 2 if change else 100))
            case 1:
                holder[rng.choice(("", "x", "type", f"{key}_"))] = holder[key]
            case 2:
                other, from_key = _place(tree, rng) or place
                holder[key] = copy.deepcopy(other[from_key])
            case _:
                holder[key] = _value(holder[key], rng)
    return tree


def _place(tree: Any, rng: random.Random) -> tuple[Any, Any] | None:
    """A list or map somewhere in a tree and a key of it; None where there is none."""
    found = None
    while isinstance(tree, dict | list) and tree:
        key = rng.choice(list(tree)) if isinstance(tree, dict) else rng.randrange(len(tree))
        found = (tree, key)
        tree = tree[key]
        if rng.random() < 0.15:
            break
    return found


def _value(old: Any, rng: random.Random) -> Any:
    kind = rng.randrange(10)
    if kind < 6:  # of the old one's type
        if isinstance(old, bool):
            return not old
        if isinstance(old, int):
            return rng.choice((rng.choice(INTEGERS), old + 1, old - 1, -old))
        if isinstance(old, float):
            return rng.choice(FLOATS)
        if isinstance(old, str):
            return rng.choice((*TEXTS, old + "x", old[:-1], old * 2))
        if isinstance(old, bytes):
            return raw(old, rng)
    choices: tuple[Any, ...] = (None, True, [], {}, [[[]]], b"", *INTEGERS, *FLOATS, *TEXTS)
    return rng.choice(choices)


msgpack = of_trees(msgspec.msgpack.decode, msgspec.msgpack.encode, (b"\x91", b""))
json_text = of_trees(msgspec.json.decode, lambda tree: json.dumps(tree).encode(), (b"[", b"]"))
yaml_text = of_trees(
    # JSON is YAML. The loader in C, where there is one, is many times faster.
    lambda data: yaml.load(data, getattr(yaml, "CSafeLoader", yaml.SafeLoader)),  # noqa: S506
    lambda tree: json.dumps(tree).encode(),
    (b"[", b"]"),
)


def of_messages(make: Callable[[], Message]) -> Mutate:
    """Changes fields of a protobuf message."""

    def mutate(data: bytes, rng: random.Random) -> bytes:
        if rng.random() < 0.15:
            return raw(data, rng)
        message = make()
        try:
            message.ParseFromString(data)
        except DecodeError:
            return raw(data, rng)
        for _ in range(rng.choice((1, 1, 2, 4))):
            change_field(message, rng)
        return message.SerializeToString()

    return mutate


def change_field(message: Message, rng: random.Random) -> None:
    """Set, clear or change one field, or one of a message inside."""
    field = rng.choice(message.DESCRIPTOR.fields) if message.DESCRIPTOR.fields else None
    if field is None:
        return
    if rng.random() < 0.1:
        message.ClearField(field.name)
        return
    if field.message_type is not None:
        if field.message_type.GetOptions().map_entry:
            return
        inside = getattr(message, field.name)
        if not field.is_repeated:
            change_field(inside, rng)
        elif inside and rng.random() < 0.8:
            change_field(rng.choice(inside), rng)
        else:
            inside.add()
        return
    if not field.is_repeated:
        setattr(message, field.name, _scalar(field, getattr(message, field.name), rng))
        return
    values = list(getattr(message, field.name))
    at = rng.randint(0, len(values))
    if values and rng.random() < 0.7:
        at = rng.randrange(len(values))
        values[at : at + 1] = [_scalar(field, values[at], rng)] if rng.random() < 0.8 else []
    else:
        values[at:at] = [_scalar(field, 1, rng)] * rng.choice((1, 1, 2, 9, 100))
    message.ClearField(field.name)
    getattr(message, field.name).extend(values)


def _scalar(field: Any, old: Any, rng: random.Random) -> Any:
    kind = field.cpp_type
    if kind in (field.CPPTYPE_FLOAT, field.CPPTYPE_DOUBLE):
        return rng.choice(FLOATS)
    if kind == field.CPPTYPE_BOOL:
        return rng.random() < 0.5
    if kind == field.CPPTYPE_STRING:
        if field.type == field.TYPE_BYTES:
            return raw(old if isinstance(old, bytes) else b"", rng)
        return rng.choice(TEXTS)
    low, high = {
        field.CPPTYPE_INT32: (-(2**31), 2**31 - 1),
        field.CPPTYPE_ENUM: (-(2**31), 2**31 - 1),
        field.CPPTYPE_INT64: (-(2**63), 2**63 - 1),
        field.CPPTYPE_UINT32: (0, 2**32 - 1),
        field.CPPTYPE_UINT64: (0, 2**64 - 1),
    }[kind]
    value = rng.choice((rng.choice(INTEGERS), rng.randint(0, 9), old + 1))
    return min(max(int(value), low), high)


def of_pieces(most: int, *inner: Mutate) -> Mutate:
    """Changes one of several byte strings, or their number and order. See `target.pieces`. inner:
    what changes the first, the second ...; the last of them changes the rest, too."""

    def mutate(data: bytes, rng: random.Random) -> bytes:
        parts = pieces(data, most)
        if not parts or rng.random() < 0.1:
            return raw(data, rng)
        at = rng.randrange(len(parts))
        match rng.randrange(8):
            case 0:
                del parts[at]
            case 1:
                parts.insert(rng.randint(0, len(parts)), parts[at])
            case 2:
                other = rng.randrange(len(parts))
                parts[at], parts[other] = parts[other], parts[at]
            case _:
                parts[at] = inner[min(at, len(inner) - 1)](parts[at], rng)
        if not parts or any(len(part) > 65_535 for part in parts[:-1]):
            return raw(data, rng)
        return joined(parts)

    return mutate


def behind(prefix: int, inner: Mutate) -> Mutate:
    """Changes what stands behind the first bytes, and those now and then."""

    def mutate(data: bytes, rng: random.Random) -> bytes:
        head, rest = data[:prefix], data[prefix:]
        if rng.random() < 0.05:
            head = rng.randbytes(prefix)
        return head + inner(rest, rng)

    return mutate


def header(layout: struct.Struct, at: int) -> Mutate:
    """Changes one number of a packed header that begins at byte `at`, and bytes elsewhere."""

    def mutate(data: bytes, rng: random.Random) -> bytes:
        end = at + layout.size
        if len(data) < end or rng.random() < 0.3:
            return raw(data, rng)
        values: list[Any] = list(layout.unpack_from(data, at))
        place = rng.randrange(len(values))
        old = values[place]
        for _ in range(8):
            if isinstance(old, float):
                values[place] = rng.choice(FLOATS)
            elif isinstance(old, int):
                values[place] = rng.choice(
                    (rng.choice(INTEGERS), old + 1, old - 1, rng.randint(0, 9))
                )
            try:
                return data[:at] + layout.pack(*values) + data[end:]
            except struct.error:  # does not fit its place
                continue
        return raw(data, rng)

    return mutate
