"""S13: what a message declares is compared with the bytes that came, before memory is taken."""

import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from moe_serve.errors import InvalidArgument, MoeServeError
from moe_serve.router.checks import check_forward
from moe_serve.rpc import codec, dispatch_pb2
from moe_serve.rpc.options import MAX_MESSAGE_BYTES
from moe_serve.wire import codec as wire_codec
from moe_serve.wire import frame
from placement.routing import RoutingTable
from tests.fake_shards import HIDDEN, marker_spec
from tests.fakes.sub_calls import sub_call, sub_reply

ALLOCATED_MAX = 1 << 20
HUGE = [
    [2**31, 2**31],
    [2**32, 2**32],
    [2**63 - 1, 2**63 - 1],
    [2**62, HIDDEN],
    [2**60, HIDDEN],
    [2**61 + 4, HIDDEN],  # its bytes are those received, modulo 2^64
    [0, 2**62],
    [2**62, 0],
    [-1, HIDDEN],
    [-4, -HIDDEN],
    [-(2**63), 2],
    [1] * 100_000,
    [],
]


@contextmanager
def hardly_allocates() -> Iterator[None]:
    tracemalloc.start()
    try:
        yield
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < ALLOCATED_MAX, f"{peak} bytes"


def a_request() -> dispatch_pb2.ForwardRequest:
    return codec.forward_request(
        codec.ForwardArrays(
            model="marker",
            layer=0,
            phase=1,
            data_type=codec.FP32,
            hidden=np.ones((4, HIDDEN), np.float32),
            topk_ids=np.tile(np.arange(2, dtype=np.int32), (4, 1)),
            topk_weights=np.ones((4, 2), np.float32),
        )
    )


def test_the_watch_on_memory_sees_an_allocation() -> None:
    with pytest.raises(AssertionError, match="bytes"), hardly_allocates():
        assert np.ones(ALLOCATED_MAX, np.uint8).any()


@pytest.mark.parametrize("shape", HUGE, ids=lambda s: f"{len(s)} axes {s[:2]}")
@pytest.mark.parametrize("field", ["hidden_states", "topk_ids", "topk_weights"])
def test_a_declared_shape_is_refused_by_field(field: str, shape: list[int]) -> None:
    request = a_request()
    check_forward(request, marker_spec(), MAX_MESSAGE_BYTES)  # compiles the kernels
    getattr(request, field).shape[:] = shape
    with hardly_allocates(), pytest.raises(InvalidArgument) as caught:
        check_forward(request, marker_spec(), MAX_MESSAGE_BYTES)
    assert any(v.field.startswith(field) for v in caught.value.violations)


def test_all_three_shapes_at_once_and_no_bytes() -> None:
    for shape in HUGE:
        request = a_request()
        for name in ("hidden_states", "topk_ids", "topk_weights"):
            getattr(request, name).shape[:] = shape
            getattr(request, name).raw = b""
        with hardly_allocates(), pytest.raises(InvalidArgument):
            check_forward(request, marker_spec(), MAX_MESSAGE_BYTES)


@pytest.mark.parametrize("field", ["row_valid", "pair_valid"])
def test_a_bitmap_has_the_bytes_of_its_rows(field: str) -> None:
    for size in (2, 100, 10_000):
        request = a_request()
        setattr(request, field, b"\xff" * size)
        with hardly_allocates(), pytest.raises(InvalidArgument, match=field):
            check_forward(request, marker_spec(), MAX_MESSAGE_BYTES)


def test_a_shape_of_no_elements_allocates_no_rows() -> None:
    """[2^62, 0] has the bytes it declares, which are none: rows and bitmaps must not follow it."""
    request = a_request()
    for name in ("topk_ids", "topk_weights"):
        getattr(request, name).shape[:] = [2**62, 0]
        getattr(request, name).raw = b""
    with hardly_allocates(), pytest.raises(InvalidArgument):
        check_forward(request, marker_spec(), MAX_MESSAGE_BYTES)


def a_table() -> RoutingTable:
    return RoutingTable(
        term=1,
        epoch=1,
        model="marker",
        weights_version="v1",
        num_layers=1,
        num_experts=1,
        replica_ptr=np.array([0, 1], np.int32),
        replica_rank=np.zeros(1, np.int32),
        replica_slot=np.zeros(1, np.int32),
        replica_tag=np.ones(1, np.int64),
        ranks=(),
    )


ROWS = np.ones((2, HIDDEN), np.float32)
MESSAGES = {
    "forward": sub_call(ROWS, [(0, 0, 1, 1.0, 0)]),
    "reply": sub_reply(ROWS, [0, 0]),  # type: ignore[list-item]
    "table": wire_codec.control_codec.Table(1, a_table()),
    "chunk": wire_codec.control_codec.CopyChunk(1, 1, 0, memoryview(b"x" * 100)),
}


@pytest.mark.parametrize("name", MESSAGES)
def test_no_number_of_a_wire_header_allocates(name: str) -> None:
    """Every four bytes of the header in turn declare something huge: read or refused, and never
    allocated."""
    frames = [bytes(one) for one in wire_codec.encode(MESSAGES[name])]
    read: Callable[[list[bytes]], Any] = wire_codec.decode
    read(frames)
    refused = 0
    for at in range(frame.PREFIX.size, len(frames[0]) - 3):
        for value in (b"\xff\xff\xff\x7f", b"\xff\xff\xff\xff", b"\0\0\0\x40"):
            head = frames[0][:at] + value + frames[0][at + 4 :]
            with hardly_allocates():
                try:
                    read([head, *frames[1:]])
                except MoeServeError:
                    refused += 1
    assert refused > 3


def test_a_message_has_three_frames_and_a_limit() -> None:
    """The bound on frames and the bound on bytes hold whatever the frames say."""
    frames = [bytes(one) for one in wire_codec.encode(MESSAGES["forward"])]
    for extra in (1, 10, 10_000):
        with hardly_allocates(), pytest.raises(InvalidArgument, match="1 to 3 frames"):
            wire_codec.decode([*frames, *[b""] * extra])
    assert frame.FRAMES_MAX == 3
    with pytest.raises(InvalidArgument, match="1 to 3 frames"):
        wire_codec.decode([])
    at_limit = sum(map(len, frames))
    wire_codec.decode(frames, at_limit)
    with pytest.raises(InvalidArgument, match="limit"):
        wire_codec.decode(frames, at_limit - 1)
    with hardly_allocates(), pytest.raises(InvalidArgument, match="header"):
        wire_codec.decode([b"\0" * (frame.HEADER_BYTES_MAX + 1), *frames[1:]])
