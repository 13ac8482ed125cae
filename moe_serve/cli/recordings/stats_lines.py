"""Counts that vLLM logged: JSON lines, one a step, of what each physical expert was given.

Responsible for lines with `"record_type": "eplb_load_stats"`; others are passed over. Called by
`kinds`. A line's fields: `expert_load` [layers][physical], `p2l_map` [layers][physical], `version`
1. (vLLM as released logs balancedness only, which names no expert; these lines are what its
`expert_load_stats_path` writes where a build has it.)
"""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from moe_serve.cli.recordings.trace import CountTrace, count_trace
from moe_serve.errors import InvalidArgument, ResourceExhausted
from placement.adapters.counts import CELLS_MAX, check_sizes, to_logical, whole_counts

RECORD = "eplb_load_stats"
VERSION = 1
LINE_BYTES_MAX = 64 << 20
"""A line of 1,024 layers x 4,096 physical experts stays far below."""


class _Kind(msgspec.Struct):
    record_type: str = ""


class _Line(msgspec.Struct):
    expert_load: list[list[int]]
    p2l_map: list[list[int]]
    version: int = VERSION


def read_lines(file: Path) -> CountTrace:
    """Steps of a log, oldest first. Raises InvalidArgument, ResourceExhausted, EplbError."""
    steps: list[npt.NDArray[np.int64]] = []
    cells = others = number = 0
    with file.open("rb") as stream:
        while line := stream.readline(LINE_BYTES_MAX + 1):
            number += 1
            where = f"{file}, line {number}"
            if len(line) > LINE_BYTES_MAX:
                raise ResourceExhausted(
                    f"{where}: longer than {LINE_BYTES_MAX} bytes; is it one object a line?"
                )
            if not line.strip():
                continue
            counts = _step(where, line)
            if counts is None:
                others += 1
                continue
            cells += counts.size
            if cells > CELLS_MAX:
                raise ResourceExhausted(f"{where}: more than {CELLS_MAX} counts; cut the recording")
            steps.append(counts)
    if not steps:
        raise InvalidArgument(
            f'{file} has no line with "record_type": "{RECORD}"; set expert_load_stats_path of '
            "vLLM's EPLB settings and record some traffic"
        )
    notes = (f"{others} lines of other kinds passed over",) if others else ()
    return count_trace(str(file), _stacked(file, steps), notes)


def _step(where: str, line: bytes) -> npt.NDArray[np.int64] | None:
    """Logical counts [layers, experts] of one line; None for lines of another kind."""
    try:
        if msgspec.json.decode(line, type=_Kind).record_type != RECORD:
            return None
        found = msgspec.json.decode(line, type=_Line)
    except msgspec.DecodeError as error:
        raise InvalidArgument(f"{where}: {error}; record it again") from error
    if found.version != VERSION:
        raise InvalidArgument(f"{where}: version {found.version}, this reads {VERSION}")
    load = _matrix(f"{where}: expert_load", found.expert_load)
    mapping = _matrix(f"{where}: p2l_map", found.p2l_map)
    check_sizes(where, layers=load.shape[0], experts=load.shape[1])
    counts = whole_counts(f"{where}: expert_load", load)
    step: npt.NDArray[np.int64] = to_logical(f"{where}: p2l_map", counts[None], mapping)[0]
    return step


def _matrix(where: str, rows: list[list[int]]) -> npt.NDArray[np.int64]:
    widths = sorted({len(row) for row in rows})
    if len(widths) != 1 or widths[0] == 0:
        raise InvalidArgument(
            f"{where} must be [layers][physical], all layers alike, got {len(rows)} rows of "
            f"{widths} numbers"
        )
    try:
        return np.array(rows, dtype=np.int64)
    except OverflowError as error:
        raise InvalidArgument(f"{where}: a number does not fit into 64 bits") from error


def _stacked(file: Path, steps: list[npt.NDArray[np.int64]]) -> npt.NDArray[np.int64]:
    """Steps of one model; a step whose last experts have no replica is filled up with zeros."""
    layers = {len(step) for step in steps}
    if len(layers) != 1:
        raise InvalidArgument(
            f"{file} mixes steps of {sorted(layers)} layers; split it by model and replay each"
        )
    experts = max(step.shape[1] for step in steps)
    check_sizes(str(file), layers=layers.pop(), experts=experts, steps=len(steps))
    return np.stack([np.pad(step, ((0, 0), (0, experts - step.shape[1]))) for step in steps])
