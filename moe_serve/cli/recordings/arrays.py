"""Traces in `.npz` files: expert ids by token, or counts by step.

Responsible for the names an array may have, and for looking at declared sizes before any byte is
unpacked. Never unpickles. Called by `kinds`.

| array | shape | is |
|---|---|---|
| `topk_ids`, with `phase` or without | [tokens, layers, k] | ids in request order |
| `logical_count` | [steps, layers, experts] | pairs by forward pass, as SGLang counts |
| `expert_load_window`, `physical_to_logical_map` | [steps, layers, physical], [layers, physical] |
  vLLM's load window |
| `freq`, `samples`, `tokens_per_sample` | [groups, layers, experts], [groups], [groups] | share of
  a group's tokens that use an expert |
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from moe_serve.cli.recordings.trace import (
    FILE_BYTES_MAX,
    TOP_K_MAX,
    CountTrace,
    TokenTrace,
    check_phase,
    count_trace,
)
from moe_serve.cli.recordings.vllm_window import window_trace
from moe_serve.errors import InvalidArgument, ResourceExhausted
from placement.adapters.counts import EXPERTS_MAX, check_sizes, whole_counts

AnyArray = npt.NDArray[Any]

WANTED = frozenset(
    {
        "topk_ids",
        "phase",
        "logical_count",
        "expert_load_window",
        "expert_load_window_step",
        "physical_to_logical_map",
        "freq",
        "samples",
        "tokens_per_sample",
    }
)
"""Arrays that are read; others in the file are passed over."""
SUFFIX = ".npy"
DEFLATE_RATIO_MAX = 1032
"""No byte of a deflated member makes more. What a directory of zip declares is not trusted: numpy
allocates by it before it reads."""


def read_arrays(file: Path) -> TokenTrace | CountTrace:
    """A trace of an npz file. Raises InvalidArgument, ResourceExhausted, EplbError; other faults as
    the libraries have them."""
    arrays, others = _load(file)
    if "topk_ids" in arrays:
        return _tokens(file, arrays)
    if "logical_count" in arrays:
        counts = _steps(f"{file}: logical_count", arrays["logical_count"])
        return count_trace(f"{file}: logical_count", counts)
    if "expert_load_window" in arrays:
        return window_trace(file, arrays)
    if "freq" in arrays:
        return _shares(file, arrays)
    named = ", ".join(sorted({*arrays, *others})) or "nothing"
    raise InvalidArgument(
        f"{file} has no array topk_ids [tokens, layers, k], logical_count [steps, layers, "
        f"experts], expert_load_window or freq (it has {named})"
    )


def _load(file: Path) -> tuple[dict[str, AnyArray], list[str]]:
    """The wanted arrays, and the names of the others."""
    found: dict[str, AnyArray] = {}
    others: list[str] = []
    with zipfile.ZipFile(file) as archive:
        total = 0
        for info in archive.infolist():
            name = info.filename.removesuffix(SUFFIX)
            if not info.filename.endswith(SUFFIX) or name not in WANTED:
                others.append(name)
                continue
            if info.file_size > DEFLATE_RATIO_MAX * info.compress_size:
                raise InvalidArgument(
                    f"{file}: {name} declares {info.file_size} bytes out of {info.compress_size}, "
                    "more than can be; copy or record it again"
                )
            total += info.file_size
            if total > FILE_BYTES_MAX:
                raise ResourceExhausted(
                    f"{file}: {name} unpacks to {info.file_size} bytes, all arrays to at most "
                    f"{FILE_BYTES_MAX}; cut the recording"
                )
            with archive.open(info) as stream:
                _check_header(f"{file}: {name}", stream, info.file_size)
            with archive.open(info) as stream:
                found[name] = np.lib.format.read_array(stream, allow_pickle=False)
    return found, others


def _check_header(where: str, stream: IO[bytes], size: int) -> None:
    """The shape an array declares is what its member has bytes for."""
    version = np.lib.format.read_magic(stream)
    if version == (1, 0):
        shape, _, dtype = np.lib.format.read_array_header_1_0(stream)
    elif version == (2, 0):
        shape, _, dtype = np.lib.format.read_array_header_2_0(stream)
    else:
        raise InvalidArgument(
            f"{where}: array format {version}, 1.0 and 2.0 are read; write it with numpy.savez"
        )
    if dtype.hasobject:
        raise InvalidArgument(
            f"{where} holds pickled objects, which are never loaded; write it as numbers"
        )
    cells = 1
    for length in shape:
        cells *= length
    declared = stream.tell() + cells * dtype.itemsize
    if declared != size or cells < 1:
        raise InvalidArgument(
            f"{where}: shape {list(shape)} of {dtype} takes {declared} bytes, the file has {size}; "
            "it is cut off or empty: copy or record it again"
        )


def _tokens(file: Path, arrays: Mapping[str, AnyArray]) -> TokenTrace:
    ids, where = arrays["topk_ids"], f"{file}: topk_ids"
    if ids.ndim != 3 or ids.dtype.kind not in "iu":
        raise InvalidArgument(
            f"{where} must be integers [tokens, layers, top_k], got {ids.dtype} {list(ids.shape)}"
        )
    lowest, greatest = int(ids.min()), int(ids.max())
    if lowest < 0 or greatest >= EXPERTS_MAX:
        at = np.unravel_index(int(ids.argmin() if lowest < 0 else ids.argmax()), ids.shape)
        raise InvalidArgument(
            f"{where}{[int(i) for i in at]}: experts must lie in [0, {EXPERTS_MAX}), got "
            f"{lowest if lowest < 0 else greatest}; leave out padding"
        )
    check_sizes(where, layers=ids.shape[1], experts=greatest + 1)
    if ids.shape[2] > TOP_K_MAX:
        raise InvalidArgument(f"{where}: top-{ids.shape[2]}, at most {TOP_K_MAX}; check the axes")
    phase = arrays.get("phase")
    if phase is not None:
        phase = check_phase(f"{file}: phase", phase, len(ids))
    return TokenTrace(ids, phase)


def _steps(where: str, array: AnyArray) -> npt.NDArray[np.int64]:
    if array.ndim != 3:
        raise InvalidArgument(
            f"{where} must be [steps, layers, experts], got {array.dtype} {list(array.shape)}"
        )
    check_sizes(where, layers=array.shape[1], experts=array.shape[2], steps=array.shape[0])
    return whole_counts(where, array)


def _shares(file: Path, arrays: Mapping[str, AnyArray]) -> CountTrace:
    """Groups as steps: share of a group's tokens x its tokens, rounded to whole pairs."""
    freq, where = arrays["freq"], f"{file}: freq"
    tokens: npt.NDArray[np.float64] = np.ones(1, dtype=np.float64)
    for name in ("samples", "tokens_per_sample"):
        factor = arrays.get(name)
        if factor is None or factor.shape != freq.shape[:1] or factor.dtype.kind not in "iuf":
            raise InvalidArgument(
                f"{file}: freq needs {name}, numbers [{freq.shape[0] if freq.ndim else 0}], one a "
                "group"
            )
        with np.errstate(over="ignore", invalid="ignore"):  # refused below
            tokens = tokens * factor.astype(np.float64)
    if freq.ndim != 3 or freq.dtype.kind != "f":
        raise InvalidArgument(
            f"{where} must be fractions [groups, layers, experts], got {freq.dtype} "
            f"{list(freq.shape)}"
        )
    with np.errstate(over="ignore", invalid="ignore"):
        pairs = freq.astype(np.float64) * tokens[:, None, None]
    return count_trace(where, _steps(where, pairs), ("shares x tokens, rounded to whole pairs",))
