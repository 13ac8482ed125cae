"""Copies between two shards over loopback: right bytes, pinned sources, throttle, abort, loss."""

import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from moe_serve.errors import NotFound
from moe_serve.shard.assembly import Shard
from moe_serve.shard.compute.base import ExpertSpec
from moe_serve.shard.faults import FaultPoints
from moe_serve.shard.served_model import ServedModel
from moe_serve.wire.security import CurveKeys
from moe_serve.wire.wire_messages import CopyChunk, CopyOpen, CopyOpened, CopyRead
from placement.messages.effects import AbortAdd, CopyExpert, CopySource, ReserveSlot
from placement.messages.events import AddAborted, ExpertCopied, SlotReleased, StepFailed
from tests.fakes.marker_experts import (
    MarkerBackend,
    MarkerSource,
    add,
    marker_model,
    marker_shard,
    release,
)

CHUNK = 256 * 1024


def large_model() -> ServedModel:
    """Experts of 1.5 MiB: six chunks."""
    return ServedModel(1, 8, 4, "v1", ExpertSpec(256, 512, "float32"))


class Pair:
    """A source shard (rank 0) and a target shard (rank 1) whose checkpoint must not be read."""

    def __init__(
        self, model: ServedModel, source_bytes_per_s: float | None = None, **settings: Any
    ) -> None:
        budget = 32 << 20

        def forbidden(_layer: int, _expert: int) -> None:
            raise OSError(13, "the checkpoint of the target is not to be read")

        self.model = model
        self.source = marker_shard(
            model=model,
            source=MarkerSource(model),
            backend=MarkerBackend(model.expert),
            budget_bytes=budget,
            **(
                settings
                if source_bytes_per_s is None
                else settings | {"copy_bytes_per_s": source_bytes_per_s}
            ),
        )
        self.target = marker_shard(
            model=model,
            source=MarkerSource(model, forbidden),
            backend=MarkerBackend(model.expert),
            rank=1,
            budget_bytes=budget,
            **settings,
        )
        self.address = self.source.start()
        self.target.start()

    def from_source(self, slot: int, tag: int) -> CopySource:
        return CopySource(rank=0, slot=slot, slot_tag=tag, address=self.address)

    def begin(self, expert: int, source: CopySource, timeout_s: float = 10.0) -> tuple[int, Any]:
        """Reserve slot 0 of the target and start the copy; (tag, function that gives the
        answer)."""
        where = {"rank": 1, "incarnation": 1, "slot": 0}
        reserved = self.target.execute(
            1, ReserveSlot(step_id=50, layer=0, expert=expert, weights_version="v1", **where)
        )
        tag: int = reserved.slot_tag  # type: ignore[union-attr]
        command = CopyExpert(
            step_id=50,
            slot_tag=tag,
            layer=0,
            expert=expert,
            source=source,
            timeout_s=timeout_s,
            **where,
        )
        answers: list[Any] = []
        thread = threading.Thread(
            target=lambda: answers.append(self.target.execute(1, command)), daemon=True
        )
        thread.start()

        def get() -> Any:
            thread.join(20)
            return answers[0]

        return tag, get

    def stop(self) -> None:
        self.source.stop()
        self.target.stop()


@pytest.fixture(params=["plain", "curve"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    keys = CurveKeys.generate() if request.param == "curve" else None
    made = Pair(large_model(), client_keys=keys)
    yield made
    made.stop()


def slowed(bytes_per_s: float) -> Pair:
    return Pair(large_model(), copy_bytes_per_s=bytes_per_s)


def until(condition: Any) -> None:
    end_s = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < end_s, "condition never held"
        time.sleep(0.002)


def test_an_expert_is_pulled_verified_and_the_source_unpinned(pair: Pair) -> None:
    tag = add(pair.source, 2, 5)
    add(pair.target, 1, 5, source=pair.from_source(2, tag))
    assert np.array_equal(pair.source.pool.buffer(2), pair.target.pool.buffer(1))
    until(lambda: pair.source.copies.num_open == 0)
    assert pair.source.copies.sent_bytes == pair.model.expert.canonical_bytes
    assert isinstance(release(pair.source, 2, tag, expert=5), SlotReleased)


@pytest.mark.parametrize("wrong", ["tag", "slot", "expert", "incarnation", "unverified"])
def test_a_source_that_does_not_hold_it_is_source_lost(wrong: str) -> None:
    pair = Pair(large_model())
    tag = add(pair.source, 2, 5)
    slot, expert, address = 2, 5, pair.address
    if wrong == "tag":
        tag += 1
    elif wrong == "slot":
        slot = 3
    elif wrong == "expert":
        expert = 6
    elif wrong == "incarnation":
        values = {name: getattr(address, name) for name in address.__struct_fields__}
        address = type(address)(**{**values, "incarnation": 9})
    else:
        where = {"rank": 0, "incarnation": 1, "slot": 4}
        reserved = pair.source.execute(
            1, ReserveSlot(step_id=9, layer=0, expert=5, weights_version="v1", **where)
        )
        slot, tag = 4, reserved.slot_tag  # type: ignore[union-attr]
    source = CopySource(rank=0, slot=slot, slot_tag=tag, address=address)
    _tag, get = pair.begin(expert, source)
    answer = get()
    assert isinstance(answer, StepFailed)
    assert answer.code == "source_lost"
    assert pair.source.copies.num_open == 0
    pair.stop()


def test_the_throttle_holds_the_rate_and_a_source_in_use_is_not_freed() -> None:
    pair = slowed(4 * CHUNK)  # six chunks, two of them saved up: a second
    tag = add(pair.source, 0, 5)
    began_s = time.monotonic()
    _tag, get = pair.begin(5, pair.from_source(0, tag))
    until(lambda: pair.source.copies.num_open == 1)
    pair.source._commands._pin_wait_s = 0.05
    answer = release(pair.source, 0, tag, expert=5)
    assert isinstance(answer, StepFailed), "pinned by the copy"
    assert answer.code == "timeout"
    copied = get()
    took_s = time.monotonic() - began_s
    assert isinstance(copied, ExpertCopied)
    assert copied.copy_bytes == pair.model.expert.canonical_bytes
    assert took_s > 0.85
    until(lambda: not pair.source.pool.holds(0))
    assert isinstance(release(pair.source, 0, tag, expert=5), SlotReleased)
    pair.stop()


@pytest.mark.parametrize("throttled", ["source", "target"])
def test_an_abort_stops_a_copy_between_two_chunks_and_frees_both_ends(throttled: str) -> None:
    limits = (0.0, CHUNK // 2) if throttled == "target" else (CHUNK // 2, 0.0)
    pair = Pair(large_model(), source_bytes_per_s=limits[0], copy_bytes_per_s=limits[1])
    tag = add(pair.source, 0, 5)
    own, get = pair.begin(5, pair.from_source(0, tag), timeout_s=60.0)
    until(lambda: pair.source.copies.num_open == 1)
    time.sleep(0.05)
    at_s = time.monotonic()
    aborted = pair.target.execute(
        1, AbortAdd(step_id=50, rank=1, incarnation=1, slot=0, slot_tag=own)
    )
    assert isinstance(aborted, AddAborted)
    assert time.monotonic() - at_s < 5.0, "the whole copy takes ten"
    assert isinstance(get(), StepFailed)
    assert pair.target.pool.resident_bytes == 0
    assert pair.source.copies.sent_bytes < pair.model.expert.canonical_bytes
    until(lambda: pair.source.copies.num_open == 0)
    pair.stop()


def test_a_copy_that_cannot_end_in_time_fails_and_leaves_the_bytes_to_the_abort() -> None:
    pair = slowed(CHUNK)
    tag = add(pair.source, 0, 5)
    _tag, get = pair.begin(5, pair.from_source(0, tag), timeout_s=0.4)
    answer = get()
    assert isinstance(answer, StepFailed)
    assert answer.code == "timeout"
    assert pair.target.report(-1).reserved_bytes == pair.target.pool.slot_bytes
    pair.stop()


def test_a_source_that_dies_in_the_middle_is_source_lost_at_once() -> None:
    pair = slowed(2 * CHUNK)
    tag = add(pair.source, 0, 5)
    _tag, get = pair.begin(5, pair.from_source(0, tag))
    until(lambda: pair.source.copies.sent_bytes > 0)
    pair.source.wire.stop()
    answer = get()
    assert isinstance(answer, StepFailed)
    assert answer.code == "source_lost"
    pair.stop()


def test_a_pin_ends_with_its_deadline_where_no_close_comes() -> None:
    shard: Shard = marker_shard()
    shard.start()
    tag = add(shard, 0, 5)
    answers: list[Any] = []
    message = CopyOpen(call_id=1, incarnation=1, slot=0, tag=tag, layer=0, expert=5, timeout_s=0.2)
    shard.copies.open(message, answers.append)
    assert isinstance(answers[0], CopyOpened)
    assert shard.copies.num_open == 1
    until(lambda: shard.copies.num_open == 0)
    shard.copies.read(CopyRead(2, answers[0].copy_id, 0, 16), answers.append)
    until(lambda: len(answers) == 2)
    assert isinstance(answers[1], NotFound)
    assert isinstance(release(shard, 0, tag, expert=5), SlotReleased)
    shard.stop()


def test_bytes_damaged_on_the_way_are_found_by_the_digest() -> None:
    pair = Pair(marker_model())
    tag = add(pair.source, 0, 5)
    pair.source.pool.buffer(0)[3] ^= 8
    with pytest.raises(AssertionError, match="digest"):
        add(pair.target, 0, 5, source=pair.from_source(0, tag))
    pair.stop()


def test_a_target_with_other_keys_is_not_let_in() -> None:
    source: Shard = marker_shard(client_keys=CurveKeys.generate())
    target: Shard = marker_shard(rank=1, client_keys=CurveKeys.generate())
    address = source.start()
    target.start()
    tag = add(source, 0, 5)
    with pytest.raises(AssertionError, match="source_lost"):
        add(target, 0, 5, source=CopySource(rank=0, slot=0, slot_tag=tag, address=address))
    source.stop()
    target.stop()


def abort(pair: Pair, tag: int) -> Any:
    command = AbortAdd(step_id=50, rank=1, incarnation=1, slot=0, slot_tag=tag)
    return pair.target.execute(1, command)


@pytest.mark.parametrize("how", ["throttled to 1%", "stopped at 50%"])
def test_a_copy_that_is_stuck_ends_at_its_deadline_and_is_tried_again_elsewhere(how: str) -> None:
    throttled = how == "throttled to 1%"
    # Unthrottled it takes some milliseconds; its deadline here allows a second.
    rate = 0.01 * large_model().expert.canonical_bytes if throttled else 0.0
    pair = Pair(large_model(), source_bytes_per_s=rate)
    other = marker_shard(
        model=pair.model, source=MarkerSource(pair.model), rank=2, budget_bytes=32 << 20
    )
    other_address = other.start()
    tag, other_tag = add(pair.source, 0, 5), add(other, 0, 5)
    before = pair.target.pool.figures()
    if not throttled:
        pair.target.order_faults(FaultPoints(stop_copy_at=0.5))
    began_s = time.monotonic()
    own, get = pair.begin(5, pair.from_source(0, tag), timeout_s=1.0)
    until(lambda: bool(pair.target.report(-1).copies))
    if not throttled:
        until(lambda: pair.target.report(-1).copies[0].done_bytes == 3 * CHUNK)
    time.sleep(0.3)
    (copy,) = pair.target.report(-1).copies
    assert copy.source == "rank 0"
    assert copy.done_bytes <= 0.5 * copy.total_bytes
    answer = get()
    took_s = time.monotonic() - began_s
    assert isinstance(answer, StepFailed)
    assert answer.code == "timeout"
    assert took_s > 0.9
    assert isinstance(abort(pair, own), AddAborted)
    assert pair.target.pool.figures() == before, "its bytes are freed"
    assert pair.target.report(-1).copies == ()
    until(lambda: pair.source.copies.num_open == 0)
    pair.target.order_faults(FaultPoints())
    again = CopySource(rank=2, slot=0, slot_tag=other_tag, address=other_address)
    add(pair.target, 0, 5, source=again, step_id=51)
    assert np.array_equal(other.pool.buffer(0), pair.target.pool.buffer(0))
    pair.stop()
    other.stop()


def test_the_cap_on_copies_is_kept_within_a_tenth(capsys: pytest.CaptureFixture[str]) -> None:
    rate = 8.0 * CHUNK
    model = ServedModel(1, 8, 4, "v1", ExpertSpec(512, 1024, "float32"))  # 6 MiB, 24 chunks
    pair = Pair(model, source_bytes_per_s=0.0, copy_bytes_per_s=rate)
    tag = add(pair.source, 0, 5)
    began_s = time.monotonic()
    _tag, get = pair.begin(5, pair.from_source(0, tag), timeout_s=30.0)
    copied = get()
    took_s = time.monotonic() - began_s
    assert isinstance(copied, ExpertCopied)
    measured = model.expert.canonical_bytes / took_s
    with capsys.disabled():
        print(f"\ncopy cap {rate / 1e6:.2f} MB/s, measured {measured / 1e6:.2f} MB/s")
    assert 0.9 * rate < measured < 1.1 * rate
    pair.stop()


@pytest.mark.parametrize("where", ["on the wire", "in staging", "in the source's slot"])
def test_one_bit_flipped_anywhere_is_found_and_the_old_replica_still_serves(where: str) -> None:
    pair = Pair(large_model())
    tag = add(pair.source, 0, 5)
    if where == "on the wire":
        chunk_of = pair.source.copies._chunk

        def flipped(message: CopyRead) -> Any:
            chunk = chunk_of(message)
            if isinstance(chunk, CopyChunk) and chunk.offset == 2 * CHUNK:
                data = bytearray(chunk.data)
                data[1000] ^= 16
                return CopyChunk(chunk.call_id, chunk.copy_id, chunk.offset, bytes(data))
            return chunk

        pair.source.copies._chunk = flipped  # type: ignore[method-assign]
    elif where == "in staging":
        pair.target.order_faults(FaultPoints(fail=frozenset({"corrupt"})))
    else:
        pair.source.pool.buffer(0)[12345] ^= 1
    with pytest.raises(AssertionError, match=r"digest.*layer 0 expert 5: resident bytes"):
        add(pair.target, 0, 5, source=pair.from_source(0, tag))
    assert not pair.target.core.slots.ledger.resident()[0].verified
    assert pair.source.core.slots.ledger.resident()[0].verified, "nothing happened to it"
    assert pair.source.core.pin_copy(0, tag, 0, 5), "it still serves"
    pair.source.core.unpin_copy(0)
    pair.stop()
