"""Bytes that are no message raise one typed error, whatever is wrong with them: the journal, the
wire and the shards catch no other."""

import msgspec
import numpy as np
import pytest

from placement.layout import ExpertLayout
from placement.messages.codec import (
    decode_as,
    decode_command,
    decode_effects,
    decode_event,
    encode,
)
from placement.routing import RoutingTable
from tests.builders import make_layout, make_table

TABLE = make_table(make_layout([[0, 1], [2, 3]]))
DEEP = b"\x81\xa1q" + b"\x91" * 5000


def altered(value, **changes):
    return encode({**msgspec.msgpack.decode(encode(value)), **changes})


def array(**changes):
    return {"d": "<i4", "s": [2], "b": bytes(8), **changes}


@pytest.mark.parametrize("decode", [decode_event, decode_command, decode_effects])
@pytest.mark.parametrize(
    "data",
    [b"", b"\xc1", b"\xdd\xff\xff\xff\xff", DEEP, b"\x91\xa1\xff", encode(3)],
    ids=["empty", "no_msgpack", "huge_list", "deep", "no_utf8", "number"],
)
def test_no_message_is_one_error(decode, data):
    with pytest.raises(msgspec.ValidationError):
        decode(data)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (array(s=[-1]), "whole numbers from 0"),
        (array(s=[2.0]), "whole numbers from 0"),
        (array(s=[True, 2]), "whole numbers from 0"),
        (array(s=[2**63, 2**63]), "bytes are not those"),
        (array(s=[2**32, 2**32]), "bytes are not those"),
        (array(s=[1] * 9), "at most 8 lengths"),
        (array(s=None), "at most 8 lengths"),
        (array(b="text"), "bytes are not those"),
        (array(b=bytes(7)), "bytes are not those"),
        (array(d=["<i4"]), "array dtype"),
        (array(x=1), "an array is a map"),
        ({"d": "<i4", "s": [2]}, "an array is a map"),
        (5, "an array is a map"),
    ],
    ids=lambda case: str(case)[:40],
)
def test_what_an_array_declares_is_what_it_has(wrong, said):
    with pytest.raises(msgspec.ValidationError, match=said):
        decode_as(altered(TABLE, replica_ptr=wrong), RoutingTable)
    with pytest.raises(msgspec.ValidationError, match=said):
        decode_as(encode(wrong), np.ndarray)


def test_an_array_without_elements_is_one():
    found = decode_as(encode(array(s=[0, 3], b=b"")), np.ndarray)
    assert found.shape == (0, 3)


def test_what_checks_of_values_raise_is_the_same_error():
    """Layouts are checked as they are made, and arrays as they are numbers: of the wrong kind they
    raise what they like."""
    layout = make_layout([[0, 1], [2, 3]])
    for wrong in (array(d="<f8", s=[1], b=bytes(8)), array(s=[2])):
        with pytest.raises(msgspec.ValidationError):
            decode_as(altered(layout, slots=wrong), ExpertLayout)


def test_an_error_quotes_little_of_what_was_sent():
    for data in (encode({"type": "x" * 100_000}), altered(TABLE, replica_ptr=array(d="x" * 9999))):
        with pytest.raises(msgspec.ValidationError) as caught:
            decode_event(data)
        assert len(str(caught.value)) < 400
