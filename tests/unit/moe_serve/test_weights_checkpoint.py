"""A checkpoint opens only if it is complete and known; experts come out in canonical form."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from moe_serve.weights import Checkpoint, canonical_from_projections, paths
from moe_serve.weights.dtypes import SERVING_DTYPES, ServingDtype, numpy_dtype
from moe_serve.weights.errors import (
    BadConfig,
    BadHeader,
    ChangedFile,
    MissingFile,
    MissingTensor,
    NonFiniteTensor,
    RenamedTensor,
    ShapeMismatch,
    TruncatedFile,
    UnexpectedTensor,
    UnknownExpert,
    UnsafePath,
    UnsupportedCheckpoint,
    WeightsError,
)
from tests.checkpoint_builder import (
    CONFIGS,
    Tensors,
    config,
    entry,
    expert_name,
    raw_file,
    tensors,
    write_checkpoint,
    write_sharded,
)

FILE = "model.safetensors"
UP = expert_name(1, 2, "up")


def canonical(
    made: Tensors, layer_id: int, expert: int, dtype: ServingDtype, model_type: str = "qwen3_moe"
) -> bytes:
    gate, up, down = (
        made[expert_name(layer_id, expert, which, model_type)].astype(numpy_dtype(dtype))
        for which in ("gate", "up", "down")
    )
    return np.concatenate([gate.T, up.T], axis=1).tobytes() + down.T.tobytes()


def test_the_spec_says_what_is_served(tmp_path: Path) -> None:
    spec = Checkpoint.open(write_checkpoint(tmp_path / "My-Model")).spec
    assert spec.model_name == "My-Model"
    assert spec.model_type == "qwen3_moe"
    assert (spec.num_layers, spec.layer_ids) == (2, (0, 1))
    assert (spec.num_experts, spec.top_k) == (3, 2)
    assert (spec.hidden_size, spec.intermediate_size, spec.dtype) == (6, 4, "float32")
    assert spec.expert_bytes("bfloat16") == 3 * 6 * 4 * 2


def test_the_model_name_can_be_given_and_is_checked(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "my model")
    assert Checkpoint.open(folder, model_name="mine").spec.model_name == "mine"
    for name in ("../mine", "", "a" * 129):
        with pytest.raises(UnsafePath, match="model name"):
            Checkpoint.open(folder, model_name=name)


@pytest.mark.parametrize("dtype", SERVING_DTYPES)
@pytest.mark.parametrize("stored", SERVING_DTYPES)
def test_every_expert_in_every_dtype(
    tmp_path: Path, stored: ServingDtype, dtype: ServingDtype
) -> None:
    made = tensors(dtype=stored)
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path / "m", made=made))
    assert checkpoint.spec.dtype == stored
    for layer in range(2):
        for expert in range(3):
            expected = canonical(made, layer, expert, dtype)
            assert checkpoint.read_expert(layer, expert, dtype).tobytes() == expected
            out = bytearray(len(expected))
            checkpoint.read_expert_into(layer, expert, dtype, memoryview(out))
            assert out == expected


@pytest.mark.parametrize("model_type", sorted(CONFIGS))
def test_every_family(tmp_path: Path, model_type: str) -> None:
    made = tensors(model_type)
    folder = write_checkpoint(tmp_path / "m", settings=config(model_type), made=made)
    checkpoint = Checkpoint.open(folder)
    expected = canonical(made, 1, 2, "float32", model_type)
    assert checkpoint.read_expert(1, 2, "float32").tobytes() == expected


def test_layers_are_ordinals_of_moe_layers(tmp_path: Path) -> None:
    made = tensors(layer_ids=(1, 3))
    settings = config(num_hidden_layers=5, mlp_only_layers=[0, 2, 4])
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path / "m", settings=settings, made=made))
    assert checkpoint.spec.layer_ids == (1, 3)
    expected = canonical(made, 3, 0, "float32")
    assert checkpoint.read_expert(1, 0, "float32").tobytes() == expected


def test_a_checkpoint_of_several_files(tmp_path: Path) -> None:
    made = tensors()
    checkpoint = Checkpoint.open(write_sharded(tmp_path / "m", made, num_files=3))
    for layer in range(2):
        for expert in range(3):
            read = checkpoint.read_expert(layer, expert, "float32").tobytes()
            assert read == canonical(made, layer, expert, "float32")
    assert checkpoint.files[0].name == "config.json"
    assert len(checkpoint.files) == 4


def test_a_hub_snapshot_is_read_through_its_links(tmp_path: Path) -> None:
    models = tmp_path / "models--org--Tiny"
    blobs = write_checkpoint(models / "blobs")
    snapshot = models / "snapshots" / "1a2b"
    snapshot.mkdir(parents=True)
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(f"../../blobs/{file.name}")
    checkpoint = Checkpoint.open(snapshot)
    assert checkpoint.spec.model_name == "Tiny"
    assert checkpoint.read_expert(0, 0, "float32").tobytes() == canonical(
        tensors(), 0, 0, "float32"
    )


def test_weights_linked_from_outside_are_refused(tmp_path: Path) -> None:
    outside = write_checkpoint(tmp_path / "outside")
    folder = write_checkpoint(tmp_path / "m")
    (folder / FILE).unlink()
    (folder / FILE).symlink_to(outside / FILE)
    with pytest.raises(UnsafePath, match=r"model\.safetensors is a link that leaves"):
        Checkpoint.open(folder)


def test_other_tensors_are_listed_and_read_for_front_ends(tmp_path: Path) -> None:
    made = tensors(dtype="bfloat16")
    made["model.layers.0.mlp.shared_experts.up_proj.weight"] = made[UP]
    made["model.layers.2.mlp.experts.0.up_proj.weight"] = made[UP]  # past the last layer
    made["model.layers.2.enorm.weight"] = made[UP]
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path / "m", made=made))
    names = [tensor.name for tensor in checkpoint.non_expert_tensors()]
    assert names == [
        "model.embed_tokens.weight",
        "model.layers.0.mlp.gate.weight",
        "model.layers.0.mlp.shared_experts.up_proj.weight",
        "model.layers.1.mlp.gate.weight",
    ]
    for name in names:
        read = checkpoint.read_tensor(name)
        assert read.dtype == np.dtype(ml_dtypes.bfloat16)
        assert np.array_equal(read, made[name])
    with pytest.raises(MissingTensor, match="'nonsense' is missing"):
        checkpoint.read_tensor("nonsense")


def test_a_tensor_without_a_numpy_form_is_named(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m", made=tensors())
    content = (folder / FILE).read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + size])
    end = len(content) - 8 - size
    header["odd"] = entry(end, end + 3, [3], "F8_E4M3")
    (folder / FILE).write_bytes(raw_file(header, content[8 + size :] + b"odd"))
    checkpoint = Checkpoint.open(folder)
    with pytest.raises(UnsupportedCheckpoint, match="'odd' has dtype F8_E4M3"):
        checkpoint.read_tensor("odd")


def without(made: Tensors) -> None:
    del made[UP]


def renamed(made: Tensors) -> None:
    made[UP.replace("up_proj", "upp_proj")] = made.pop(UP)


def prefixed(made: Tensors) -> None:
    made["base." + UP] = made.pop(UP)


def under_another_expert(made: Tensors) -> None:
    made[expert_name(1, 3, "up")] = made.pop(UP)


def transposed(made: Tensors) -> None:
    made[UP] = np.ascontiguousarray(made[UP].T)


def narrower(made: Tensors) -> None:
    made[UP] = made[UP][:-1]


def extra_expert(made: Tensors) -> None:
    made[expert_name(1, 3, "up")] = made[UP]


def with_bias(made: Tensors) -> None:
    made[UP.replace("weight", "bias")] = np.zeros(4, np.float32)


def mixed(made: Tensors) -> None:
    made[UP] = made[UP].astype(np.float16)


def in_float64(made: Tensors) -> None:
    made[UP] = made[UP].astype(np.float64)


def in_fp8(made: Tensors) -> None:
    made[UP] = made[UP].astype(ml_dtypes.float8_e4m3fn)


def scaled(made: Tensors) -> None:
    made[UP + "_scale_inv"] = np.zeros((1, 1), np.float32)


def stacked(made: Tensors) -> None:
    made["model.layers.1.mlp.experts.gate_up_proj"] = np.zeros((3, 8, 6), np.float32)
    without(made)


def in_mxfp4(made: Tensors) -> None:
    made["model.layers.1.mlp.experts.gate_up_proj_blocks"] = np.zeros((3, 8), np.uint8)
    without(made)


@pytest.mark.parametrize(
    ("change", "kind", "match"),
    [
        (without, MissingTensor, f"tensor '{UP}' is missing"),
        (renamed, RenamedTensor, f"'{UP}' is missing.*Did you mean '.*upp_proj.weight'"),
        (prefixed, RenamedTensor, f"'{UP}' is missing.*Did you mean 'base.model"),
        (under_another_expert, MissingTensor, f"tensor '{UP}' is missing"),
        (transposed, ShapeMismatch, rf"'{UP}' in {FILE} has shape \[6, 4\].* \[4, 6\]"),
        (narrower, ShapeMismatch, rf"'{UP}' in {FILE} has shape \[3, 6\].* \[4, 6\]"),
        (extra_expert, UnexpectedTensor, r"experts\.3\.up_proj.*3 experts"),
        (with_bias, UnexpectedTensor, r"up_proj\.bias"),
        (mixed, UnsupportedCheckpoint, f"'{UP}' is stored as F16 but"),
        (in_float64, UnsupportedCheckpoint, f"'{UP}' is stored as F64"),
        (in_fp8, UnsupportedCheckpoint, rf"'{UP}' \(F8_E4M3\) belongs to an FP8 checkpoint"),
        (scaled, UnsupportedCheckpoint, f"'{UP}_scale_inv'.*FP8 checkpoint"),
        (stacked, UnsupportedCheckpoint, "gate_up_proj' stacks all experts"),
        (in_mxfp4, UnsupportedCheckpoint, "gate_up_proj_blocks' belongs to an MXFP4"),
    ],
)
def test_an_incomplete_or_unknown_set_of_experts_is_refused(
    tmp_path: Path, change: Callable[[Tensors], None], kind: type[WeightsError], match: str
) -> None:
    made = tensors()
    change(made)
    with pytest.raises(kind, match=match) as refused:
        Checkpoint.open(write_checkpoint(tmp_path / "m", made=made))
    assert type(refused.value) is kind


def test_all_missing_tensors_are_counted(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m", made=tensors(layer_ids=(0,)))
    with pytest.raises(MissingTensor, match=r"9 expert tensors are missing in all"):
        Checkpoint.open(folder)


@pytest.mark.parametrize("projection", ["gate", "up", "down"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_stored_non_finite_value_is_named(tmp_path: Path, projection: str, value: float) -> None:
    made = tensors()
    name = expert_name(1, 2, projection)
    made[name][2, 3] = value
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path / "m", made=made))
    with pytest.raises(NonFiniteTensor, match=rf"'{name}' .* holds {value} at row 2, column 3"):
        checkpoint.read_expert(1, 2, "float32")
    assert checkpoint.read_expert(1, 1, "float32").size > 0


@pytest.mark.parametrize("projection", ["gate", "up", "down"])
def test_a_value_too_large_for_the_serving_dtype_is_named(tmp_path: Path, projection: str) -> None:
    made = tensors()
    name = expert_name(1, 2, projection)
    made[name][1, 3] = 70_000
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path / "m", made=made))
    with pytest.raises(NonFiniteTensor, match=rf"'{name}'.*70000.* row 1, column 3.*float16"):
        checkpoint.read_expert(1, 2, "float16")
    assert checkpoint.read_expert(1, 2, "bfloat16").size > 0


@pytest.mark.parametrize(("layer", "expert"), [(-1, 0), (2, 0), (0, -1), (0, 3)])
def test_an_expert_out_of_range_is_refused(tmp_path: Path, layer: int, expert: int) -> None:
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path / "m"))
    with pytest.raises(UnknownExpert, match=r"layers are 0\.\.1, experts 0\.\.2"):
        checkpoint.read_expert(layer, expert, "float32")


def test_a_buffer_of_the_wrong_length_is_refused(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path / "m"))
    with pytest.raises(ShapeMismatch, match="size it by expert_bytes"):
        checkpoint.read_expert_into(0, 0, "float32", memoryview(bytearray(287)))


def test_one_byte_missing_is_refused_with_the_tensor(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "m")
    os.truncate(folder / FILE, (folder / FILE).stat().st_size - 1)
    with pytest.raises(TruncatedFile, match=r"tensor 'model\.layers\."):
        Checkpoint.open(folder)


@pytest.mark.parametrize("shrink", [True, False])
def test_a_file_that_changes_after_opening_is_noticed(tmp_path: Path, shrink: bool) -> None:
    folder = write_checkpoint(tmp_path / "m")
    checkpoint = Checkpoint.open(folder)
    if shrink:
        os.truncate(folder / FILE, 100)
    else:
        os.replace(write_checkpoint(tmp_path / "other") / FILE, folder / FILE)
    with pytest.raises(ChangedFile, match=f"file {FILE}, read for tensor"):
        checkpoint.read_expert(0, 0, "float32")


@pytest.mark.parametrize("text", ["", "[]", "{", '"x"', "[" * 200_000, "\ud800"])
def test_a_malformed_config_is_refused(tmp_path: Path, text: str) -> None:
    folder = write_checkpoint(tmp_path / "m")
    (folder / "config.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(BadConfig, match=r"config\.json is not a JSON object"):
        Checkpoint.open(folder)


@pytest.mark.parametrize("file", ["config.json", FILE])
def test_a_missing_file_is_named(tmp_path: Path, file: str) -> None:
    folder = write_checkpoint(tmp_path / "m")
    (folder / file).unlink()
    with pytest.raises(MissingFile, match=file):
        Checkpoint.open(folder)


class Canary:
    """Writes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.write_text, (self.path, "unpickled")


@pytest.mark.parametrize("name", ["model.pt", "pytorch_model.bin", "x.pth", "x.PKL", FILE])
def test_pickled_weights_are_refused_and_never_loaded(tmp_path: Path, name: str) -> None:
    canary = tmp_path / "canary"
    folder = write_checkpoint(tmp_path / "m")
    (folder / FILE).unlink()
    (folder / name).write_bytes(pickle.dumps(Canary(canary)))
    with pytest.raises(BadHeader if name == FILE else UnsupportedCheckpoint, match="pickle"):
        Checkpoint.open(folder)
    assert not canary.exists()
    pickle.loads((folder / name).read_bytes())  # noqa: S301 - the canary does sing
    assert canary.exists()


def test_a_pickle_in_place_of_the_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.pt").write_bytes(pickle.dumps(1))
    with pytest.raises(MissingFile, match="is a file"):
        Checkpoint.open(tmp_path / "model.pt")


def test_errors_survive_the_way_between_actors(tmp_path: Path) -> None:
    with pytest.raises(MissingFile) as fault:
        Checkpoint.open(tmp_path / "gone")
    twin = pickle.loads(pickle.dumps(fault.value))  # noqa: S301 - our own bytes
    assert type(twin) is MissingFile
    assert str(twin) == str(fault.value)
    assert twin.code == "FAILED_PRECONDITION"


def test_the_shipped_model_opens() -> None:
    shipped = Path(__file__).parents[3] / "moe_serve" / "demo" / "tiny_moe"
    checkpoint = Checkpoint.open(shipped)
    spec = checkpoint.spec
    assert (spec.num_layers, spec.num_experts, spec.top_k) == (4, 32, 4)
    assert spec.expert_bytes("float32") == 98_304
    prefix = "model.layers.3.mlp.experts.31."
    gate, up, down = (
        checkpoint.read_tensor(f"{prefix}{which}_proj.weight") for which in ("gate", "up", "down")
    )
    expected = canonical_from_projections(gate, up, down, "float32")
    assert np.array_equal(checkpoint.read_expert(3, 31, "float32"), expected)


class Noted:
    """A `Reading` that notes what it is told, and stops after so many bytes."""

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.done = 0
        self.blocked = 0
        self.blocking_now = False

    @contextmanager
    def blocking(self) -> Iterator[None]:
        self.blocked += 1
        self.blocking_now = True
        try:
            yield
        finally:
            self.blocking_now = False

    def advance(self, num_bytes: int) -> None:
        assert self.blocking_now, "bytes come from the system only in parts that may hang"
        self.done += num_bytes
        if self.done > self.bytes_max:
            raise TimeoutError("stop")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_read_goes_by_chunks_tells_its_bytes_and_stops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: ServingDtype
) -> None:
    monkeypatch.setattr(paths, "READ_CHUNK_BYTES", 40)  # a tensor has 96 bytes
    made = tensors()
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path / "m", made=made))
    size = checkpoint.spec.expert_bytes(dtype)
    out = bytearray(size)
    reading = Noted(size)
    checkpoint.read_expert_into(1, 2, dtype, memoryview(out), reading=reading)
    assert out == canonical(made, 1, 2, dtype)
    assert reading.done == size
    assert reading.blocked == 3, "once a matrix"
    early = Noted(size // 2)
    with pytest.raises(TimeoutError):
        checkpoint.read_expert_into(1, 2, dtype, memoryview(out), reading=early)
    assert size // 2 < early.done <= size // 2 + 40


def test_nothing_is_written_into_memory_that_was_given_up(tmp_path: Path) -> None:
    """A read that hung comes back after its caller gave up: the caller's memory is another's."""
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path / "m"))

    class GivenUp(Noted):
        @contextmanager
        def blocking(self) -> Iterator[None]:
            with super().blocking():
                yield
            raise TimeoutError("given up")

    out = bytearray(b"x" * checkpoint.spec.expert_bytes("float32"))
    with pytest.raises(TimeoutError):
        checkpoint.read_expert_into(0, 0, "float32", memoryview(out), reading=GivenUp(10**9))
    assert set(out) == {ord("x")}
