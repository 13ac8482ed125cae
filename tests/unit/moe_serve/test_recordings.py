"""Readers of recordings: what they understand, and one clear error for what they do not."""

import json
import os
import re
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from moe_serve.cli.recordings import (
    CountTrace,
    TokenTrace,
    is_journal,
    read_trace,
    stats_lines,
    trace,
)
from moe_serve.cli.recordings import arrays as arrays_module
from moe_serve.errors import InvalidArgument, MoeServeError, ResourceExhausted
from placement.adapters import counts as counts_module
from placement.adapters.sglang import logical_counts

Write = Callable[[Path], None]
ROOT = Path(__file__).parents[3]
DATA = os.environ.get("MOE_SERVE_DATA", "")


def _counts(file: Path) -> CountTrace:
    assert not is_journal(file)
    found = read_trace(file)
    assert isinstance(found, CountTrace)
    return found


def _refused(file: Path, kind: type[MoeServeError] = InvalidArgument) -> str:
    with pytest.raises(kind) as caught:
        read_trace(file)
    assert str(file) in caught.value.message
    return caught.value.message


# -- npz -----------------------------------------------------------------------------------------


def test_expert_ids_with_their_phase(tmp_path: Path) -> None:
    file = tmp_path / "trace.npz"
    ids = np.array([[[0, 5]], [[2, 1]]], dtype=np.uint8)
    # Texts and other arrays are passed over.
    np.savez_compressed(file, topk_ids=ids, phase=np.array([0, 1]), domain=np.array(["a", "b"]))
    found = read_trace(file)
    assert isinstance(found, TokenTrace)
    assert found.ids.tolist() == ids.tolist()
    assert found.phase is not None
    assert found.phase.tolist() == [0, 1]
    assert (found.num_layers, found.num_experts) == (1, 6)


def test_counts_in_an_npz(tmp_path: Path) -> None:
    file = tmp_path / "counts.npz"
    np.savez(file, logical_count=np.array([[[1, 2]], [[0, 0]], [[3.4, 0]]], dtype=np.float16))
    found = _counts(file)
    assert found.counts.tolist() == [[[1, 2]], [[3, 0]]]
    assert found.notes == ("1 steps without load left out",)


def test_layers_without_load_take_no_slots(tmp_path: Path) -> None:
    file = tmp_path / "dense.npz"
    np.savez(file, logical_count=np.array([[[0, 0], [1, 2], [0, 0]]]))
    found = _counts(file)
    assert found.counts.tolist() == [[[1, 2]]]
    assert found.notes == ("2 layers without load left out: 0, 2",)
    many = np.zeros((1, 12, 2))
    many[0, 11] = 1
    np.savez(file, logical_count=many)
    assert _counts(file).notes == ("11 layers without load left out: 0, 1, 2, 3, 4, 5, 6, 7, ...",)


def test_shares_of_groups_become_pairs(tmp_path: Path) -> None:
    file = tmp_path / "load.npz"
    np.savez(
        file,
        freq=np.array([[[0.5, 1.5]], [[1.0, 1.0]]], dtype=np.float16),
        samples=np.array([10, 2], dtype=np.int32),
        tokens_per_sample=np.array([4.0, 3.5], dtype=np.float32),
    )
    assert _counts(file).counts.tolist() == [[[20, 60]], [[7, 7]]]


def _savez(**arrays: Any) -> Write:
    def write(file: Path) -> None:
        np.savez(file, **arrays)

    return write


def _raw(member: bytes, name: str = "topk_ids.npy") -> Write:
    def write(file: Path) -> None:
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr(name, member)

    return write


def _npy(shape: tuple[int, ...], data: bytes = b"", version: bytes = b"\x01\x00") -> bytes:
    header = f"{{'descr': '|u1', 'fortran_order': False, 'shape': {shape}, }}".encode()
    header = header.ljust(117) + b"\n"
    size = struct.pack("<H" if version == b"\x01\x00" else "<I", len(header))
    return b"\x93NUMPY" + version + size + header + data


GOOD = {"freq": np.ones((1, 1, 2), np.float32), "samples": np.ones(1)}


@pytest.mark.parametrize(
    ("write", "said"),
    [
        (_savez(ids=np.zeros(3)), r"no array topk_ids .*it has ids"),
        (_savez(), r"it has nothing"),
        (_savez(topk_ids=np.zeros((3, 2), int)), r"\[tokens, layers, top_k\], got int64 \[3, 2\]"),
        (_savez(topk_ids=np.zeros((3, 2, 1))), r"must be integers .* got float64"),
        (_savez(topk_ids=np.zeros((0, 2, 1), int)), r"cut off or empty"),
        (_savez(topk_ids=np.array([[[0], [-1]]])), r"topk_ids\[0, 1, 0\]: .*got -1; leave out"),
        (_savez(topk_ids=np.array([[[0], [99999]]])), r"\[0, 1, 0\]: .*\[0, 16384\), got 99999"),
        (_savez(topk_ids=np.zeros((1, 2000, 1), int)), r"2000 layers; 1 to 1024"),
        (_savez(topk_ids=np.zeros((1, 1, 2000), int)), r"top-2000, at most 1024"),
        (_savez(topk_ids=np.zeros((2, 1, 1), int), phase=np.zeros(3, int)), r"phase: must be .*2"),
        (_savez(topk_ids=np.zeros((2, 1, 1), int), phase=np.array([0, 7])), r"phases .*got 0..7"),
        (_savez(logical_count=np.zeros((2, 2))), r"\[steps, layers, experts\], got float64 \[2, 2"),
        (_savez(logical_count=np.zeros((1, 1, 2))), r"every count is 0; record some traffic"),
        (_savez(logical_count=np.array([[[1.0, np.nan]]])), r"count\[0, 0, 1\]: .*got nan"),
        (_savez(logical_count=np.array([[[1.0, np.inf]]])), r"got inf"),
        (_savez(logical_count=np.array([[[1, -2]]])), r"got -2"),
        (_savez(logical_count=np.array([[[1, 2**63 - 1]]])), r"\[0, 1125899906842624\], got 922"),
        (_savez(logical_count=np.full((6, 1, 2048), 2**50)), r"add up to 1.38e\+19 pairs, at most"),
        (_savez(logical_count=np.array([[["a"]]])), r"must be numbers, got <U1"),
        (_savez(logical_count=np.zeros((1, 1, 20000))), r"20000 experts; 1 to 16384"),
        (_savez(freq=np.ones((1, 1, 2))), r"freq needs samples, numbers \[1\]"),
        (_savez(**GOOD, tokens_per_sample=np.ones(2)), r"freq needs tokens_per_sample"),
        (
            _savez(**{**GOOD, "freq": np.ones(1)}, tokens_per_sample=np.ones(1)),
            r"must be fractions",
        ),
        (_savez(topk_ids=np.array([[[{}]]], dtype=object)), r"pickled objects, which are never"),
        (_raw(_npy((5, 5, 5), b"\0" * 9)), r"shape \[5, 5, 5\] of uint8 takes 253 bytes.*cut off"),
        (_raw(_npy((1 << 40, 1 << 20, 9))), r"cut off or empty"),
        (_raw(_npy((1, 1, 1), b"\0", b"\x03\x00")), r"array format \(3, 0\)"),
        (_raw(b"no array"), r"damaged or not what its name says"),
        (_raw(b""), r"damaged or not what its name says"),
    ],
)
def test_a_bad_npz_gives_one_clear_error(tmp_path: Path, write: Write, said: str) -> None:
    file = tmp_path / "bad.npz"
    write(file)
    assert re.search(said, _refused(file)), _refused(file)


def test_array_format_2_is_read(tmp_path: Path) -> None:
    file = tmp_path / "two.npz"
    _raw(_npy((1, 1, 2), b"\0\1", b"\x02\x00"))(file)
    assert read_trace(file).num_experts == 2


@pytest.mark.parametrize("share", [0.2, 0.5, 0.9, 0.99])
def test_a_truncated_npz_gives_one_clear_error(tmp_path: Path, share: float) -> None:
    file = tmp_path / "cut.npz"
    np.savez_compressed(file, topk_ids=np.arange(600, dtype=np.uint8).reshape(100, 3, 2))
    data = file.read_bytes()
    file.write_bytes(data[: int(len(data) * share)])
    assert "copy or record it again" in _refused(file)


def test_a_damaged_byte_is_noticed(tmp_path: Path) -> None:
    file = tmp_path / "flipped.npz"
    np.savez(file, topk_ids=np.zeros((100, 3, 2), np.uint8))
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(bytes(data))
    assert "Bad CRC-32" in _refused(file)


def test_sizes_are_looked_at_before_anything_is_unpacked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "bomb.npz"
    np.savez_compressed(file, topk_ids=np.zeros((4000, 100, 10), np.uint8))
    assert file.stat().st_size < 50_000
    monkeypatch.setattr(arrays_module, "FILE_BYTES_MAX", 1_000_000)

    def unpacked(*_: object, **__: object) -> None:
        raise AssertionError("was unpacked")

    monkeypatch.setattr(np.lib.format, "read_array", unpacked)
    assert "unpacks to 4000128 bytes" in _refused(file, ResourceExhausted)


def test_a_large_file_is_refused_before_it_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "large.npz"
    np.savez(file, topk_ids=np.zeros((4, 1, 1), np.uint8))
    monkeypatch.setattr(trace, "FILE_BYTES_MAX", 100)
    assert "at most 100 are read; cut the recording" in _refused(file, ResourceExhausted)


def test_too_many_counts_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "many.npz"
    np.savez(file, logical_count=np.ones((5, 2, 2)))
    monkeypatch.setattr(counts_module, "CELLS_MAX", 19)
    assert "5 steps x 2 layers x 2 experts are more than 19" in _refused(file, ResourceExhausted)


# -- SGLang --------------------------------------------------------------------------------------


def _stat(file: Path, counts: Any, **more: object) -> Path:
    """As the recorder writes in mode `stat`."""
    torch.save(
        {
            "rank": 0,
            "logical_count": torch.tensor(counts, dtype=torch.int32),
            "average_utilization_rate_over_window": None,
            **more,
        },
        file,
    )
    return file


def _pass(number: int, rank: int, physical: Any, **more: object) -> dict[str, object]:
    return {
        "forward_pass_id": number,
        "rank": rank,
        "gatherer_key": "primary",
        "global_physical_count": torch.tensor(physical, dtype=torch.int32),
        **more,
    }


def _detail(file: Path, records: list[Any], mapping: Any) -> Path:
    """As the recorder writes in modes `per_pass` and `per_token`: a file a rank."""
    torch.save(
        {
            "records": records,
            "last_physical_to_logical_map": torch.tensor(mapping, dtype=torch.int64),
        },
        file,
    )
    return file


def test_a_stat_dump_of_sglang(tmp_path: Path) -> None:
    file = tmp_path / "expert_distribution_recorder_1.5.pt"
    found = _counts(_stat(file, [[[1, 2], [3, 4]], [[5, 6], [7, 8]], [[0, 0], [0, 0]]]))
    assert found.counts.tolist() == [[[1, 2], [3, 4]], [[5, 6], [7, 8]]]


def test_a_stat_dump_of_one_sum(tmp_path: Path) -> None:
    assert _counts(_stat(tmp_path / "sum.pt", [[1, 2], [3, 4]])).counts.shape == (1, 2, 2)


def test_stat_dumps_of_a_folder_follow_each_other(tmp_path: Path) -> None:
    _stat(tmp_path / "expert_distribution_recorder_2.pt", [[[3, 4]]])
    _stat(tmp_path / "expert_distribution_recorder_1.pt", [[[1, 2]]])
    assert _counts(tmp_path).counts.tolist() == [[[1, 2]], [[3, 4]]]
    _stat(tmp_path / "expert_distribution_recorder_3.pt", [[[1, 2, 3]]])
    with pytest.raises(
        InvalidArgument,
        match=r"recorder_3\.pt: logical_count: counts \[1, 3\].*one model at a time",
    ):
        read_trace(tmp_path)


def test_forward_passes_are_summed_over_ranks(tmp_path: Path) -> None:
    mapping = [[0, 1, 2, 0], [2, 1, 0, 1]]
    _detail(
        tmp_path / "a_0.pt",
        [
            _pass(7, 0, [[1, 2, 3, 4], [5, 6, 7, 8]], input_ids=[1, 2], misc_objects=[]),
            _pass(8, 0, [[1, 0, 0, 0], [0, 0, 0, 1]]),
        ],
        mapping,
    )
    _detail(tmp_path / "a_1.pt", [_pass(7, 1, [[10, 0, 0, 0], [0, 0, 0, 10]])], mapping)
    found = _counts(tmp_path)
    assert found.counts.tolist() == [[[15, 2, 3], [7, 24, 5]], [[1, 0, 0], [0, 1, 0]]]
    assert "2 ranks" in found.notes[0]


def test_a_dump_is_loaded_on_a_machine_without_its_device_and_in_half_precision(
    tmp_path: Path,
) -> None:
    file = tmp_path / "half.pt"
    torch.save({"logical_count": torch.ones(1, 1, 2, dtype=torch.bfloat16)}, file)
    assert _counts(file).counts.tolist() == [[[1, 1]]]


class _Runs:
    """An object whose pickle runs something."""

    def __reduce__(self) -> tuple[Any, ...]:
        return print, ("was run",)


def _saved(value: object, **how: Any) -> Write:
    def write(file: Path) -> None:
        torch.save(value, file, **how)

    return write


def _compressed(file: Path) -> None:
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("dump/data.pkl", b"\0" * 1000)


ONE = torch.ones(1, 1, 2, dtype=torch.int32)
MAP = torch.tensor([[0, 1]])
RECORDS = {"records": [_pass(1, 0, [[1, 2]])], "last_physical_to_logical_map": MAP}


@pytest.mark.parametrize(
    ("write", "said"),
    [
        (_saved({"logical_count": _Runs()}), r"more than tensors and plain values, which is never"),
        (_saved(ONE), r"holds Tensor, want a dict"),
        (_saved({"other": ONE}), r"must all hold logical_count, or all hold records .*got other"),
        (_saved({}), r"got nothing"),
        (_saved({"logical_count": [1, 2]}), r"logical_count: must be counts of shape .*got \[2\]"),
        (_saved({"logical_count": torch.ones(2).to_sparse()}), r"is not an array"),
        (_saved({"logical_count": torch.ones(2, device="meta")}), r"is not an array"),
        (_saved({"logical_count": torch.ones(2)}), r"\[passes, layers, experts\], got \[2\]"),
        (_saved({"logical_count": torch.tensor([[[-1.0]]])}), r"got -1.0"),
        (_saved({"logical_count": torch.zeros(0, 1, 1)}), r"no step is recorded"),
        (_saved({"logical_count": ONE.bool()}), r"must be numbers, got bool"),
        (_saved({"records": []}), r"records need last_physical_to_logical_map"),
        (_saved({**RECORDS, "records": {}}), r"records: must be a list"),
        (_saved({**RECORDS, "records": []}), r"hold no record; record at least one"),
        (_saved({**RECORDS, "records": [3]}), r"records\[0\]: must be a mapping"),
        (_saved({**RECORDS, "records": [{}]}), r"records\[0\].forward_pass_id: must hold integers"),
        (
            _saved({**RECORDS, "records": [{"forward_pass_id": 1}]}),
            r"count: must be counts of shape",
        ),
        (_saved({**RECORDS, "records": [_pass(1, 0, [1, 2])]}), r"must be counts .*got \[2\]"),
        (_saved({**RECORDS, "records": [_pass(1, 0, [[1, 2, 3]])]}), r"\(1, 3\), its map \(1, 2\)"),
        (_saved({**RECORDS, "last_physical_to_logical_map": -MAP}), r"without a gap, got -1 to 0"),
        (_saved({"logical_count": ONE}, _use_new_zipfile_serialization=False), r"is a pickle"),
        (_compressed, r"is compressed, which torch.save never does"),
    ],
)
def test_a_bad_dump_gives_one_clear_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], write: Write, said: str
) -> None:
    file = tmp_path / "bad.pt"
    write(file)
    with pytest.raises(InvalidArgument) as caught:
        is_journal(file) or read_trace(file)
    assert str(file) in caught.value.message
    assert re.search(said, caught.value.message), caught.value.message
    assert capsys.readouterr().out == ""


def test_a_truncated_dump_gives_one_clear_error(tmp_path: Path) -> None:
    file = _stat(tmp_path / "cut.pt", np.ones((20, 3, 40)).tolist())
    data = file.read_bytes()
    file.write_bytes(data[: len(data) // 2])
    assert "copy or record it again" in _refused(file)


def test_a_tensor_that_is_larger_than_its_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "view.pt"
    torch.save({"logical_count": torch.ones(1).expand(1 << 20, 1 << 10, 1)}, file)
    assert file.stat().st_size < 10_000
    assert "is more than 134217728 numbers" in _refused(file, ResourceExhausted)


@pytest.mark.parametrize("form", ["stat", "records"])
def test_the_command_line_and_the_library_read_the_same_of_sglang(
    tmp_path: Path, form: str
) -> None:
    rng, files = np.random.default_rng(7), []
    for rank in range(3):
        files.append(tmp_path / f"expert_distribution_recorder_{rank}.pt")
        if form == "stat":
            _stat(files[-1], rng.integers(0, 9, (4, 2, 5)).tolist())
        else:
            records = [_pass(n, rank, rng.integers(0, 9, (2, 7))) for n in (9, 4, 6)]
            _detail(files[-1], records, [[0, 1, 2, 3, 4, 0, 1], [4, 3, 2, 1, 0, 4, 4]])
    loaded = [torch.load(file, weights_only=True) for file in files]
    assert np.array_equal(_counts(tmp_path).counts, logical_counts(loaded))


def test_a_load_window_larger_than_its_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "window.pt"
    many = torch.ones(1).expand(1 << 20, 1 << 10, 1)
    torch.save({"expert_load_window": many, "physical_to_logical_map": MAP}, file)
    assert "is more than 134217728 numbers" in _refused(file, ResourceExhausted)


def test_dumps_of_different_kinds_are_not_mixed(tmp_path: Path) -> None:
    _stat(tmp_path / "a.pt", [[[1, 2]]])
    _detail(tmp_path / "b.pt", [_pass(1, 0, [[1, 2]])], [[0, 1]])
    with pytest.raises(InvalidArgument, match="one mode of SGLang's recorder at a time"):
        read_trace(tmp_path)


@pytest.mark.parametrize("passes", [(1, 1), (1, 2)], ids=["the same", "another"])
def test_ranks_of_different_models_are_not_mixed(tmp_path: Path, passes: tuple[int, int]) -> None:
    _detail(tmp_path / "a.pt", [_pass(passes[0], 0, [[1, 2]])], [[0, 1]])
    _detail(tmp_path / "b.pt", [_pass(passes[1], 1, [[1, 2, 3]])], [[0, 1, 2]])
    with pytest.raises(InvalidArgument, match="model"):
        read_trace(tmp_path)


def test_an_endless_folder_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _stat(tmp_path / "a.pt", [[[1, 2]]])
    _stat(tmp_path / "b.pt", [[[1, 2]]])
    monkeypatch.setattr("moe_serve.cli.recordings.dumps.DUMPS_MAX", 1)
    with pytest.raises(ResourceExhausted, match="holds 2 dumps, at most 1"):
        read_trace(tmp_path)


# -- vLLM ----------------------------------------------------------------------------------------


def _line(load: Any, mapping: Any, **more: object) -> str:
    """As vLLM writes to expert_load_stats_path."""
    return json.dumps(
        {
            "record_type": "eplb_load_stats",
            "version": 1,
            "step": 7,
            "num_ranks": 2,
            "expert_load": load,
            "p2l_map": mapping,
            **more,
        }
    )


def test_logged_counts_of_vllm(tmp_path: Path) -> None:
    file = tmp_path / "stats.jsonl"
    mapping = [[0, 1, 2, 0], [0, 1, 2, 1]]
    lines = [
        json.dumps({"record_type": "session_metadata", "argv": []}),
        _line([[10, 1, 5, 2], [2, 8, 1, 3]], mapping),
        "",
        # Moved in between; expert 2 of layer 0 has no replica yet is counted for no layer.
        _line([[1, 1, 1, 1], [1, 1, 1, 1]], [[0, 0, 1, 1], [0, 1, 0, 1]]),
    ]
    file.write_text("\n".join(lines), encoding="utf-8")
    found = _counts(file)
    assert found.counts.tolist() == [[[12, 1, 5], [2, 11, 1]], [[2, 2, 0], [2, 2, 0]]]
    assert found.notes == ("1 lines of other kinds passed over",)


@pytest.mark.parametrize("form", ["npz", "pt"])
def test_a_load_window_of_vllm(tmp_path: Path, form: str) -> None:
    window = np.array([[[5, 5, 1]], [[1, 2, 3]], [[4, 0, 0]]], dtype=np.int32)
    mapping = np.array([[0, 1, 0]])
    file = tmp_path / f"window.{form}"
    for step, want in ((None, [[6, 5], [4, 2], [4, 0]]), (1, [[4, 2], [4, 0], [6, 5]])):
        values: dict[str, Any] = {"expert_load_window": window, "physical_to_logical_map": mapping}
        if step is not None:
            values["expert_load_window_step"] = step
        if form == "npz":
            np.savez(file, **values)
        else:
            torch.save(
                {k: torch.tensor(v) if isinstance(v, np.ndarray) else v for k, v in values.items()},
                file,
            )
        assert _counts(file).counts[:, 0].tolist() == want


@pytest.mark.parametrize(
    ("arrays", "said"),
    [
        ({}, r"needs physical_to_logical_map"),
        ({"physical_to_logical_map": np.zeros((1, 3), int)}, r"= \[1, 2\], got int64 \[1, 3\]"),
        ({"physical_to_logical_map": np.array([[0, 20000]])}, r"20001 experts"),
        (
            {"physical_to_logical_map": np.array([[0, 1]]), "expert_load_window_step": np.array(9)},
            r"one integer in \[0, 1\]",
        ),
        (
            {"expert_load_window": np.ones(3), "physical_to_logical_map": np.array([[0, 1]])},
            r"\[steps, layers, physical\], got float64 \[3\]",
        ),
    ],
)
def test_a_bad_load_window_gives_one_clear_error(
    tmp_path: Path, arrays: dict[str, Any], said: str
) -> None:
    file = tmp_path / "bad.npz"
    np.savez(file, **{"expert_load_window": np.ones((1, 1, 2), int), **arrays})
    assert re.search(said, _refused(file)), _refused(file)


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ("{}\n", r"no line with .*expert_load_stats_path"),
        ('{"record_type": ', r"line 1: .*truncated"),
        ("{}\n[1]", r"line 2: Expected `object`"),
        ('{"record_type": "eplb_load_stats"}', r"missing required field `expert_load`"),
        (_line([[1, "2"]], [[0, 1]]), r"line 1: .*\$.expert_load\[0\]\[1\]"),
        (_line([[1, 2]], [[0, 1]], version=2), r"line 1: version 2, this reads 1"),
        (_line([[1, 2], [1]], [[0, 1]]), r"all layers alike, got 2 rows of \[1, 2\] numbers"),
        (_line([], []), r"got 0 rows of \[\] numbers"),
        (_line([[1, 2**70]], [[0, 1]]), r"line 1"),
        (_line([[1, -2]], [[0, 1]]), r"expert_load\[0, 1\]: .*got -2"),
        (_line([[1, 2]], [[0, -1]]), r"p2l_map\[0, 1\]: experts must be >= 0"),
        (_line([[1, 2]], [[0]]), r"p2l_map: the map must be integers"),
        (_line([[1]], [[0]]) + "\n" + _line([[1], [1]], [[0], [0]]), r"steps of \[1, 2\] layers"),
    ],
)
def test_bad_lines_give_one_clear_error(tmp_path: Path, lines: str, said: str) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text(lines, encoding="utf-8")
    assert re.search(said, _refused(file)), _refused(file)


def test_a_log_has_its_limits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "long.jsonl"
    file.write_text(f"{_line([[1, 2]], [[0, 1]])}\n" * 3, encoding="utf-8")
    monkeypatch.setattr(stats_lines, "CELLS_MAX", 4)
    assert "line 3: more than 4 counts" in _refused(file, ResourceExhausted)
    monkeypatch.setattr(stats_lines, "LINE_BYTES_MAX", 50)
    assert "line 1: longer than 50 bytes" in _refused(file, ResourceExhausted)


# -- kinds ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("data", [b"", b"text", b"\x93NUMPY\x01\x00", b"[1]"])
def test_what_is_no_recording_is_said_so(tmp_path: Path, data: bytes) -> None:
    file = tmp_path / "other"
    file.write_bytes(data)
    with pytest.raises(InvalidArgument, match=r"neither a journal .* nor a trace"):
        is_journal(file)


def test_paths_that_are_not_there(tmp_path: Path) -> None:
    for path in (tmp_path / "absent", tmp_path):
        with pytest.raises(InvalidArgument, match="cannot be read: No such file"):
            is_journal(path)
    assert "cannot be read" in _refused(tmp_path / "absent.npz")


@pytest.mark.parametrize("name", ["ids.npz", "stat.pt", "detail.pt", "stats.jsonl"])
def test_damage_anywhere_is_a_typed_error_or_none(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    if name == "ids.npz":
        np.savez(file, topk_ids=np.zeros((4, 2, 1), np.uint8), phase=np.zeros(4, int))
    elif name == "stat.pt":
        _stat(file, [[[1, 2]]])
    elif name == "detail.pt":
        _detail(file, [_pass(1, 0, [[1, 2]])], [[0, 1]])
    else:
        file.write_text(_line([[1, 2]], [[0, 1]]), encoding="utf-8")
    whole, rng, said = file.read_bytes(), np.random.default_rng(5), []
    for _ in range(60):
        data = bytearray(whole)
        for at in rng.integers(0, len(data), size=rng.integers(1, 4)):
            data[at] = rng.integers(0, 256)
        file.write_bytes(bytes(data))
        try:
            is_journal(file) or read_trace(file)
        except MoeServeError as error:
            said.append(error.message)
    assert len(said) > 5
    assert all(str(file) in message for message in said)


def test_the_packaged_trace_tells_prefill_from_decode() -> None:
    found = read_trace(ROOT / "moe_serve" / "demo" / "traces" / "tiny_moe_requests.npz")
    assert isinstance(found, TokenTrace)
    assert (found.ids.shape[1:], found.num_experts) == ((4, 4), 32)
    assert found.phase is not None
    assert set(np.unique(found.phase).tolist()) == {0, 1}


@pytest.mark.skipif(not DATA, reason="MOE_SERVE_DATA names no folder of traces of real models")
@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("deepseek_v2_lite_prefill", (26, 64)),
        ("gpt_oss_20b_decode", (24, 32)),
        ("gpt_oss_20b_category_load", (24, 32)),
        ("tiny_moe_requests", (4, 32)),
    ],
)
def test_traces_of_real_models(name: str, sizes: tuple[int, int]) -> None:
    found = read_trace(Path(DATA) / "expert_traces" / f"{name}.npz")
    assert (found.num_layers, found.num_experts) == sizes


@pytest.mark.parametrize("name", ["x.npz", "x.jsonl", "inputs.db", "dumps/a.pt"])
@pytest.mark.parametrize("kind", ["pipe", "device"])
def test_what_may_never_end_is_not_opened(tmp_path: Path, name: str, kind: str) -> None:
    file = tmp_path / name
    file.parent.mkdir(exist_ok=True)
    if kind == "pipe":
        os.mkfifo(file)
    else:
        file.symlink_to("/dev/zero")
    source = file.parent if name.startswith("dumps") else file
    with pytest.raises(InvalidArgument, match="no regular file"):
        is_journal(source) or read_trace(source)


@pytest.mark.filterwarnings("error")
def test_shares_that_no_float_holds_are_refused_without_a_warning(tmp_path: Path) -> None:
    file = tmp_path / "shares.npz"
    huge = np.full(2, 1e300)
    np.savez(file, freq=np.ones((2, 1, 4)), samples=huge, tokens_per_sample=huge)
    assert "got inf" in _refused(file)
