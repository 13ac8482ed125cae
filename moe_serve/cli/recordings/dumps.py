"""Dumps written with `torch.save`: SGLang's expert distribution recorder, and vLLM's load window.

Responsible for loading tensors and nothing else from them: `weights_only=True`, never a pickle of
objects, offline; and for naming the file where one is no recording. What SGLang's dumps mean is
said in `placement.adapters.sglang`. Called by `kinds`.

| recorder mode | keys | here |
|---|---|---|
| `stat`, `stat_approx` | `logical_count` | its steps |
| `per_pass`, `per_token` | `records`, `last_physical_to_logical_map` | summed over the files of a
  folder by forward pass |
| (vLLM) | `expert_load_window`, `physical_to_logical_map` | its steps |

A `stat` buffer of fixed size is a ring without a mark: once it has gone round, its order is not
that of time. Record with a buffer of unlimited size (-1) to replay.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moe_serve.cli.recordings.trace import (
    FILE_BYTES_MAX,
    CountTrace,
    check_file,
    count_trace,
    reading,
)
from moe_serve.cli.recordings.vllm_window import window_trace
from moe_serve.errors import InvalidArgument, ResourceExhausted
from placement.adapters.counts import check_cells
from placement.adapters.sglang import DUMPS_MAX, RECORDS, recorded_counts
from placement.eplb import EplbError
from placement.eplb.tensors import to_array

WINDOW_KEYS = ("expert_load_window", "expert_load_window_step", "physical_to_logical_map")
_NUMBERED = re.compile(r"^dumps\[(\d+)\]\.?")


def read_dumps(files: Sequence[Path]) -> CountTrace:
    """Steps of one dump, or of the dumps of all ranks. Raises InvalidArgument, ResourceExhausted,
    EplbError.

    `stat` dumps follow each other in the order of their names, which begin with the time.
    """
    if len(files) > DUMPS_MAX:
        raise ResourceExhausted(
            f"{files[0].parent} holds {len(files)} dumps, at most {DUMPS_MAX} are read"
        )
    files = sorted(files)
    dumps = [load_mapping(file) for file in files]
    if len(dumps) == 1 and WINDOW_KEYS[0] in dumps[0]:
        arrays = {}
        for name in WINDOW_KEYS:
            if name in dumps[0]:
                where = f"{files[0]}: {name}"
                check_cells(where, dumps[0][name])
                arrays[name] = to_array(where, dumps[0][name])
        return window_trace(files[0], arrays)
    try:
        counts = recorded_counts(dumps)
    except EplbError as error:
        raise _of_file(error, files) from error
    notes: tuple[str, ...] = ()
    if RECORDS in dumps[0]:
        notes = (
            f"{len(dumps)} ranks, placed by the last map of each: it may have changed while "
            "recorded",
        )
    return count_trace(str(files[0]), counts, notes)


def _of_file(error: EplbError, files: Sequence[Path]) -> EplbError:
    """The refusal with the file in place of its number."""
    found = _NUMBERED.match(error.argument)
    if found is None:
        where = files[0] if len(files) == 1 else files[0].parent
        return type(error)(str(where), error.problem, error.remedy)
    rest = error.argument[found.end() :]
    return type(error)(
        f"{files[int(found[1])]}: {rest}" if rest else str(files[int(found[1])]),
        error.problem,
        error.remedy,
    )


def load_mapping(file: Path) -> Mapping[str, Any]:
    """The mapping that `torch.save` put into a file: tensors and plain values, nothing else is ever
    loaded. Raises InvalidArgument, ResourceExhausted."""
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
    return found


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
