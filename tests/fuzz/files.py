"""Targets of what lies on disk: weights and their names, recordings, the service file."""

from __future__ import annotations

import hashlib
import io
import json
import os
import random
import warnings
import zipfile
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import safetensors
import yaml

from moe_serve.cli.recordings import CountTrace, is_journal, read_trace
from moe_serve.config.load import ConfigInvalid, parse_config
from moe_serve.errors import MoeServeError
from moe_serve.weights.binding import bind_experts, non_expert_tensors
from moe_serve.weights.build import build_manifest
from moe_serve.weights.checkpoint import Checkpoint
from moe_serve.weights.errors import WeightsError
from moe_serve.weights.header import DIM_MAX, RANK_MAX, TensorInfo, read_header
from moe_serve.weights.manifest_cache import load_cached
from moe_serve.weights.naming import parse_config as parse_model
from moe_serve.weights.paths import CheckpointRoot, check_name, find_root, has_file, open_file
from moe_serve.weights.safetensors_index import INDEX_FILE, open_index
from tests.checkpoint_builder import config, encode, tensors, write_checkpoint, write_sharded
from tests.fuzz import mutations
from tests.fuzz.target import Target, joined, pieces, refused, scratch

FILE = "model.safetensors"
COUNTS_MAX = 1 << 27
"""Counts of a recording that are read."""


# ---------------------------------------------------------------------------------------- weights
@cache
def empty_root() -> CheckpointRoot:
    path = scratch() / "weights"
    path.mkdir()
    return find_root(path)


def safetensors_header(data: bytes) -> bool:
    """A weights file: what is taken, the format's own library takes as well, and sees the same."""
    root = empty_root()
    (Path(root.folder) / FILE).write_bytes(data)
    try:
        stamp, found = read_header(root, FILE)
    except WeightsError as error:
        return refused(error)
    assert stamp.size_bytes == len(data)
    assert sum(tensor.num_bytes for tensor in found) <= len(data)
    for tensor in found:
        assert len(tensor.shape) <= RANK_MAX
        assert all(0 <= length <= DIM_MAX for length in tensor.shape)
        assert 0 <= tensor.offset_bytes <= tensor.offset_bytes + tensor.num_bytes <= len(data)
    agrees(data, found)
    return True


def agrees(data: bytes, found: list[TensorInfo]) -> None:
    """The format's own library sees the tensors where we do."""
    theirs = {
        name: (tuple(entry["shape"]), bytes(entry["data"]))
        for name, entry in safetensors.deserialize(data)
    }
    ours = {t.name: (t.shape, data[t.offset_bytes : t.offset_bytes + t.num_bytes]) for t in found}
    assert ours == theirs


def of_header(data: bytes, rng: random.Random) -> bytes:
    """The header's JSON changed, with the size that it then has."""
    if rng.random() < 0.3 or len(data) < 8:
        return mutations.raw(data, rng)
    size = int.from_bytes(data[:8], "little")
    text = mutations.json_text(data[8 : 8 + size], rng)
    return len(text).to_bytes(8, "little") + text + data[8 + size :]


def header_seeds() -> list[bytes]:
    made = tensors()
    few = dict(list(made.items())[:3])
    return [
        encode(few),
        encode({"e": np.zeros((0, 3), np.float32)}),
        encode(tensors(dtype="bfloat16")),
    ]


@cache
def sharded_root() -> CheckpointRoot:
    return find_root(write_sharded(scratch() / "sharded", tensors()))


def safetensors_index(data: bytes) -> bool:
    """The index file of a checkpoint of two good files."""
    root = sharded_root()
    path = Path(root.folder) / INDEX_FILE
    path.write_bytes(data)
    try:
        index = open_index(root)
    except WeightsError as error:
        return refused(error)
    for tensor in index.tensors.values():
        assert tensor.file in index.stamps
    return True


@cache
def index_seeds() -> tuple[bytes, ...]:
    return ((Path(sharded_root().folder) / INDEX_FILE).read_bytes(),)


@cache
def checkpoint_folder() -> Path:
    return write_checkpoint(scratch() / "checkpoint")


def checkpoint_config(data: bytes) -> bool:
    """`config.json` beside good weights: the checkpoint opens as these weights are, or is
    refused."""
    (checkpoint_folder() / "config.json").write_bytes(data)
    try:
        checkpoint = Checkpoint.open(checkpoint_folder())
    except WeightsError as error:
        return refused(error)
    spec = checkpoint.spec
    assert (spec.num_experts, spec.hidden_size, spec.intermediate_size) == (3, 6, 4)
    assert set(spec.layer_ids) <= {0, 1}
    assert 1 <= spec.top_k <= 3
    return True


def config_seeds() -> list[bytes]:
    extra = {"quantization_config": None, "mlp_only_layers": [], "decoder_sparse_step": 1}
    return [json.dumps(config()).encode(), json.dumps(config(**extra)).encode()]


CONFIG_WORDS = (
    b'"quantization_config":{"quant_method":"fp8"},',
    b'"first_k_dense_replace":1,',
    b'"moe_layer_freq":2,',
    b'"mlp_only_layers":[0],',
    b'"num_local_experts":3,',
    b'"n_routed_experts":3,',
    b"DeepseekV3ForCausalLM",
    b"MixtralForCausalLM",
)


def tensor_names(data: bytes) -> bool:
    """Names of tensors, one a line, of one shape: bound to experts, or refused."""
    model = parse_model(config(num_hidden_layers=1))
    names = data.decode("utf-8", "replace").split("\n")
    found = {
        name: TensorInfo(name, "F32", (6, 4) if "down" in name else (4, 6), FILE, 0, 96)
        for name in names
        if len(name) <= 512
    }
    try:
        binding = bind_experts(model, found)
    except WeightsError as error:
        return refused(error)
    bound = {tensor.name for expert in binding.experts for tensor in expert}
    assert len(bound) == 9
    assert not bound & {tensor.name for tensor in non_expert_tensors(model, found)}
    return True


def names_seeds() -> list[bytes]:
    made = [name for name in tensors() if "layers.1" not in name]
    return ["\n".join(made).encode(), "\n".join([*made, "model.layers.9.mlp.experts.0.x"]).encode()]


@cache
def guarded_root() -> tuple[CheckpointRoot, frozenset[int]]:
    """A folder with files, links inside and out; and the inodes that may be opened."""
    path = scratch() / "guarded"
    (path / "deep").mkdir(parents=True)
    (scratch() / "outside").write_bytes(b"secret")
    (path / "file").write_bytes(b"x")
    (path / "deep" / "file").write_bytes(b"y")
    (path / "out").symlink_to("../outside")
    (path / "in").symlink_to("deep/file")
    (path / "loop").symlink_to("loop")
    (path / "pipe").unlink(missing_ok=True)
    os.mkfifo(path / "pipe")
    inside = frozenset(file.stat().st_ino for file in (path / "file", path / "deep" / "file"))
    return find_root(path), inside


def paths(data: bytes) -> bool:
    """A name of a file below a checkpoint, and a folder that somebody names: nothing outside is
    opened."""
    root, inside = guarded_root()
    name = os.fsdecode(data) if len(data) % 2 else data.decode("utf-8", "replace")
    try:
        there = has_file(root, name)
        with open_file(root, name) as (_, stamp):
            assert there
            assert stamp.inode in inside
        taken = True
    except WeightsError as error:
        taken = refused(error)
    try:
        found = find_root(Path(root.folder) / "deep" / name)
        assert os.path.isdir(found.folder)
        assert os.path.commonpath([found.root, found.folder]) == found.root
    except WeightsError as error:
        refused(error)
    if taken:
        assert check_name(name, "name") == name
    return taken


@cache
def manifest_checkpoint() -> Checkpoint:
    return Checkpoint.open(write_checkpoint(scratch() / "manifest"))


def manifest_cache(data: bytes) -> bool:
    """A kept manifest whose checksum holds: the right one, or none."""
    path = scratch() / "kept-manifest.json"
    path.write_bytes(hashlib.sha256(data).hexdigest().encode() + b"\n" + data)
    found = load_cached(manifest_checkpoint(), "float32", path)
    if found is None:
        return False
    spec = manifest_checkpoint().spec
    assert len(found.experts) == spec.num_layers * spec.num_experts
    assert msgspec.json.decode(msgspec.json.encode(found), type=type(found)) == found
    return True


@cache
def manifest_seeds() -> tuple[bytes, ...]:
    return (msgspec.json.encode(build_manifest(manifest_checkpoint(), "float32")),)


# ------------------------------------------------------------------------------------- recordings
def recording(name: str, data: bytes) -> bool:
    """A recording that somebody sent, as the replay command reads it."""
    path = scratch() / name
    path.write_bytes(data)
    try:
        if is_journal(path):
            return False
        trace = read_trace(path)
    except MoeServeError as error:
        return refused(error)
    if isinstance(trace, CountTrace):
        assert trace.counts.dtype == np.int64
        assert 0 < trace.counts.size <= COUNTS_MAX
        assert (trace.counts >= 0).all()
        assert int(trace.counts.sum()) > 0
    else:
        assert trace.ids.ndim == 3
        assert int(trace.ids.min()) >= 0
        assert trace.num_experts <= 16_384
    return True


MEMBERS = (
    "topk_ids.npy",
    "phase.npy",
    "logical_count.npy",
    "expert_load_window.npy",
    "physical_to_logical_map.npy",
    "freq.npy",
    "samples.npy",
    "tokens_per_sample.npy",
)
MEMBERS_MAX = 4


def recording_npz(data: bytes) -> bool:
    """An even first byte: the file. An odd one: members, whose sums of zip hold."""
    if not data or data[0] % 2 == 0:
        return recording("trace.npz", data[1:])
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of names that are there twice
        for part in pieces(data[1:], MEMBERS_MAX):
            kind, content = (part[0] if part else 0), part[1:]
            packed = zipfile.ZIP_DEFLATED if kind & 128 else zipfile.ZIP_STORED
            archive.writestr(MEMBERS[kind % len(MEMBERS)], content, packed)
    return recording("trace.npz", file.getvalue())


def _npy(name: str, array: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, np.asarray(array))
    return bytes([MEMBERS.index(f"{name}.npy")]) + file.getvalue()


def npz_seeds() -> list[bytes]:
    ids = np.array([[[0, 5]], [[2, 1]]], np.uint8)
    window = np.array([[[1, 2, 3]], [[4, 5, 6]]], np.int64)
    whole = io.BytesIO()
    np.savez_compressed(whole, topk_ids=ids)
    members = [
        [_npy("topk_ids", ids), _npy("phase", [0, 1])],
        [_npy("logical_count", np.array([[[1, 2]], [[0, 3.5]]], np.float16))],
        [
            _npy("expert_load_window", window),
            _npy("physical_to_logical_map", np.array([[0, 1, 0]], np.int64)),
        ],
        [
            _npy("freq", np.array([[[0.5, 1.5]]], np.float32)),
            _npy("samples", np.array([10.0])),
            _npy("tokens_per_sample", np.array([4.0])),
        ],
    ]
    return [b"\0" + whole.getvalue(), *(b"\1" + joined(parts) for parts in members)]


NPZ_WORDS = (
    *(b"<i8", b"|u1", b"<f4", b"|O", b"<U9", b">i8", b"<c16", b"<M8[s]", b"True ", b"(2, 1, 2)"),
    *(b"(", b")", b"1000000000000", b"-1", b"(4294967296,)", b"[", b"\x93NUMPY\x02\x00"),
)
_member = mutations.of_pieces(MEMBERS_MAX, mutations.words_of(NPZ_WORDS))


def _dump_of(values: Any) -> bytes:
    import torch

    file = io.BytesIO()
    torch.save(values, file)
    return file.getvalue()


def recording_dump(data: bytes) -> bool:
    """A dump of `torch.save`."""
    return recording("dump.pt", data)


@cache
def dump_seeds() -> tuple[bytes, ...]:
    import torch

    passes = [
        {"forward_pass_id": 3, "global_physical_count": torch.tensor([[1, 2]])},
        {"forward_pass_id": 4, "global_physical_count": torch.tensor([[0, 5]])},
    ]
    return (
        _dump_of({"logical_count": torch.ones(2, 1, 4, dtype=torch.int32)}),
        _dump_of({"records": passes, "last_physical_to_logical_map": torch.tensor([[1, 0]])}),
    )


def _rezipped(data: bytes, rng: random.Random) -> bytes:
    """One member changed, its sum with it."""
    if rng.random() < 0.2:
        return mutations.raw(data, rng)
    out = io.BytesIO()
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as old, zipfile.ZipFile(out, "w") as new:
            names = old.namelist()
            chosen = rng.choice(names)
            for name in names:
                content = old.read(name)
                new.writestr(name, mutations.raw(content, rng) if name == chosen else content)
    except (zipfile.BadZipFile, NotImplementedError, EOFError, OSError, *mutations.UNREADABLE):
        return mutations.raw(data, rng)
    return out.getvalue()


def recording_lines(data: bytes) -> bool:
    """A log of JSON lines."""
    return recording("stats.jsonl", data)


def lines_seeds() -> list[bytes]:
    line = {
        "record_type": "eplb_load_stats",
        "version": 1,
        "expert_load": [[1, 2, 3], [4, 5, 6]],
        "p2l_map": [[0, 1, 2], [2, 1, 0]],
    }
    other = {"record_type": "other", "x": [1]}
    text = "\n".join(json.dumps(one) for one in (line, other, line))
    return [text.encode(), json.dumps(line).encode()]


def _line(data: bytes, rng: random.Random) -> bytes:
    lines = data.split(b"\n")
    at = rng.randrange(len(lines))
    lines[at] = mutations.json_text(lines[at], rng)
    return b"\n".join(lines)


# ------------------------------------------------------------------------------- the service file
def _bounded(error: ConfigInvalid) -> bool:
    for fault in error.faults:
        assert len(str(fault)) <= 1000
        assert fault.line >= 1
        assert fault.column >= 1
    assert 1 <= len(error.faults) <= 200
    return False


def config_yaml(data: bytes) -> bool:
    """A service file: read, or every fault told with its place; what was read is read again from
    what it says."""
    try:
        found = parse_config(data, "service.yaml")
    except ConfigInvalid as error:
        return _bounded(error)
    text = yaml.safe_dump(json.loads(found.model_dump_json()))
    assert parse_config(text.encode(), "again.yaml") == found
    return True


SERVICE = """
service: tiny
model: {name: tiny, checkpoint: "package:tiny_moe"}
profiles:
  - {name: small, flops_per_s: 1.0e+9, memory_bytes_per_s: 1.0e+9, copy_bytes_per_s: 1.0e+8}
fleet:
  ranks:
    - {count: 2, slots: 8, profile: small, node_labels: {moe.node: a}}
    - {budget: 64MiB, profile: small}
limits: {max_message_bytes: 1.5 MiB}
rebalance: {window_s: 1.0}
"""
YAML_WORDS = (
    *(b"!!int", b"!!python/object:os.system", b"!!binary", b"&a ", b"*a", b"<<: ", b"? ", b"- "),
    *(b"0x", b"0b_", b"2001-99-99", b".inf", b".nan", b"1:60", b"---\n", b"%YAML 9\n", b"\t"),
    *(b"slots: ", b"budget: ", b"9" * 400, b"0x" + b"f" * 5000, b"TiB", b"{", b"}", b"[", b"]"),
)


def _yaml(data: bytes, rng: random.Random) -> bytes:
    if rng.random() < 0.4:
        return mutations.words_of(YAML_WORDS)(data, rng)
    return mutations.yaml_text(data, rng)


TARGETS = (
    Target("safetensors_header", safetensors_header, header_seeds, of_header),
    Target(
        "safetensors_index", safetensors_index, lambda: list(index_seeds()), mutations.json_text
    ),
    Target(
        "checkpoint_config",
        checkpoint_config,
        config_seeds,
        mutations.either(mutations.json_text, mutations.words_of(CONFIG_WORDS)),
    ),
    Target(
        "tensor_names",
        tensor_names,
        names_seeds,
        mutations.words_of((b".w1", b"model.layers.", b".mlp.experts.", b"_scale", b"9" * 500)),
    ),
    Target(
        "paths",
        paths,
        lambda: [b"file", b"in"],
        mutations.words_of(
            (b"..", b"/", b"\0", b"%2e", b"out", b"loop", b"pipe", b"~", b"a" * 130)
        ),
    ),
    Target("manifest_cache", manifest_cache, lambda: list(manifest_seeds()), mutations.json_text),
    Target(
        "recording_npz",
        recording_npz,
        npz_seeds,
        mutations.behind(1, mutations.either(_member, mutations.raw)),
        base_bytes=2 << 20,
    ),
    Target(
        "recording_dump",
        recording_dump,
        lambda: list(dump_seeds()),
        _rezipped,
        base_bytes=4 << 20,
        max_bytes=16_384,
        examples=100,
    ),
    Target("recording_lines", recording_lines, lines_seeds, _line, base_bytes=1 << 20),
    Target(
        "config_yaml",
        config_yaml,
        lambda: [SERVICE.encode()],
        _yaml,
        base_bytes=4 << 20,
        factor=4096,
        max_bytes=2048,
        examples=100,
    ),
)
