"""The node's cache of experts: bounded, least recently used out first, never a wrong byte, never
needed."""

import fcntl
import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moe_serve.shard.assembly import Shard, open_shard
from moe_serve.weights import host_cache
from moe_serve.weights.errors import UnsafePath
from moe_serve.weights.host_cache import HostCache
from moe_serve.weights.reading import READ_CHUNK_BYTES
from placement.messages.effects import (
    AbortAdd,
    CopyExpert,
    CopySource,
    ReserveSlot,
    VerifyExpert,
)
from placement.messages.events import (
    AddAborted,
    ExpertCopied,
    ExpertVerified,
    SlotReleased,
    StepFailed,
)
from placement.routing import RankAddress
from tests.checkpoint_builder import expert_name, write_checkpoint
from tests.fakes.marker_experts import (
    CHECKPOINT,
    MarkerSource,
    add,
    marker_model,
    marker_settings,
    marker_shard,
    release,
)

SIZE = 1000


def content(number: int, size: int = SIZE) -> bytes:
    return np.random.default_rng(number).bytes(size)


def name(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def put(cache: HostCache, number: int, size: int = SIZE) -> bool:
    data = content(number, size)
    return cache.add(name(data), memoryview(data))


def get(cache: HostCache, number: int, size: int = SIZE) -> bool:
    data = content(number, size)
    out = bytearray(size)
    found = cache.read_into(name(data), memoryview(out))
    assert not found or bytes(out) == data
    return found


def age(folder: Path, number: int, seconds: float) -> None:
    """Let an entry have been used so long ago."""
    path = folder / name(content(number))
    then = path.stat().st_mtime - seconds
    os.utime(path, (then, then))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(host_cache, "FREE_LEAST_BYTES", 0)
    return tmp_path / "cache"


def test_what_was_added_is_read_by_every_shard_of_the_node(folder: Path) -> None:
    first, second = HostCache(str(folder), 10 * SIZE), HostCache(str(folder), 10 * SIZE)
    assert put(first, 1)
    assert not put(second, 1), "it is there already"
    assert get(second, 1)
    assert not get(second, 2)
    assert second.counts == {"hits": 1, "misses": 1}
    assert first.num_bytes == second.num_bytes == SIZE
    assert oct(folder.stat().st_mode & 0o777) == "0o700"
    assert oct((folder / name(content(1))).stat().st_mode & 0o777) == "0o600"


def test_larger_than_a_chunk(folder: Path) -> None:
    size = 2 * READ_CHUNK_BYTES + 17
    cache = HostCache(str(folder), 4 * size)
    assert put(cache, 3, size)
    assert get(cache, 3, size)


def test_it_never_holds_more_than_its_bytes_and_the_least_recently_used_go_first(
    folder: Path,
) -> None:
    cache = HostCache(str(folder), 3 * SIZE + 500)
    for number in range(3):
        assert put(cache, number)
    for number, seconds in ((0, 300.0), (1, 200.0), (2, 100.0)):
        age(folder, number, seconds)
    assert get(cache, 0), "used now"
    assert put(cache, 3)
    assert [get(cache, number) for number in range(4)] == [True, False, True, True]
    assert cache.num_bytes == 3 * SIZE
    assert cache.counts["evicted"] == 1
    assert not put(cache, 9, 4 * SIZE), "larger than the whole"


def test_a_first_fill_does_not_push_out_what_it_has_just_brought(folder: Path) -> None:
    cache = HostCache(str(folder), 3 * SIZE)
    assert [put(cache, number) for number in range(6)] == [True] * 3 + [False] * 3
    assert cache.num_bytes == 3 * SIZE
    age(folder, 1, host_cache.KEEP_LEAST_S + 1)
    # A shard that looks at the files for the first time: times of use do not go back in life.
    assert put(HostCache(str(folder), 3 * SIZE), 7)
    assert not get(cache, 1)


@pytest.mark.parametrize("how", ["bit", "short", "long", "swapped", "link", "folder", "empty"])
def test_damaged_content_is_never_given_out(folder: Path, how: str) -> None:
    cache = HostCache(str(folder), 10 * SIZE)
    put(cache, 1)
    put(cache, 2)
    path = folder / name(content(1))
    data = bytearray(path.read_bytes())
    if how == "bit":
        data[500] ^= 1
        path.write_bytes(data)
    elif how == "short":
        path.write_bytes(data[:-1])
    elif how == "long":
        path.write_bytes(data + b"x")
    elif how == "swapped":
        path.write_bytes(content(2))
    elif how == "empty":
        path.write_bytes(b"")
    else:
        path.unlink()
        (path.symlink_to(folder / name(content(2))) if how == "link" else path.mkdir())
    assert not get(cache, 1)
    assert get(cache, 2)
    if how in ("bit", "swapped", "short", "long", "empty"):
        assert cache.counts["damaged"] == 1
        assert not path.exists(), "so that the next copy brings it anew"
        assert put(cache, 1)
        assert get(cache, 1)


def test_a_shard_that_died_while_it_wrote_leaves_nothing_that_counts(folder: Path) -> None:
    cache = HostCache(str(folder), 10 * SIZE)
    part = folder / f"{name(content(1))}.part"
    part.write_bytes(content(1)[:400])
    assert not get(cache, 1)
    assert cache.num_bytes == 0
    assert put(cache, 1)
    assert not part.exists()
    assert get(cache, 1)


def test_while_another_shard_adds_nothing_is_added_and_nobody_waits(folder: Path) -> None:
    cache = HostCache(str(folder), 10 * SIZE)
    put(cache, 1)
    with (folder / "lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert not put(cache, 2)
        assert get(cache, 1)
    assert put(cache, 2)


def test_a_full_disk_only_means_that_nothing_is_added(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = HostCache(str(folder), 10 * SIZE)
    real = os.write

    def full(descriptor: int, data: Any) -> int:
        if len(data) == SIZE:
            raise OSError(28, "No space left on device")
        return real(descriptor, data)

    monkeypatch.setattr(host_cache.os, "write", full)
    assert not put(cache, 1)
    monkeypatch.undo()
    assert list(folder.glob("*.part")) == []
    monkeypatch.setattr(host_cache, "FREE_LEAST_BYTES", 1 << 60)
    assert not put(cache, 1), "the last bytes of a disk are not for a cache"


def test_files_are_looked_at_now_and_then_and_not_at_every_addition(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither a fill nor a full cache costs a look at every file for each addition; the bound and
    the order hold all the same, for two shards in turn."""
    looks = []
    real = os.scandir

    def looking(path: str) -> Any:
        looks.append(path)
        return real(path)

    monkeypatch.setattr(host_cache.os, "scandir", looking)
    caches = [HostCache(str(folder), 50 * SIZE) for _ in range(2)]
    for number in range(50):
        assert put(caches[number % 2], number)
    assert len(looks) <= 2, "one look a shard"
    monkeypatch.setattr(host_cache, "KEEP_LEAST_S", -1.0)
    for number in range(50):
        age(folder, number, 1000.0 - number)
    for number in range(50, 150):
        assert put(caches[number % 2], number)
    assert len(looks) <= 10
    assert caches[0].num_bytes <= 50 * SIZE
    kept = {n for n in range(150) if (folder / name(content(n))).exists()}
    assert len(kept) == 50
    assert min(kept) >= 50, "the oldest went first"
    assert sum(cache.counts["evicted"] for cache in caches) == 100


def test_what_was_used_since_files_were_looked_at_stays(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = HostCache(str(folder), 4 * SIZE)
    for number in range(4):
        assert put(cache, number)
        age(folder, number, 1000.0 - number)
    assert put(cache, 4), "0 goes, and 1 would be next"
    assert get(cache, 1)
    monkeypatch.setattr(cache, "_look", None)  # it does without another look
    assert put(cache, 5)
    assert [get(cache, number) for number in range(6)] == [False, True, False, True, True, True]


@pytest.mark.parametrize("text", ["", "nonsense", "-5", "9" * 30])
def test_a_sum_that_is_none_is_counted_anew(folder: Path, text: str) -> None:
    cache = HostCache(str(folder), 3 * SIZE)
    assert [put(cache, 0), put(cache, 1)] == [True, True]
    (folder / "lock").write_text(text)
    assert put(cache, 2)
    assert not put(cache, 3), "it would be one too many"
    assert (folder / "lock").read_text() == str(3 * SIZE)


def test_a_sum_that_is_too_great_is_found_out(folder: Path) -> None:
    """Who reads a damaged file removes it without the lock."""
    cache = HostCache(str(folder), 3 * SIZE)
    for number in range(3):
        assert put(cache, number)
    for number in range(3):
        (folder / name(content(number))).unlink()
    assert [put(cache, number) for number in range(3, 7)] == [True, True, True, False]


def test_a_folder_that_others_may_write_is_refused(folder: Path) -> None:
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(UnsafePath, match="written by others"):
        HostCache(str(folder), SIZE)
    other = folder.parent / "link"
    folder.chmod(0o700)
    other.symlink_to(folder)
    with pytest.raises(UnsafePath):
        HostCache(str(other), SIZE)


def test_many_threads_add_read_and_push_out_at_once(folder: Path) -> None:
    """Every read gives the right bytes or none, and the bound holds."""
    caches = [HostCache(str(folder), 5 * SIZE) for _ in range(4)]
    host_cache_age = host_cache.KEEP_LEAST_S
    host_cache.KEEP_LEAST_S = 0.0
    faults: list[str] = []

    def work(cache: HostCache, seed: int) -> None:
        draw = np.random.default_rng(seed)
        for _ in range(150):
            number = int(draw.integers(12))
            try:
                put(cache, number)
                get(cache, number)
                if cache.num_bytes > 5 * SIZE:
                    faults.append("too many bytes")
            except Exception as error:
                faults.append(repr(error))

    threads = [threading.Thread(target=work, args=(c, i)) for i, c in enumerate(caches)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    host_cache.KEEP_LEAST_S = host_cache_age
    assert faults == []
    assert sum(cache.counts.get("damaged", 0) for cache in caches) == 0
    assert sum(cache.counts["hits"] for cache in caches) > 0


class StopsAfter:
    """A `Reading` that is aborted once so many bytes have come."""

    def __init__(self, num_bytes: int) -> None:
        self.left = num_bytes

    @contextmanager
    def blocking(self) -> Iterator[None]:
        yield

    def advance(self, num_bytes: int) -> None:
        self.left -= num_bytes
        if self.left < 0:
            raise RuntimeError("stop")


def test_a_read_stops_between_two_chunks(folder: Path) -> None:
    size = 3 * READ_CHUNK_BYTES
    cache = HostCache(str(folder), 4 * size)
    put(cache, 1, size)
    out = bytearray(size)
    with pytest.raises(RuntimeError, match="stop"):
        cache.read_into(name(content(1, size)), memoryview(out), StopsAfter(READ_CHUNK_BYTES))
    assert bytes(out[2 * READ_CHUNK_BYTES :]) == bytes(READ_CHUNK_BYTES)


class GivenUp(StopsAfter):
    """One that is given up while the file is being opened."""

    @contextmanager
    def blocking(self) -> Iterator[None]:
        yield
        raise RuntimeError("given up")


def test_a_read_that_is_given_up_while_it_opens_leaves_no_file_open(folder: Path) -> None:
    cache = HostCache(str(folder), 4 * SIZE)
    put(cache, 1)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(50):
        with pytest.raises(RuntimeError, match="given up"):
            cache.read_into(name(content(1)), memoryview(bytearray(SIZE)), GivenUp(SIZE))
    assert len(os.listdir("/proc/self/fd")) < before + 25  # what else this process does opens some


# ------------------------------------------------------------------------------ as a copy source


@pytest.fixture
def cached(folder: Path) -> Iterator[Callable[..., Shard]]:
    made: list[Shard] = []

    def make(**arguments: Any) -> Shard:
        shard = marker_shard(
            **({"host_cache_dir": str(folder), "host_cache_bytes": 100_000} | arguments)
        )
        shard.core.start()
        made.append(shard)
        return shard

    yield make
    for shard in made:
        shard.stop()


def test_a_lost_expert_comes_back_from_the_cache_and_the_checkpoint_is_not_read(
    cached: Callable[..., Shard],
) -> None:
    source = MarkerSource(marker_model())
    first = cached(source=source)
    add(first, 0, 3)
    assert source.reads == 1
    forbidden = MarkerSource(marker_model(), lambda _layer, _expert: 1 / 0)
    replacement = cached(source=forbidden, incarnation=2)
    add(replacement, 0, 3)
    counters = replacement.report(-1).counters
    assert counters["copies_from_host_cache"] == 1
    assert counters["copies_from_checkpoint"] == 0
    assert first.report(-1).counters["copies_from_checkpoint"] == 1
    assert first.report(-1).memory.host_cache_bytes == 384


def test_a_damaged_entry_costs_a_read_of_the_checkpoint_and_nothing_else(
    cached: Callable[..., Shard], folder: Path
) -> None:
    source = MarkerSource(marker_model())
    shard = cached(source=source)
    tag = add(shard, 0, 3)
    path = folder / source.canonical_sha256(0, 3)
    data = bytearray(path.read_bytes())
    data[10] ^= 4
    path.write_bytes(data)
    assert isinstance(release(shard, 0, tag, expert=3), SlotReleased)
    add(shard, 0, 3, step_id=2)
    assert source.reads == 2
    assert shard.report(-1).counters["host_cache_damaged"] == 1
    assert path.read_bytes() == source.canonical(0, 3).tobytes(), "and is right again"


def test_a_replica_on_another_node_is_passed_over_and_one_on_this_node_is_not(
    cached: Callable[..., Shard],
) -> None:
    shard = cached()
    tag = add(shard, 0, 3)
    release(shard, 0, tag, expert=3)
    for node, expected in (("node-9", ExpertCopied), ("node-0", StepFailed)):
        address = RankAddress(rank=7, node=node, address="tcp://127.0.0.1:1", incarnation=1)
        where: dict[str, Any] = {"rank": 0, "incarnation": 1, "slot": 1, "step_id": hash(node)}
        reserved = shard.execute(1, ReserveSlot(layer=0, expert=3, weights_version="v1", **where))
        where["slot_tag"] = reserved.slot_tag  # type: ignore[union-attr]
        source = CopySource(rank=7, slot=0, slot_tag=1, address=address)
        copied = shard.execute(
            1, CopyExpert(layer=0, expert=3, source=source, timeout_s=0.3, **where)
        )
        assert isinstance(copied, expected), copied
        if isinstance(copied, ExpertCopied):
            assert isinstance(shard.execute(1, VerifyExpert(**where)), ExpertVerified)
            release(shard, 1, where["slot_tag"], expert=3)


def test_while_a_read_of_this_node_hangs_ranks_are_asked_and_not_the_cache(
    cached: Callable[..., Shard],
) -> None:
    model, free, hangs = marker_model(), threading.Event(), threading.Event()

    def read(_layer: int, expert: int) -> None:
        if expert == 5:
            hangs.set()
            free.wait(20)

    shard = cached(model=model, source=MarkerSource(model, read))
    add(shard, 0, 3)
    where: dict[str, Any] = {"rank": 0, "incarnation": 1, "slot": 1, "step_id": 7}
    reserved = shard.execute(1, ReserveSlot(layer=0, expert=5, weights_version="v1", **where))
    where["slot_tag"] = reserved.slot_tag  # type: ignore[union-attr]
    hung = CopyExpert(layer=0, expert=5, source=CHECKPOINT, timeout_s=60.0, **where)
    copying = threading.Thread(target=shard.execute, args=(1, hung), daemon=True)
    copying.start()
    assert hangs.wait(5)
    assert isinstance(shard.execute(1, AbortAdd(**where)), AddAborted)
    copying.join(5)
    where |= {"step_id": 8}
    del where["slot_tag"]
    reserved = shard.execute(1, ReserveSlot(layer=0, expert=3, weights_version="v1", **where))
    where["slot_tag"] = reserved.slot_tag  # type: ignore[union-attr]
    address = RankAddress(rank=7, node="node-9", address="tcp://127.0.0.1:1", incarnation=1)
    source = CopySource(rank=7, slot=0, slot_tag=1, address=address)
    asked = CopyExpert(layer=0, expert=3, source=source, timeout_s=0.3, **where)
    assert isinstance(shard.execute(1, asked), StepFailed), "nobody listens there"
    free.set()
    until_s = time.monotonic() + 5
    while shard.report(-1).counters["hung_reads"] and time.monotonic() < until_s:
        time.sleep(0.005)
    assert isinstance(shard.execute(1, asked), ExpertCopied), "from the cache again"


def test_a_shard_serves_without_the_cache_it_was_told_of(
    cached: Callable[..., Shard], folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder.write_text("a file where the folder should be")
    shard = cached()
    add(shard, 0, 3)
    assert "without a host cache" in caplog.text
    assert shard.report(-1).memory.host_cache_bytes == 0


@pytest.mark.parametrize("damaged", ["file", "cache"])
def test_one_flipped_bit_is_found_by_name_and_the_old_replica_still_serves(
    folder: Path, tmp_path: Path, damaged: str
) -> None:
    checkpoint = write_checkpoint(tmp_path / "model")
    settings = marker_settings(
        checkpoint=str(checkpoint),
        manifest_dir=str(tmp_path / "manifest"),
        model_name="tiny",
        host_cache_dir=str(folder),
        host_cache_bytes=100_000,
    )
    shard = open_shard(settings)
    shard.core.start()
    try:
        add(shard, 0, 1)
        if damaged == "cache":
            (path,) = (p for p in folder.iterdir() if len(p.name) == 64)
        else:
            path = checkpoint / "model.safetensors"
        stamp, data = path.stat(), bytearray(path.read_bytes())
        data[-3 if damaged == "cache" else _offset(bytes(data), 1, 2)] ^= 1
        path.write_bytes(data)
        os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
        if damaged == "cache":
            add(shard, 1, 1)
            assert shard.report(-1).counters["host_cache_damaged"] == 1
        else:
            with pytest.raises(AssertionError, match=r"digest.*layers\.1\.mlp\.experts\.2\.down"):
                add(shard, 1, 2, layer=1)
            assert len(shard.core.slots.ledger.resident()) == 2, "held, not served"
            assert not shard.core.slots.ledger.resident()[1].verified
        assert shard.core.slots.ledger.resident()[0].verified
        assert shard.probe() >= 0.0
    finally:
        shard.stop()


def _offset(data: bytes, layer: int, expert: int) -> int:
    """Where a byte of an expert's down matrix is in a safetensors file."""
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    begin, _end = header[expert_name(layer, expert, "down")]["data_offsets"]
    return int(8 + length + begin + 5)
