"""Dumps written with `torch.save`: SGLang's expert distribution recorder, and vLLM's load window.

Responsible for loading tensors and nothing else from them: `weights_only=True`, never a pickle of
objects, offline. Called by `kinds`.

| recorder mode | keys | here |
|---|---|---|
| `stat`, `stat_approx` | `logical_count` [steps, layers, experts], summed over ranks | its steps |
| `per_pass`, `per_token` | `records` of one rank: `forward_pass_id`, `global_physical_count`
  [layers, physical]; `last_physical_to_logical_map` | summed over the files of a folder by forward
  pass |
| (vLLM) | `expert_load_window`, `physical_to_logical_map` | its steps |

A `stat` buffer of fixed size is a ring without a mark: once it has gone round, its order is not
that of time. Record with a buffer of unlimited size (-1) to replay.
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from moe_serve.cli.recordings.trace import (
    CELLS_MAX,
    FILE_BYTES_MAX,
    CountTrace,
    IntArray,
    check_file,
    check_sizes,
    count_trace,
    reading,
    to_logical,
    whole_counts,
)
from moe_serve.cli.recordings.vllm_window import window_trace
from moe_serve.errors import InvalidArgument, ResourceExhausted

FILES_MAX = 4096
"""Files of a folder: one a rank."""
RECORDS_MAX = 1 << 20

Counts = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Pack:
    """A loaded file."""

    file: Path
    values: Mapping[str, Any]


def read_dumps(files: Sequence[Path]) -> CountTrace:
    """Steps of one dump, or of the dumps of all ranks. Raises InvalidArgument, ResourceExhausted.

    `stat` dumps follow each other in the order of their names, which begin with the time.
    """
    if len(files) > FILES_MAX:
        raise ResourceExhausted(
            f"{files[0].parent} holds {len(files)} dumps, at most {FILES_MAX} are read"
        )
    packs = [_load(file) for file in sorted(files)]
    first = packs[0]
    if all("logical_count" in pack.values for pack in packs):
        parts = [_stat(pack) for pack in packs]
        return count_trace(str(first.file), _joined(packs, parts))
    if all("records" in pack.values for pack in packs):
        return _detail(packs)
    if len(packs) == 1 and "expert_load_window" in first.values:
        wanted = ("expert_load_window", "expert_load_window_step", "physical_to_logical_map")
        arrays = {
            name: _array(f"{first.file}: {name}", first.values[name])
            for name in wanted
            if name in first.values
        }
        return window_trace(first.file, arrays)
    named = sorted({str(key)[:40] for pack in packs for key in pack.values})
    raise InvalidArgument(
        f"{first.file} is no dump of SGLang's recorder (logical_count, or records), nor a load "
        f"window of vLLM; it has {', '.join(named[:12]) or 'nothing'}. Dumps of different modes "
        "are replayed one by one"
    )


def _load(file: Path) -> _Pack:
    with reading(file):
        check_file(file)
        _check_archive(file)
        import torch

        try:
            found = torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:
            raise InvalidArgument(
                f"{file} is damaged, or holds more than tensors and plain values, which is never "
                f"loaded ({_first_line(error)}); dump it again with the serving engine's recorder"
            ) from error
    if not isinstance(found, dict):
        raise InvalidArgument(f"{file} holds {type(found).__name__}, want a dict of tensors")
    return _Pack(file, found)


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__


def _check_archive(file: Path) -> None:
    """Members lie uncompressed, as torch writes them, so that none is larger than the file."""
    with zipfile.ZipFile(file) as archive:
        members = archive.infolist()
    for info in members:
        if info.compress_type != zipfile.ZIP_STORED or info.file_size > FILE_BYTES_MAX:
            raise InvalidArgument(
                f"{file}: {info.filename[:80]} is compressed, which torch.save never does; dump it "
                "again"
            )


def _array(where: str, value: object) -> npt.NDArray[Any]:
    """A tensor, or a plain number, as an array. Raises InvalidArgument, ResourceExhausted."""
    import torch

    if isinstance(value, int | float):
        return np.asarray(value)
    if not isinstance(value, torch.Tensor) or value.layout != torch.strided or value.is_meta:
        raise InvalidArgument(f"{where} must be a dense tensor, got {type(value).__name__}")
    if value.numel() > CELLS_MAX:
        # A stored tensor may repeat one number along an axis: its shape says nothing of the file.
        raise ResourceExhausted(f"{where}: {list(value.shape)} is more than {CELLS_MAX} numbers")
    if value.dtype in (torch.bfloat16, torch.float16):
        value = value.float()
    array: npt.NDArray[Any] = value.detach().numpy()
    return array


def _stat(pack: _Pack) -> Counts:
    where = f"{pack.file}: logical_count"
    array = _array(where, pack.values["logical_count"])
    if array.ndim == 2:  # one sum of all steps
        array = array[None]
    if array.ndim != 3:
        raise InvalidArgument(f"{where} must be [steps, layers, experts], got {list(array.shape)}")
    steps, layers, experts = array.shape
    check_sizes(where, layers=layers, experts=experts, steps=steps)
    return whole_counts(where, array)


def _joined(packs: Sequence[_Pack], parts: Sequence[Counts]) -> Counts:
    for pack, part in zip(packs, parts, strict=True):
        if part.shape[1:] != parts[0].shape[1:]:
            raise InvalidArgument(
                f"{pack.file} counts {list(part.shape[1:])} layers and experts, "
                f"{packs[0].file.name} {list(parts[0].shape[1:])}; keep one model a folder"
            )
    steps = sum(len(part) for part in parts)
    check_sizes(
        str(packs[0].file.parent),
        layers=parts[0].shape[1],
        experts=parts[0].shape[2],
        steps=steps,
    )
    return np.concatenate(parts)


def _detail(packs: Sequence[_Pack]) -> CountTrace:
    """Forward passes in order of their number, each the sum over ranks."""
    passes: dict[int, Counts] = {}
    cells = 0
    for pack in packs:
        mapping = _map(pack)
        records = pack.values["records"]
        if not isinstance(records, list) or len(records) > RECORDS_MAX:
            raise InvalidArgument(f"{pack.file}: records must be a list of at most {RECORDS_MAX}")
        for number, record in enumerate(records):
            step, counts = _record(f"{pack.file}: records[{number}]", record, mapping)
            if step in passes and passes[step].shape != counts.shape:
                raise InvalidArgument(
                    f"{pack.file}: records[{number}] counts {list(counts.shape)} layers and "
                    f"experts, another rank {list(passes[step].shape)}; keep one model a folder"
                )
            cells += counts.size if step not in passes else 0
            if cells > CELLS_MAX:
                raise ResourceExhausted(f"{pack.file}: more than {CELLS_MAX} counts; record less")
            passes[step] = passes[step] + counts if step in passes else counts
    where = str(packs[0].file)
    if not passes:
        raise InvalidArgument(f"{where}: no forward pass is recorded; record some traffic first")
    if len({counts.shape for counts in passes.values()}) > 1:
        raise InvalidArgument(f"{where}: forward passes of different models; keep one a folder")
    note = f"{len(packs)} ranks, placed by the last map of each: it may have changed while recorded"
    return count_trace(where, np.stack([passes[step] for step in sorted(passes)]), (note,))


def _map(pack: _Pack) -> IntArray:
    name = "last_physical_to_logical_map"
    if name not in pack.values:
        raise InvalidArgument(f"{pack.file}: records need {name} [layers, physical] beside them")
    return _array(f"{pack.file}: {name}", pack.values[name])


def _record(where: str, record: object, mapping: IntArray) -> tuple[int, Counts]:
    if not isinstance(record, dict) or not isinstance(record.get("forward_pass_id"), int):
        raise InvalidArgument(f"{where} must be a dict with a whole forward_pass_id")
    where = f"{where}.global_physical_count"
    array = _array(where, record.get("global_physical_count"))
    if array.ndim != 2:
        raise InvalidArgument(f"{where} must be [layers, physical], got {list(array.shape)}")
    check_sizes(where, layers=array.shape[0], experts=array.shape[1])
    counts = whole_counts(where, array)
    return int(record["forward_pass_id"]), to_logical(where, counts[None], mapping)[0]
