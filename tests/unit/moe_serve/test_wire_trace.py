"""A sub-call's trace travels behind its request id, so that a shard of an earlier release takes the
message as well."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_serve.ports import SubCall
from moe_serve.rpc.trace_context import parse
from moe_serve.wire import codec
from moe_serve.wire.codec import decode, encode
from moe_serve.wire.frame import REQUEST_ID_BYTES_MAX
from tests.fakes.sub_calls import sub_call
from tests.fakes.traces import PARENT

MARK = "\x1f"


def _a_call(**changes: Any) -> SubCall:
    made = sub_call(np.ones((1, 4), np.float32), [(0, 5, 70, 0.5, 1)])
    return dataclasses.replace(made, **changes)


def _arrived(call: SubCall) -> SubCall:
    found = decode([bytes(frame) for frame in encode(call)])
    assert isinstance(found, SubCall)
    return found


@given(st.text(max_size=128), st.booleans())
def test_id_and_trace_arrive_apart(request_id: str, traced: bool) -> None:
    trace = PARENT if traced else ""
    try:
        request_id.encode()
    except UnicodeEncodeError:
        return  # no text that gRPC would have brought
    found = _arrived(_a_call(request_id=request_id, trace=trace))
    assert found.request_id == request_id.replace(MARK, " ")
    long = len(f"{request_id}{MARK}{trace}".encode()) > REQUEST_ID_BYTES_MAX
    assert found.trace == ("" if long else trace)


@pytest.mark.parametrize("request_id", [f"order{MARK}{PARENT}", f"{MARK}{PARENT}", MARK])
def test_a_caller_cannot_bring_a_trace_in_its_id(request_id: str) -> None:
    assert _arrived(_a_call(request_id=request_id)).trace == ""
    both = _arrived(_a_call(request_id=request_id, trace=PARENT))
    assert both.trace == PARENT


def test_where_both_do_not_fit_the_id_goes_alone() -> None:
    found = _arrived(_a_call(request_id="\U0001f600" * 128, trace=PARENT))
    assert (found.request_id, found.trace) == ("\U0001f600" * 128, "")


def test_a_sub_call_without_a_trace_has_the_bytes_it_always_had() -> None:
    header = bytes(encode(_a_call(request_id="order-7"))[0])
    assert header.endswith(b"order-7")
    traced = bytes(encode(_a_call(request_id="order-7", trace=PARENT))[0])
    assert traced.endswith(f"order-7{MARK}{PARENT}".encode())


def test_a_shard_of_an_earlier_release_takes_both_for_the_id(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It reads the text to its end, within the same limit."""
    frames = [bytes(frame) for frame in encode(_a_call(request_id="order-7", trace=PARENT))]
    monkeypatch.setattr(codec, "_TRACE_MARK", "no such mark")
    found = decode(frames)
    assert isinstance(found, SubCall)
    assert found.request_id == f"order-7{MARK}{PARENT}"
    assert found.trace == ""


def test_what_a_broken_router_sends_names_no_span() -> None:
    found = _arrived(_a_call(request_id="order-7", trace="00-nonsense"))
    assert parse(found.trace) == (None, 1)
