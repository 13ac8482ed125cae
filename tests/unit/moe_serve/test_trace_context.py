"""W3C trace context: what is sound is understood, the rest is dropped and counted; none raises."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_serve.rpc import codec, dispatch_pb2
from moe_serve.rpc.trace_context import (
    STATE_CHARS_MAX,
    TRACEPARENT_CHARS,
    TraceContext,
    from_metadata,
    parse,
    to_metadata,
)

TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
GOOD = f"00-{TRACE}-{SPAN}-01"


@pytest.mark.parametrize(
    ("text", "sampled"),
    [
        (GOOD, True),
        (f"00-{TRACE}-{SPAN}-00", False),
        (f"00-{TRACE}-{SPAN}-03", True),
        (f"00-{TRACE}-{SPAN}-fe", False),
        (f" {GOOD}\t", True),
        (f"01-{TRACE}-{SPAN}-01", True),
        (f"cc-{TRACE}-{SPAN}-01-what-the-future-will-be-like", True),
    ],
)
def test_a_sound_parent_is_read(text: str, sampled: bool) -> None:
    assert parse(text) == (TraceContext(TRACE, SPAN, sampled), 0)


@pytest.mark.parametrize(
    "text",
    [
        "xyzzy",
        GOOD.upper(),
        GOOD[:-1],
        GOOD + "0",
        GOOD + "-more",
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"cc-{TRACE}-{SPAN}-01.more",
        f"0-{TRACE}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-0x",
        f"00-{TRACE}-{SPAN}-\uff111",
        GOOD.replace("-", "_"),
        f"{GOOD},{GOOD}",
        f"cc-{TRACE}-{SPAN}-01-" + "x" * 1000,
        "\n" + GOOD,
        GOOD + "\n",
    ],
)
def test_a_malformed_parent_is_dropped_and_counted(text: str) -> None:
    assert parse(text, "vendor=1") == (None, 1)


def test_nothing_given_is_nothing_malformed() -> None:
    assert parse("") == (None, 0)
    assert parse("", "a=1") == (None, 0)


@pytest.mark.parametrize(
    "state",
    [
        "congo=t61rcWkgMzE",
        "rojo=00f067aa0ba902b7,congo=t61rcWkgMzE",
        "a=1, b=2 ,\tc=3",
        "a=1,,b=2",
        "fw529a3039@dt=FfAAkwAFRJMJWQgAAAAAAAAAgPsBAAA",
        "0a/b*c-d_e=x y",
        ",".join(f"k{n}=v" for n in range(32)),
        "k=" + "v" * 256,
    ],
)
def test_a_sound_state_goes_along(state: str) -> None:
    context, dropped = parse(GOOD, state)
    assert context is not None
    assert (context.state, dropped) == (state, 0)


@pytest.mark.parametrize(
    "state",
    [
        "novalue",
        "a=",
        "=b",
        "A=1",
        "a=1;b=2=",
        "a=1,a=2",
        "a=b=c",
        "a=\x07",
        "a=é",
        "_a=1",
        "k" * 257 + "=v",
        "k=" + "v" * 257,
        ",".join(f"k{n}=v" for n in range(33)),
        "k=" + "v" * STATE_CHARS_MAX,
    ],
)
def test_a_malformed_state_is_dropped_and_the_parent_stays(state: str) -> None:
    assert parse(GOOD, state) == (TraceContext(TRACE, SPAN, sampled=True), 1)


@given(st.text(max_size=300), st.text(max_size=600))
def test_whatever_is_given_nothing_raises(parent: str, state: str) -> None:
    for given_parent in (parent, GOOD):
        context, dropped = parse(given_parent, state)
        assert 0 <= dropped <= 1
        if context is not None:
            assert parse(context.header(), context.state) == (context, 0)


hexes = st.integers(1, 2**64 - 1)


@given(hexes, hexes, st.booleans())
def test_a_header_is_read_as_it_was_meant(trace: int, span: int, sampled: bool) -> None:
    context = TraceContext(f"{trace:032x}", f"{span:016x}", sampled)
    assert len(context.header()) == TRACEPARENT_CHARS
    assert parse(context.header()) == (context, 0)


def test_headers_of_a_call() -> None:
    metadata = (
        ("authorization", "Bearer x"),
        ("traceparent", GOOD),
        ("tracestate", "a=1"),
        ("tracestate", "b=2"),
        ("traceparent-bin", b"\x00"),
    )
    assert from_metadata(metadata) == (GOOD, "a=1,b=2")
    assert from_metadata(None) == ("", "")
    twice = from_metadata((("traceparent", GOOD), ("traceparent", GOOD)))
    assert parse(*twice) == (None, 1), "one of the two would be a guess"
    assert from_metadata(to_metadata(GOOD, "a=1")) == (GOOD, "a=1")
    assert to_metadata("", "a=1") == ()


def test_names_and_trace_of_the_longest_fit_the_room_that_messages_keep_for_them() -> None:
    request = dispatch_pb2.ForwardRequest(
        model="m" * 63,
        layer=2**31 - 1,
        phase=dispatch_pb2.FORWARD_PHASE_DECODE,
        request_id="é" * 128,
        attempt=2**31 - 1,
        traceparent=GOOD,
        tracestate="k=" + "v" * (STATE_CHARS_MAX - 2),
    )
    assert request.ByteSize() <= codec.REQUEST_NAMES_BYTES - 256
