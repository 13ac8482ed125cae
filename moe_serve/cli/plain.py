"""Messages of the admin API as dicts for `-o json`: int64 stays a number, enums are their words.

(The protobuf library's own form writes int64 as text, which no `jq` sums up.) Responsible for this
form alone; the names are those of the .proto file. Called by commands.
"""

from __future__ import annotations

from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

_Field = Any
"""A field's descriptor: one of two classes that share no base in the stubs."""


def enum_word(message: Message, field: str) -> str:
    """Word of an enum field: MOVE_KIND_REPLICATE is "replicate"; unspecified is ""."""
    return _word(message.DESCRIPTOR.fields_by_name[field], int(getattr(message, field)))


def plain(message: Message) -> dict[str, Any]:
    """Every field of a message by name, defaults included. bytes fields are left out: they are
    arrays, and views name what is in them."""
    found: dict[str, Any] = {}
    for field in message.DESCRIPTOR.fields:
        if field.type != FieldDescriptor.TYPE_BYTES:
            found[field.name] = _value(field, getattr(message, field.name))
    return found


def _value(field: _Field, value: Any) -> Any:
    entry = field.message_type
    if entry is not None and entry.GetOptions().map_entry:
        return dict(sorted(value.items()))
    if field.is_repeated:
        return [_one(field, item) for item in value]
    return _one(field, value)


def _one(field: _Field, value: Any) -> Any:
    if field.type == FieldDescriptor.TYPE_MESSAGE:
        return plain(value)
    return _word(field, value) if field.type == FieldDescriptor.TYPE_ENUM else value


def _word(field: _Field, number: int) -> str:
    kind = field.enum_type
    assert kind is not None, f"{field.name} is no enum"
    # STEP_KIND_ADD of StepKind: what follows the name of the enum.
    prefix = "".join(f"_{c}" if c.isupper() else c.upper() for c in kind.name).lstrip("_") + "_"
    known = kind.values_by_number.get(number)
    word = known.name.removeprefix(prefix).lower() if known is not None else str(number)
    return "" if word == "unspecified" else word
