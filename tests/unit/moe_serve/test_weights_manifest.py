"""The manifest describes every byte of every expert, is computed once and compared on reading."""

from __future__ import annotations

import hashlib
import os
import threading
import time
from pathlib import Path

import msgspec
import numpy as np
import pytest

from moe_serve.weights import Checkpoint, canonical_digest, load_or_build
from moe_serve.weights.build import build_manifest
from moe_serve.weights.dtypes import SERVING_DTYPES, ServingDtype
from moe_serve.weights.errors import (
    DigestMismatch,
    MissingFile,
    NonFiniteTensor,
    ShapeMismatch,
    UnknownExpert,
    UnsupportedCheckpoint,
)
from moe_serve.weights.manifest import MANIFEST_FORMAT, Manifest, check_canonical_digest
from moe_serve.weights.manifest_cache import cache_path
from tests.checkpoint_builder import expert_name, tensors, write_checkpoint

FILE = "model.safetensors"


class Ticks:
    """A progress callback that remembers."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, int]] = []

    def __call__(self, done: int, total: int) -> None:
        self.seen.append((done, total))


def made_manifest(folder: Path, dtype: ServingDtype = "float32", threads: int = 1) -> Manifest:
    return build_manifest(Checkpoint.open(folder), dtype, num_threads=threads)


def flip(folder: Path, tensor: str) -> None:
    """Flip the lowest bit of a tensor's first byte; size and modification time stay."""
    path = folder / FILE
    before = path.stat()
    start = next(
        found.offset_bytes
        for expert in (0, 1, 2)
        for found in Checkpoint.open(folder).expert_tensors(1, expert)
        if found.name == tensor
    )
    with path.open("r+b") as file:
        file.seek(start)
        byte = file.read(1)[0]
        file.seek(start)
        file.write(bytes([byte ^ 1]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("dtype", SERVING_DTYPES)
def test_every_tensor_and_expert_is_described(tmp_path: Path, dtype: ServingDtype) -> None:
    made = tensors()
    folder = write_checkpoint(tmp_path / "m", made=made)
    checkpoint = Checkpoint.open(folder)
    manifest = build_manifest(checkpoint, dtype)
    assert (manifest.num_layers, manifest.num_experts, len(manifest.experts)) == (2, 3, 6)
    assert (manifest.format, manifest.serving_dtype) == (MANIFEST_FORMAT, dtype)
    assert manifest.expert_bytes == checkpoint.spec.expert_bytes(dtype)
    assert [file.name for file in manifest.files] == ["config.json", FILE]
    for layer in range(2):
        for expert in range(3):
            entry = manifest.expert(layer, expert)
            assert (entry.layer, entry.expert) == (layer, expert)
            content = checkpoint.read_expert(layer, expert, dtype)
            assert entry.canonical_sha256 == canonical_digest(content)
            for which in ("gate", "up", "down"):
                tensor = getattr(entry, which)
                array = made[tensor.name]
                assert tensor.name == expert_name(layer, expert, which)
                assert (tensor.dtype, tensor.shape) == ("F32", array.shape)
                assert tensor.num_bytes == array.nbytes
                assert tensor.sha256 == hashlib.sha256(array.tobytes()).hexdigest()


def test_progress_counts_experts_up_to_all_of_them(tmp_path: Path) -> None:
    ticks = Ticks()
    build_manifest(Checkpoint.open(write_checkpoint(tmp_path / "m")), "float32", ticks)
    assert ticks.seen == [(done, 6) for done in range(1, 7)]


def test_threads_do_not_change_the_manifest(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m")
    assert made_manifest(folder, threads=4) == made_manifest(folder)


def test_the_first_faulty_tensor_stops_the_work(tmp_path: Path) -> None:
    made = tensors()
    name = expert_name(0, 1, "down")
    made[name][0, 0] = np.nan
    folder = write_checkpoint(tmp_path / "m", made=made)
    for threads in (1, 4):
        with pytest.raises(NonFiniteTensor, match=name):
            made_manifest(folder, threads=threads)


def test_a_caller_may_break_off(tmp_path: Path) -> None:
    def stop(done: int, total: int) -> None:
        raise KeyboardInterrupt

    before = threading.active_count()
    with pytest.raises(KeyboardInterrupt):
        build_manifest(Checkpoint.open(write_checkpoint(tmp_path / "m")), "float32", stop)
    assert threading.active_count() <= before


def test_the_weights_digest_depends_on_weights_and_dtype_only(tmp_path: Path) -> None:
    one = made_manifest(write_checkpoint(tmp_path / "one"))
    two = made_manifest(write_checkpoint(tmp_path / "two"))
    other = made_manifest(write_checkpoint(tmp_path / "other", made=tensors(seed=2)))
    half = made_manifest(write_checkpoint(tmp_path / "half"), "float16")
    assert one.weights_digest() == two.weights_digest()
    assert len({one.weights_digest(), other.weights_digest(), half.weights_digest()}) == 3


def test_swapped_experts_change_the_weights_digest(tmp_path: Path) -> None:
    made = tensors()
    first, second = expert_name(0, 0, "up"), expert_name(0, 1, "up")
    swapped = {**made, first: made[second], second: made[first]}
    one = made_manifest(write_checkpoint(tmp_path / "one", made=made))
    two = made_manifest(write_checkpoint(tmp_path / "two", made=swapped))
    assert one.weights_digest() != two.weights_digest()


@pytest.mark.parametrize("projection", ["gate", "up", "down"])
def test_one_flipped_bit_in_the_file_is_refused_with_its_tensor(
    tmp_path: Path, projection: str
) -> None:
    folder = write_checkpoint(tmp_path / "m")
    manifest = made_manifest(folder)
    flip(folder, expert_name(1, 2, projection))
    checkpoint = Checkpoint.open(folder)
    with pytest.raises(DigestMismatch, match=f"'{expert_name(1, 2, projection)}' in {FILE}"):
        checkpoint.read_expert(1, 2, "float32", manifest)
    assert checkpoint.read_expert(1, 1, "float32", manifest).size == 288


def test_two_swapped_experts_in_the_file_are_refused(tmp_path: Path) -> None:
    made = tensors()
    manifest = made_manifest(write_checkpoint(tmp_path / "m", made=made))
    first, second = expert_name(0, 0, "up"), expert_name(0, 1, "up")
    made[first], made[second] = made[second], made[first]
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path / "m", made=made))
    with pytest.raises(DigestMismatch, match=first):
        checkpoint.read_expert(0, 0, "float32", manifest)


def test_copied_bytes_are_compared_with_the_manifest(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m")
    manifest = made_manifest(folder)
    content = Checkpoint.open(folder).read_expert(1, 2, "float32")
    check_canonical_digest(manifest, 1, 2, canonical_digest(content))
    with pytest.raises(DigestMismatch, match="expert 1 of MoE layer 1"):
        check_canonical_digest(manifest, 1, 1, canonical_digest(content))
    content[7] ^= 1
    with pytest.raises(DigestMismatch, match="expert 2 of MoE layer 1"):
        check_canonical_digest(manifest, 1, 2, canonical_digest(content))


def test_canonical_bytes_are_compared_on_reading_too(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m")
    manifest = made_manifest(folder)
    wrong = msgspec.structs.replace(manifest.experts[0], canonical_sha256="0" * 64)
    other = msgspec.structs.replace(manifest, experts=(wrong, *manifest.experts[1:]))
    with pytest.raises(DigestMismatch, match="expert 0 of MoE layer 0"):
        Checkpoint.open(folder).read_expert(0, 0, "float32", other)


def test_a_manifest_for_another_dtype_is_refused(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m")
    with pytest.raises(ShapeMismatch, match=r"serving dtype float16, .* in float32"):
        Checkpoint.open(folder).read_expert(0, 0, "float32", made_manifest(folder, "float16"))


def test_an_expert_out_of_range_has_no_entry(tmp_path: Path) -> None:
    with pytest.raises(UnknownExpert, match="expert 3 of MoE layer 0"):
        made_manifest(write_checkpoint(tmp_path / "m")).expert(0, 3)


def cached(folder: Path, cache: Path, dtype: ServingDtype = "float32") -> tuple[Manifest, bool]:
    """The manifest, and whether it had to be computed."""
    ticks = Ticks()
    manifest = load_or_build(Checkpoint.open(folder), dtype, cache, ticks)
    return manifest, bool(ticks.seen)


def test_it_is_computed_once_for_each_dtype(tmp_path: Path) -> None:
    folder, cache = write_checkpoint(tmp_path / "m"), tmp_path / "deep" / "cache"
    first, computed = cached(folder, cache)
    assert computed
    assert cached(folder, cache) == (first, False)
    other, computed = cached(folder, cache, "bfloat16")
    assert computed
    assert other != first
    assert cached(folder, cache) == (first, False)
    assert len(list(cache.iterdir())) == 2


def test_two_checkpoints_do_not_share_an_entry(tmp_path: Path) -> None:
    for name in ("one", "two"):
        assert cached(write_checkpoint(tmp_path / name), tmp_path / "cache")[1]


@pytest.mark.parametrize("file", [FILE, "config.json"])
@pytest.mark.parametrize("what", ["mtime", "size"])
def test_a_changed_file_makes_it_stale(tmp_path: Path, file: str, what: str) -> None:
    folder, cache = write_checkpoint(tmp_path / "m"), tmp_path / "cache"
    cached(folder, cache)
    path = folder / file
    before = path.stat()
    if what == "mtime":
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns + 1))
    else:
        content = path.read_bytes()
        if file == FILE:  # a header may be padded with spaces
            size = int.from_bytes(content[:8], "little")
            content = (size + 8).to_bytes(8, "little") + content[8 : 8 + size] + b" " * 8
            content += path.read_bytes()[8 + size :]
        else:
            content += b" "
        path.write_bytes(content)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert cached(folder, cache)[1]
    assert not cached(folder, cache)[1]


@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "garbage", "folder of another"])
def test_a_damaged_cache_is_computed_again(tmp_path: Path, damage: str) -> None:
    folder, cache = write_checkpoint(tmp_path / "m"), tmp_path / "cache"
    manifest, _ = cached(folder, cache)
    path = cache_path(Checkpoint.open(folder), "float32", cache)
    content = path.read_bytes()
    place = content.index(manifest.experts[3].canonical_sha256.encode())
    digit = b"0" if content[place : place + 1] != b"0" else b"1"
    other = write_checkpoint(tmp_path / "other", made=tensors(seed=2))
    path.write_bytes(
        {
            "flip": content[:place] + digit + content[place + 1 :],
            "cut": content[:-1],
            "empty": b"",
            "garbage": b"\x80\x04 no newline",
            "folder of another": cache_entry(other, tmp_path / "cache2"),
        }[damage]
    )
    again, computed = cached(folder, cache)
    assert computed
    assert again == manifest
    assert path.read_bytes() == content


def cache_entry(folder: Path, cache: Path) -> bytes:
    checkpoint = Checkpoint.open(folder)
    load_or_build(checkpoint, "float32", cache)
    return cache_path(checkpoint, "float32", cache).read_bytes()


@pytest.mark.parametrize("body", [b"{}", b"[]", b'{"format": 0}', b"not json"])
def test_an_entry_of_another_version_is_computed_again(tmp_path: Path, body: bytes) -> None:
    folder, cache = write_checkpoint(tmp_path / "m"), tmp_path / "cache"
    cached(folder, cache)
    path = cache_path(Checkpoint.open(folder), "float32", cache)
    path.write_bytes(hashlib.sha256(body).hexdigest().encode() + b"\n" + body)
    assert cached(folder, cache)[1]


def test_an_entry_of_another_format_number_is_computed_again(tmp_path: Path) -> None:
    folder, cache = write_checkpoint(tmp_path / "m"), tmp_path / "cache"
    cached(folder, cache)
    path = cache_path(Checkpoint.open(folder), "float32", cache)
    body = path.read_bytes().partition(b"\n")[2]
    older = body.replace(b'"format":%d' % MANIFEST_FORMAT, b'"format":0')
    assert older != body
    path.write_bytes(hashlib.sha256(older).hexdigest().encode() + b"\n" + older)
    assert cached(folder, cache)[1]


def test_a_cache_that_cannot_be_written_is_named_and_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file, not a folder")
    with pytest.raises(MissingFile, match="cannot be written"):
        cached(write_checkpoint(tmp_path / "m"), tmp_path / "cache")
    cache = tmp_path / "cache2"
    folder = write_checkpoint(tmp_path / "m")
    target = cache_path(Checkpoint.open(folder), "float32", cache)
    target.mkdir(parents=True)
    (target / "in the way").touch()
    with pytest.raises(MissingFile, match="cannot be written"):
        cached(folder, cache)
    assert list(cache.iterdir()) == [target]


def test_an_unknown_dtype_is_refused_before_any_work(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path / "m"))
    with pytest.raises(UnsupportedCheckpoint, match="'float8'"):
        load_or_build(checkpoint, "float8", tmp_path / "cache")  # type: ignore[arg-type]
    assert not (tmp_path / "cache").exists()


def test_writers_at_the_same_time_leave_one_whole_entry(tmp_path: Path) -> None:
    folder, cache = write_checkpoint(tmp_path / "m"), tmp_path / "cache"
    checkpoint = Checkpoint.open(folder)
    threads = [
        threading.Thread(target=load_or_build, args=(checkpoint, "float32", cache))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 10
    for thread in threads:
        thread.join(deadline - time.monotonic())
    assert len(list(cache.iterdir())) == 1
    assert not cached(folder, cache)[1]
