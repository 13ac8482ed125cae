"""Kinds of malformed input that once got past a typed error: each is refused by name, in bounded
time, memory and text."""

import hashlib
import sqlite3
import time
import tracemalloc
import zipfile
from contextlib import closing
from pathlib import Path
from typing import Any

import grpc
import msgspec
import numpy as np
import pytest
from google.rpc import error_details_pb2

from moe_serve.bootstrap.record import read_record
from moe_serve.cli.recordings import read_segments, read_trace
from moe_serve.config.load import DEPTH_MAX, FAULTS_MAX, ConfigInvalid, parse_config
from moe_serve.controller.journal_rows import (
    Row,
    RowKind,
    StateSnapshot,
    epoch_row,
    image_of,
    snapshot_row,
)
from moe_serve.controller.journal_store import INPUTS_FILE, STATE_FILE, InputsStore, StateStore
from moe_serve.errors import InvalidArgument, MoeServeError, NotFound, StaleTerm, StartRefused
from moe_serve.rpc import codec, dispatch_pb2
from moe_serve.rpc.status import DETAILS_KEY, from_item_error, from_rpc_error, to_status
from moe_serve.weights.binding import bind_experts
from moe_serve.weights.checkpoint import Checkpoint
from moe_serve.weights.errors import BadConfig, BadHeader, MissingTensor, UnsupportedCheckpoint
from moe_serve.weights.header import NAME_CHARS_MAX, TensorInfo, read_header
from moe_serve.weights.manifest_cache import load_cached
from moe_serve.weights.naming import parse_config as parse_model
from moe_serve.weights.paths import find_root
from moe_serve.wire.codec import decode
from moe_serve.wire.control_codec import decode_table
from moe_serve.wire.frame import Kind, pack_prefix
from placement.config import RebalanceConfig
from placement.engine import RebalanceEngine
from placement.messages.codec import encode
from tests.builders import make_layout, make_spec, make_table, make_topology
from tests.checkpoint_builder import config, entry, raw_file, write_checkpoint

DEEP = 5000
"""Deeper than the interpreter's stack."""


# ------------------------------------------------------------------------------ nested too deep
def test_the_body_of_an_error_may_be_nested_however_deep() -> None:
    body = b"\x81\xa1q" + b"\x91" * DEEP
    head = pack_prefix(Kind.ERROR, 1) + b"\x01\0\0\0" + len(body).to_bytes(4, "little")
    with pytest.raises(InvalidArgument, match="error: is malformed"):
        decode([head, body])
    with pytest.raises(InvalidArgument, match="table: is malformed"):
        decode_table(body)


def test_a_kept_manifest_nested_too_deep_is_made_again(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(write_checkpoint(tmp_path / "model"))
    body = b'{"x":' + b"[" * DEEP
    kept = tmp_path / "kept.json"
    kept.write_bytes(hashlib.sha256(body).hexdigest().encode() + b"\n" + body)
    assert load_cached(checkpoint, "float32", kept) is None


def test_a_service_record_nested_too_deep_is_damaged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("moe_serve.bootstrap.record.state_home", lambda: tmp_path)
    (tmp_path / "s.service.json").write_bytes(b'{"x":' + b"[" * DEEP)
    with pytest.raises(NotFound, match="damaged"):
        read_record("s")


@pytest.mark.parametrize(
    ("key", "kind"),
    [
        ("hidden_act", UnsupportedCheckpoint),
        ("hidden_size", BadConfig),
        ("model_type", UnsupportedCheckpoint),
        ("quantization_config", UnsupportedCheckpoint),
    ],
)
def test_a_value_of_a_model_is_not_written_out(key: str, kind: type[MoeServeError]) -> None:
    value: Any = []
    for _ in range(DEEP):
        value = [value]
    settings = config(architectures=[]) if key == "model_type" else config()
    settings[key] = {"quant_method": value} if key.startswith("quant") else value
    with pytest.raises(kind) as caught:
        parse_model(settings)
    assert len(str(caught.value)) < 500


# ------------------------------------------------------------- declared sizes bound nothing
def test_a_model_of_many_experts_and_few_tensors_costs_what_the_tensors_do() -> None:
    huge = parse_model(config(num_hidden_layers=4096, num_experts=65_536))
    names = huge.expert_names(0, 0)
    found = {
        name: TensorInfo(name, "F32", (6, 4) if "down" in name else (4, 6), "f", 0, 96)
        for name in (*names, "model.layers.0.mlp.experts.1.gate_projx.weight")
    }
    began_s = time.process_time()
    tracemalloc.start()
    try:
        with pytest.raises(MissingTensor, match="805306365 expert tensors are missing") as caught:
            bind_experts(huge, found)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    assert time.process_time() - began_s < 5
    assert "gate_projx" in str(caught.value), "the near name is still found"


def test_many_dense_layers_are_looked_up_not_searched() -> None:
    dense = [7777] * 200_000 + list(range(4096))
    began_s = time.process_time()
    with pytest.raises(UnsupportedCheckpoint, match="no layer has experts"):
        parse_model(config(num_hidden_layers=4096, mlp_only_layers=dense))
    assert time.process_time() - began_s < 5


@pytest.mark.parametrize("shape", [[0, 2**62], [256, 2**40, 40, 12, 7091, 97, 0], [2**62, 0]])
def test_an_answer_of_no_elements_and_huge_axes_is_refused(shape: list[int]) -> None:
    tensor = dispatch_pb2.Tensor(data_type=dispatch_pb2.DATA_TYPE_FP32, shape=shape)
    with pytest.raises(InvalidArgument, match=r"output\.shape: .* spans more than"):
        codec.output_array(dispatch_pb2.ForwardResponse(output=tensor))


def test_a_table_has_no_negative_sizes() -> None:
    tree = msgspec.msgpack.decode(encode(make_table(make_layout([[0, 1], [2, 3]]))))
    with pytest.raises(InvalidArgument, match="num_layers"):
        decode_table(encode({**tree, "num_layers": -1, "num_experts": -4}))


def test_a_table_ascends_by_itself_not_by_its_differences() -> None:
    tree = msgspec.msgpack.decode(encode(make_table(make_layout([[0, 1], [2, 3]]))))
    wraps = np.array([0, 2**31 - 1, -(2**31), -1, 4], np.int32)
    assert not (np.diff(wraps) < 0).any(), "int32 wraps around"
    with pytest.raises(InvalidArgument, match=r"table\.replica_ptr: must ascend"):
        decode_table(encode({**tree, "replica_ptr": wraps}))


def test_a_computed_column_makes_no_more_of_a_recording_than_it_holds(tmp_path: Path) -> None:
    file = tmp_path / INPUTS_FILE
    with closing(sqlite3.connect(file, isolation_level=None)) as db:
        db.execute(
            "CREATE TABLE inputs (seq INTEGER PRIMARY KEY, segment INTEGER, kind TEXT, "
            "body BLOB GENERATED ALWAYS AS (zeroblob(500000000)))"
        )
        db.execute("INSERT INTO inputs (segment, kind) VALUES (1, 'snapshot')")
    tracemalloc.start()
    try:
        with pytest.raises(InvalidArgument, match="too big"):
            read_segments(file)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_a_member_of_a_recording_declares_no_more_than_it_can_hold(tmp_path: Path) -> None:
    file = tmp_path / "trace.npz"
    size = 1 << 31
    head = f"{{'descr': '|u1', 'fortran_order': False, 'shape': ({size - 128}, 1, 1), }}"
    member = b"\x93NUMPY\x01\x00" + (118).to_bytes(2, "little") + head.encode().ljust(117) + b"\n"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("topk_ids.npy", member)
    declared = (len(member)).to_bytes(4, "little")
    data = file.read_bytes()
    at = data.rindex(b"PK\x01\x02")  # the directory: sizes lie at 20 (packed) and 24
    assert data[at + 24 : at + 28] == declared
    file.write_bytes(data[: at + 24] + size.to_bytes(4, "little") + data[at + 28 :])
    tracemalloc.start()
    try:
        with pytest.raises(InvalidArgument, match="more than can be"):
            read_trace(file)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_an_id_in_a_recording_does_not_say_how_much_memory_is_taken(tmp_path: Path) -> None:
    file = tmp_path / "stats.jsonl"
    line = {"record_type": "eplb_load_stats", "expert_load": [[1]] * 900, "p2l_map": [[8000]] * 900}
    file.write_bytes(msgspec.json.encode(line))
    tracemalloc.start()
    try:
        with pytest.raises(InvalidArgument, match="expert 8000, but 1 physical"):
            read_trace(file)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


# -------------------------------------------------------------------------------- absurd numbers
def test_a_name_of_a_tensor_has_a_limit(tmp_path: Path) -> None:
    digits = "9" * 5000  # more than the interpreter makes a number of
    header = {f"model.layers.{digits}.mlp.experts.0.w": entry(0, 4, [1])}
    (tmp_path / "f.safetensors").write_bytes(raw_file(header, bytes(4)))
    with pytest.raises(BadHeader, match=f"longer than {NAME_CHARS_MAX} characters") as caught:
        read_header(find_root(tmp_path), "f.safetensors")
    assert len(str(caught.value)) < 600


@pytest.mark.parametrize(
    "twice", ['"a":{%s},"a":{%s}', '"a":{%s},"\\u0061":{%s}', '"b":{"x":{"y":1,"y":2}},"a":{%s}']
)
def test_a_name_is_in_a_header_once(tmp_path: Path, twice: str) -> None:
    good = '"dtype":"F32","shape":[1],"data_offsets":[0,4]'
    text = "{" + twice.replace("%s", good) + "}"
    (tmp_path / "f.safetensors").write_bytes(raw_file(text.encode(), bytes(4)))
    with pytest.raises(BadHeader, match="is there twice"):
        read_header(find_root(tmp_path), "f.safetensors")


SERVICE = """
service: tiny
model: {name: tiny, checkpoint: "package:tiny_moe"}
profiles: [{name: p, flops_per_s: 1, memory_bytes_per_s: 1, copy_bytes_per_s: 1}]
fleet: {ranks: [{BUDGET, profile: p}]}
"""


def faults(text: str) -> list[str]:
    with pytest.raises(ConfigInvalid) as caught:
        parse_config(text.encode(), "f.yaml")
    return [str(fault) for fault in caught.value.faults]


@pytest.mark.parametrize(
    ("budget", "said"),
    [
        ("budget: " + "9" * 400, "f.yaml:5"),
        ("budget: " + "9" * 400 + "TiB", "at most"),
        ("budget: -5", "greater than or equal to 0"),
        ("slots: 0x" + "f" * 5000, "too large to show"),
        ("budget: 64MiB, num_cpus: .inf", "finite"),
    ],
    ids=["digits", "digits_unit", "negative", "hexadecimal", "infinite"],
)
def test_a_size_in_a_service_file_is_a_size(budget: str, said: str) -> None:
    assert parse_config(SERVICE.replace("BUDGET", "budget: 64MiB").encode(), "f.yaml")
    found = faults(SERVICE.replace("BUDGET", budget))
    assert any(said in line for line in found), found


@pytest.mark.parametrize("port", ["70000", "-1", "9" * 5000, "1_0", "x"])
def test_settings_of_a_journal_are_numbers_in_bounds(port: str) -> None:
    with pytest.raises(ValueError, match="port"):
        image_of([], {"admin_port": port}, 0.0, dropped_tail=False)


def test_starts_in_a_journal_are_times() -> None:
    image = image_of([], {"starts": "1.5 2"}, 0.0, dropped_tail=False)
    assert image.starts.at_s == (1.5, 2.0)
    for text in ("x", "nan", "inf", "9" * 5000):
        with pytest.raises(ValueError, match=r"time|float") as caught:
            image_of([], {"starts": text}, 0.0, dropped_tail=False)
        assert len(str(caught.value)) < 200


def a_snapshot() -> StateSnapshot:
    engine = RebalanceEngine(
        make_spec(), make_topology([3, 3]), RebalanceConfig(), term=1, first_epoch=1, start_s=0.0
    )
    return StateSnapshot(
        term=1, epoch=3, at_s=1.0, engine=engine.snapshot(), parts=(), epochs_published=2
    )


def test_rows_of_a_journal_hold_numbers_and_times() -> None:
    assert image_of([epoch_row(7, 1.0)], {}, 0.0, dropped_tail=False).epoch == 7
    for body in (b"", b"-1", b" 7", b"1_0", b"9" * 5000, str(2**63).encode()):
        with pytest.raises(ValueError, match="epoch"):
            image_of([Row(RowKind.EPOCH, 1.0, body)], {}, 0.0, dropped_tail=False)
    for changes in ({"epoch": 2**63}, {"epoch": -1, "epochs_published": -1}):
        tree = msgspec.msgpack.decode(snapshot_row(a_snapshot()).body)
        row = Row(RowKind.SNAPSHOT, 1.0, encode({**tree, **changes}))
        with pytest.raises(ValueError, match="epoch"):
            image_of([row], {}, 0.0, dropped_tail=False)
    for at_s in (float("inf"), float("nan"), 1e300):
        with pytest.raises(ValueError, match="a time does not lie"):
            image_of([epoch_row(7, at_s)], {}, 0.0, dropped_tail=False)


# --------------------------------------------------------------------------- columns of other types
def test_a_journal_whose_column_holds_another_type_is_damaged(tmp_path: Path) -> None:
    store = StateStore(tmp_path, "s")
    store.append(0, [epoch_row(number, 1.0) for number in (1, 2, 3)])
    store.close()
    for column, value in (("body", "text"), ("body", 5), ("at_s", "noon")):
        with closing(sqlite3.connect(tmp_path / STATE_FILE, isolation_level=None)) as db:
            (old,) = db.execute(f"SELECT {column} FROM log WHERE seq = 2").fetchone()  # noqa: S608
            db.execute(f"UPDATE log SET {column} = ? WHERE seq = 2", (value,))  # noqa: S608
        with pytest.raises(StartRefused, match="record 2 fails its checksum"):
            StateStore(tmp_path, "s")
        with closing(sqlite3.connect(tmp_path / STATE_FILE, isolation_level=None)) as db:
            db.execute(f"UPDATE log SET {column} = ? WHERE seq = 2", (old,))  # noqa: S608
    assert len(StateStore(tmp_path, "s").rows) == 3


def test_a_damaged_journal_is_told_in_one_line(tmp_path: Path) -> None:
    StateStore(tmp_path, "s").close()
    file = tmp_path / STATE_FILE
    with closing(sqlite3.connect(file)) as db:
        db.execute("PRAGMA journal_mode = DELETE")
        db.execute("CREATE TABLE gone (body BLOB)")
        db.execute("INSERT INTO gone VALUES (zeroblob(50000))")
        db.execute("DROP TABLE gone")
        db.commit()
    data = bytearray(file.read_bytes())
    assert int.from_bytes(data[36:40], "big") > 0, "pages that are free"
    data[32:40] = bytes(8)  # nobody knows of them any more
    file.write_bytes(data)
    with pytest.raises(StartRefused) as caught:
        StateStore(tmp_path, "s")
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 600


def test_a_journal_whose_schema_is_no_text_is_damaged(tmp_path: Path) -> None:
    StateStore(tmp_path, "s").close()
    file = tmp_path / STATE_FILE
    with closing(sqlite3.connect(file)) as db:
        db.execute("PRAGMA journal_mode = DELETE")
    data = file.read_bytes()
    # SQLite quotes the name of a table in its error, which Python then cannot decode.
    broken = data.replace(b"CREATE TABLE meta", b"CREATE TABLX meta")
    file.write_bytes(broken.replace(b"tablemetameta", b"tablem\xf9tam\xf9ta"))
    with pytest.raises(StartRefused, match="is damaged"):
        StateStore(tmp_path, "s")


@pytest.mark.parametrize("value", ["'noon'", "9e999", "x'00'"])
@pytest.mark.parametrize("column", ["segment", "at_s"])
def test_inputs_whose_column_holds_another_type_are_moved_aside(
    tmp_path: Path, column: str, value: str
) -> None:
    store = InputsStore(tmp_path)
    store.append([(1, "event", 1.0, b"x")])
    store.close()
    with closing(sqlite3.connect(tmp_path / INPUTS_FILE, isolation_level=None)) as db:
        db.execute(f"UPDATE inputs SET {column} = {value}")  # noqa: S608
    if column == "segment":
        with pytest.raises(InvalidArgument):
            read_segments(tmp_path)
    again = InputsStore(tmp_path)
    assert again.moved_aside
    assert again.segments() == []
    again.close()


# ------------------------------------------------------------------------------ the service file
@pytest.mark.parametrize(
    "value", ['!!int ""', "!!float ''", "!!bool x", "!!timestamp x", "!!str {=: a}", "!x y"]
)
def test_tags_of_yaml_are_refused(value: str) -> None:
    (line,) = faults(f"service: tiny\nport: {value}\n")
    assert "f.yaml:2:7: YAML tags" in line
    (line,) = faults(f"? {value}\n: 1\n")
    assert "YAML tags" in line


@pytest.mark.parametrize("text", ["a: " + "[" * DEEP, "- " * DEEP, "? " * DEEP])
def test_brackets_within_brackets_end_soon(text: str) -> None:
    began_s = time.process_time()
    (line,) = faults(text)
    assert f"more than {DEPTH_MAX} lists and maps" in line
    assert time.process_time() - began_s < 5


def test_faults_of_a_service_file_are_few_and_short() -> None:
    found = faults("".join(f"key{number}: 1\n" for number in range(3000)))
    assert len(found) <= FAULTS_MAX + 1
    assert "more faults" in found[-1]
    found = faults("k" * 30_000 + ": " + "v" * 30_000)
    assert max(map(len, found)) < 1000
    assert len(faults("a: 1\n" * 3000)) <= 2 * FAULTS_MAX + 1


# ------------------------------------------------------------------ what clients are answered
class Failed(grpc.RpcError):
    def __init__(self, details: bytes) -> None:
        self._details = details

    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.ABORTED

    def details(self) -> str:
        return "text of the call"

    def trailing_metadata(self) -> tuple[tuple[str, bytes], ...]:
        return ((DETAILS_KEY, self._details),)


def test_details_that_cannot_be_read_leave_the_calls_own_error() -> None:
    error = from_rpc_error(Failed(b"\xff\xff\xff"))
    assert "text of the call" in error.message


def test_a_detail_that_cannot_be_read_is_left_out() -> None:
    status = to_status(StaleTerm("old", term=7))
    broken = status.details.add()
    broken.type_url = "type.googleapis.com/google.rpc.BadRequest"
    broken.value = b"\xff\xff"
    error = from_rpc_error(Failed(status.SerializeToString()))
    assert isinstance(error, StaleTerm)
    assert error.term == 7


@pytest.mark.parametrize("term", ["9" * 5000, "\u0667", "-1", ""])
def test_a_term_that_is_no_number_makes_no_fence(term: str) -> None:
    status = to_status(StaleTerm("old", term=7))
    info = status.details[0]
    inside = error_details_pb2.ErrorInfo()
    info.Unpack(inside)
    inside.metadata["term"] = term
    info.Pack(inside)
    assert not isinstance(from_rpc_error(Failed(status.SerializeToString())), StaleTerm)


@pytest.mark.parametrize("wait_s", [-1.0, float("inf"), float("nan")])
def test_a_wait_that_cannot_be_slept_is_none(wait_s: float) -> None:
    item = dispatch_pb2.ItemError(code=8, message="full", retry_after_s=wait_s)
    assert getattr(from_item_error(item), "retry_after_s", 0) is None
