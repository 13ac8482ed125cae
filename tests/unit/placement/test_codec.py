"""Bytes of messages: they come back equal, the same value gives the same bytes, nothing else is
taken."""

import msgspec
import numpy as np
import pytest

from placement.layout import ExpertLayout
from placement.messages import events as ev
from placement.messages.codec import (
    decode_as,
    decode_command,
    decode_effects,
    decode_event,
    encode,
)
from placement.messages.effects import (
    ComputeTarget,
    CopyExpert,
    CopySource,
    Effects,
    PublishTable,
    WakeAt,
)
from placement.policy.base import PolicyInput
from tests.builders import (
    make_address,
    make_demand,
    make_layout,
    make_request,
    make_spec,
    make_table,
    make_topology,
    make_window,
)

SPEC = make_spec()
LAYOUT = make_layout([[0, 1, -1], [2, 3, -1]])
REQUEST = make_request(SPEC, make_topology([3, 3]), LAYOUT)
WINDOW = make_window(SPEC, make_demand(SPEC, {2: 70.0}))


@pytest.mark.parametrize(
    "event",
    [
        ev.TimerFired(at_s=1.5),
        ev.WindowClosed(at_s=2.0, window=WINDOW),
        ev.RankJoined(
            at_s=0.0,
            rank=1,
            node="n",
            failure_domain="d",
            profile="p",
            num_slots=3,
            address=make_address(1),
            resident=(ev.ResidentSlot(slot=0, tag=4, layer=0, expert=2, verified=True),),
        ),
    ],
    ids=lambda event: type(event).__name__,
)
def test_events_come_back_equal(event):
    data = encode(event)
    back = decode_event(data)
    assert type(back) is type(event)
    assert encode(back) == data


def test_commands_and_effects_come_back_with_their_arrays():
    compute = ComputeTarget(
        request_id=1,
        layout_revision=2,
        cause="auto",
        policy="static",
        input=REQUEST,
        deadline_s=3.0,
    )
    back = decode_command(encode(compute))
    assert isinstance(back, ComputeTarget)
    assert back.input.layout.same_as(LAYOUT)
    assert np.array_equal(back.input.scenarios, REQUEST.scenarios)
    assert not back.input.scenarios.flags.writeable
    copy = CopyExpert(
        step_id=1,
        rank=0,
        incarnation=1,
        slot=2,
        slot_tag=3,
        layer=0,
        expert=1,
        source=CopySource(rank=1, slot=0, slot_tag=9, address=make_address(1)),
        timeout_s=1.0,
    )
    effects = Effects(
        transitions=(),
        commands=(copy, PublishTable(table=make_table(LAYOUT)), WakeAt(at_s=9.0)),
        records=(),
    )
    assert encode(decode_effects(encode(effects))) == encode(effects)
    assert decode_command(encode(copy)).source == copy.source


def test_numbers_of_numpy_are_written_as_plain_ones():
    values = [np.int64(3), np.float64(0.5), np.float32(0.25)]
    assert encode(values) == encode([3, 0.5, 0.25])
    assert encode(np.arange(6)[::2]) == encode(np.array([0, 2, 4]))


def test_what_has_no_form_is_refused():
    with pytest.raises(NotImplementedError, match="cannot encode complex"):
        encode(1j)
    with pytest.raises(NotImplementedError, match=r"cannot decode .*complex"):
        decode_as(encode("x"), complex)


@pytest.mark.parametrize("dtype", ["|O", "<c16", None])
def test_arrays_of_other_types_are_refused(dtype):
    data = encode({**msgspec.to_builtins(msgspec.msgpack.decode(encode(np.zeros(2)))), "d": dtype})
    with pytest.raises(msgspec.ValidationError, match="array dtype"):
        decode_as(data, np.ndarray)


def test_a_layout_out_of_its_bounds_does_not_come_back():
    tree = msgspec.msgpack.decode(encode(LAYOUT))
    with pytest.raises(msgspec.ValidationError, match="slots must lie"):
        decode_as(encode({**tree, "num_experts": 2}), ExpertLayout)
    assert decode_as(encode(REQUEST), PolicyInput).layout.same_as(LAYOUT)


def test_bytes_of_something_else_are_no_event():
    with pytest.raises(msgspec.ValidationError):
        decode_event(encode(WakeAt(at_s=1.0)))
