"""Placements out of files.

Responsible for limits, for telling forms apart, and for naming the field of what does not fit the
service. Never unpickles. Called by the import command.
"""

from __future__ import annotations

import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import msgspec
import yaml

from moe_serve.cli.layouts.holding import Holding, LayoutFormat
from moe_serve.cli.recordings.dumps import load_mapping
from moe_serve.cli.recordings.trace import check_file, reading
from moe_serve.errors import InvalidArgument, ResourceExhausted
from placement.adapters import maps, own, sglang, trtllm, vllm
from placement.eplb import EplbError
from placement.eplb.tensors import IntArray, to_int

TEXT_BYTES_MAX: Final = 128 << 20
"""A file of text: a thousand layers of thousands of slots are less."""
YAML_BYTES_MAX: Final = 32 << 20
"""YAML is slow to read."""


@dataclass(frozen=True, slots=True)
class ReadLayout:
    """A placement of a file: keys by rank of the service, and what people should know."""

    form: LayoutFormat
    rows: tuple[tuple[int, ...], ...]
    notes: tuple[str, ...]


def read_layout(
    file: Path, form: LayoutFormat | None, held: Holding, layers: tuple[int, ...] | None
) -> ReadLayout:
    """What a file wants of this service.

    form: None = told by what the file holds. layers: as in `written`. Raises InvalidArgument and
    ResourceExhausted, naming the file, the field and the next step.
    """
    with reading(file):
        check_file(file)
        loaded, form = _loaded(file, form)
        try:
            if isinstance(loaded, own.OwnPlacement):
                return _own(loaded, held)
            return _map(loaded, form, held, layers)
        except EplbError as error:
            raise _of_file(file, error) from error


def _of_file(file: Path, error: EplbError) -> EplbError:
    """The same of that file; `the file` is what the adapters call it."""
    where = str(file) if error.argument == "the file" else f"{file}: {error.argument}"
    return type(error)(where, error.problem, error.remedy)


def _loaded(file: Path, form: LayoutFormat | None) -> tuple[Any, LayoutFormat]:
    if zipfile.is_zipfile(file):
        form = form or LayoutFormat.SGLANG
        if form not in (LayoutFormat.SGLANG, LayoutFormat.VLLM):
            raise InvalidArgument(f"{file} holds tensors, which are no {form.value} file")
        return load_mapping(file), form
    data = _text(file, TEXT_BYTES_MAX)
    begins = data.lstrip()[:1]
    if form is LayoutFormat.TRTLLM or (form is None and begins not in (b"{", b"[")):
        return _yaml(file, _text(file, YAML_BYTES_MAX)), LayoutFormat.TRTLLM
    try:
        plain = msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError) as error:
        raise InvalidArgument(f"{file} is no JSON ({error}); export it again") from error
    if form is None:
        form = _told_apart(plain)
    if form is LayoutFormat.OWN:
        try:
            return own.read_placement(data), form
        except EplbError as error:
            raise _of_file(file, error) from error
    return plain, form


def _told_apart(plain: Any) -> LayoutFormat:
    if not isinstance(plain, Mapping):
        return LayoutFormat.VLLM
    if trtllm.ASSIGNMENTS in plain or any(name in plain for name in trtllm.WRAPPERS):
        return LayoutFormat.TRTLLM  # JSON is YAML, but its keys are text
    return LayoutFormat.OWN if "format" in plain else LayoutFormat.SGLANG


def _text(file: Path, most: int) -> bytes:
    size = file.stat().st_size
    if size > most:
        raise ResourceExhausted(
            f"{file}: {size} bytes, at most {most} are read; is it a placement?"
        )
    return file.read_bytes()


def _yaml(file: Path, data: bytes) -> Any:
    """Plain values without aliases: a few bytes of these may stand for any number of values."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        text = data.decode()
        for event in yaml.parse(text, loader):
            if isinstance(event, yaml.AliasEvent):
                line = f", line {event.start_mark.line + 1}" if event.start_mark else ""
                raise InvalidArgument(f"{file}{line}: aliases are not read; write the list out")
        parser = loader(text)
        try:
            return parser.get_single_data()
        finally:
            parser.dispose()
    except UnicodeDecodeError as error:
        raise InvalidArgument(f"{file} is not text ({error}); which format is it?") from error
    except yaml.MarkedYAMLError as error:
        line = f", line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise InvalidArgument(f"{file}{line}: {error.problem or 'no YAML'}") from error


def _own(found: own.OwnPlacement, held: Holding) -> ReadLayout:
    for name in ("num_layers", "num_experts"):
        theirs, ours = getattr(found, name), getattr(held, name)
        if theirs != ours:
            raise EplbError(name, f"is {theirs}, the service has {ours}", "it is of another model")
    rows: dict[int, tuple[int, ...]] = {}
    for number, row in enumerate(found.ranks):
        if row.rank >= held.num_ranks:
            raise EplbError(
                f"ranks[{number}].rank",
                f"is {row.rank}, the service has ranks 0 to {held.num_ranks - 1}",
                "add ranks first, or change the file",
            )
        rows[row.rank] = row.keys(found.num_experts)
    notes = [
        f"{name} is {theirs} in the file, the service serves {ours}"
        for name, theirs, ours in (
            ("model", found.model, held.model),
            ("weights_version", found.weights_version, held.weights_version),
        )
        if theirs not in ("", ours)
    ]
    notes += [
        f"rank {rank} is not named in the file, and would hold nothing"
        for rank in held.ranks
        if rank not in rows
    ]
    every = tuple(rows.get(rank, ()) for rank in range(held.num_ranks))
    return ReadLayout(LayoutFormat.OWN, every, tuple(notes))


def _map(
    loaded: Any, form: LayoutFormat, held: Holding, layers: tuple[int, ...] | None
) -> ReadLayout:
    if form is LayoutFormat.TRTLLM:
        where = trtllm.ASSIGNMENTS
        found = to_int(where, _numbered(trtllm.read_load_balancer(loaded), held, layers))
    elif form is LayoutFormat.VLLM:
        where = vllm.MAP
        found = _chosen(
            where, vllm.read_expert_map(loaded, num_layers=held.num_layers), held, layers
        )
    else:
        where = sglang.MAP
        found = _chosen(where, _sglang(loaded), held, layers)
    rows = maps.rows_of(
        found,
        num_ranks=len(held.ranks),
        num_experts=held.num_experts,
        where=where,
        may_be_empty=form is LayoutFormat.VLLM,
    )
    every: list[tuple[int, ...]] = [()] * held.num_ranks
    for rank, keys in zip(held.ranks, rows.rows, strict=True):
        every[rank] = keys
    notes: tuple[str, ...] = ()
    if rows.twice:
        notes = (
            f"{rows.twice} slots of the file hold what their rank holds already; here a rank holds "
            "an expert once, and nothing is lost by that",
        )
    return ReadLayout(form, tuple(every), notes)


def _sglang(loaded: Any) -> IntArray:
    if not isinstance(loaded, Mapping):
        raise EplbError(
            "the file", f"holds {type(loaded).__name__}, not a mapping", "try --format vllm"
        )
    found = sglang.read_location(loaded)
    if sglang.MAP not in found:
        raise EplbError(
            sglang.COUNT,
            "is load, from which SGLang plans at its start; it says nothing of where experts lie",
            f"pass a file with {sglang.MAP}",
        )
    return found[sglang.MAP]


def _numbered(
    found: dict[int, list[int]], held: Holding, layers: tuple[int, ...] | None
) -> list[list[int]]:
    if layers is None:
        if len(found) != held.num_layers:
            raise EplbError(
                trtllm.ASSIGNMENTS,
                f"has {len(found)} layers, the service has {held.num_layers} MoE layers",
                "name the model's MoE layers with --layers, or it is of another model",
            )
        return list(found.values())
    lost = [number for number in layers if number not in found]
    if lost:
        raise EplbError(trtllm.ASSIGNMENTS, f"has no layer {lost[0]}", "check --layers")
    return [found[number] for number in layers]


def _chosen(where: str, found: IntArray, held: Holding, layers: Sequence[int] | None) -> IntArray:
    """The rows of the MoE layers."""
    if layers is None:
        if len(found) != held.num_layers:
            raise EplbError(
                where,
                f"has {len(found)} layers, the service has {held.num_layers} MoE layers",
                "name those of the file that are MoE layers with --layers (3-60, say), or it is of "
                "another model",
            )
        return found
    if layers[-1] >= len(found):
        raise EplbError(where, f"has {len(found)} layers, no layer {layers[-1]}", "check --layers")
    chosen: IntArray = found[list(layers)]
    return chosen
