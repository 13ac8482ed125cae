"""SGLang's file of initial expert locations, and its dumps of the load it saw.

Responsible for what `--init-expert-location` reads (JSON text, or the mapping that `torch.save`
puts into a .pt file) and for turning the recorder's dumps, loaded by the caller, into counts that
the planner takes. Must never open a file or unpickle one. Called by users' own scripts.

`layers` are SGLang's own. For models whose first layers are dense these are counted too, with load
0: they have rows in every map, and what stands there is never used.

Example: plan from a dump, write the file.

>>> dump = {"rank": 0, "logical_count": [[[6, 2, 3, 1]], [[8, 2, 3, 1]]]}
>>> counts = logical_counts([dump])
>>> location = plan_init_location(counts, num_replicas=6, num_groups=1, num_nodes=1, num_gpus=2)
>>> read_location(location)["physical_to_logical_map"].shape
(1, 6)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import msgspec
import numpy as np

from placement.adapters.counts import (
    TooLarge,
    check_cells,
    check_sizes,
    to_logical,
    whole_counts,
)
from placement.eplb import EplbError
from placement.eplb.arguments import check, whole
from placement.eplb.plan import plan
from placement.eplb.tensors import IntArray, summed, to_array, to_float, to_int

MAP: Final = "physical_to_logical_map"
COUNT: Final = "logical_count"
RECORDS: Final = "records"
LAST_MAP: Final = f"last_{MAP}"
DUMPS_MAX: Final = 4096
"""Dumps of one recording: one a rank, or one after the other."""
RECORDS_MAX: Final = 1 << 20
"""Records of one dump."""


def location_mapping(physical_to_logical: object) -> dict[str, list[list[int]]]:
    """What SGLang reads, as a mapping of lists: for `torch.save` into a .pt file, or for JSON.

    physical_to_logical: int [layers, physical], array or tensor. SGLang passes every key of the
    file on as an argument, so there is this one and no other.

    >>> location_mapping([[0, 1, 0, 2]])
    {'physical_to_logical_map': [[0, 1, 0, 2]]}
    """
    return {MAP: _checked_map("physical_to_logical", physical_to_logical).tolist()}


def location_json(physical_to_logical: object) -> str:
    """The same as JSON: a .json file's text, or the argument of `--init-expert-location` itself.

    >>> location_json([[0, 1, 0, 2]])
    '{"physical_to_logical_map":[[0,1,0,2]]}'
    """
    return msgspec.json.encode(location_mapping(physical_to_logical)).decode()


def read_location(location: str | bytes | Mapping[str, object]) -> dict[str, IntArray]:
    """What such a file says: one key, `physical_to_logical_map` int64 [layers, physical] or
    `logical_count` int64 [steps, layers, logical experts], from which SGLang plans at start.

    location: JSON text, or the mapping a .pt file holds. SGLang passes every key beside the map on
    as an argument that it does not take, so a map stands alone.

    Raises EplbError for other keys, shapes and ids.
    """
    found = location if isinstance(location, Mapping) else _decoded(location)
    if MAP in found:
        others = sorted(map(str, set(found) - {MAP}))
        if others:
            raise EplbError(
                "location",
                f"has keys that SGLang would refuse: {', '.join(others)}",
                f"keep {MAP} only",
            )
        return {MAP: _checked_map(MAP, found[MAP])}
    if COUNT in found:
        return {COUNT: logical_counts([found])}
    raise EplbError(
        "location",
        f"has neither {MAP} nor {COUNT}: {', '.join(sorted(map(str, found))) or 'it is empty'}",
        "pass one of them",
    )


def recorded_counts(
    dumps: Sequence[Mapping[str, Any]], *, num_experts: int | None = None
) -> IntArray:
    """Load of each recorded pass: int64 [passes, layers, experts], those without load too.

    dumps: what `torch.load(path, weights_only=True)` gave for each file, in order of time. Two
    forms exist. Modes `stat`, `stat_approx`: `logical_count` [passes, layers, experts] of all
    ranks together; passes of several dumps follow one another. The recorder's ring is not turned
    back: once it has wrapped around, its passes are not oldest first. Modes `per_pass`,
    `per_token`: `records` of one rank, each `forward_pass_id` and `global_physical_count` [layers,
    physical], and the `last_physical_to_logical_map`; ranks are added up, passes come in order of
    id. Fractions (of `stat_approx`) are rounded.

    num_experts: logical experts, for dumps that hold maps; None = as many as these name.

    Raises EplbError where a dump has neither form, a count or map is none, or dumps differ in form
    or shape; TooLarge beyond the limits here and in `counts`.
    """
    packs = _mappings("dumps", dumps, DUMPS_MAX)
    if not packs:
        raise EplbError("dumps", "is empty", "pass at least one loaded file")
    if all(COUNT in dump for dump in packs):
        return _passes_of_all_ranks(packs)
    if all(RECORDS in dump for dump in packs):
        return _passes(packs, num_experts)
    named = sorted({str(key)[:40] for dump in packs for key in dump})
    raise EplbError(
        "dumps",
        f"must all hold {COUNT}, or all hold {RECORDS} and {LAST_MAP}, got "
        f"{', '.join(named[:12]) or 'nothing'}",
        "use files of one mode of SGLang's recorder at a time",
    )


def logical_counts(
    dumps: Sequence[Mapping[str, Any]], *, num_experts: int | None = None
) -> IntArray:
    """`recorded_counts` without the passes that have no load (the unused part of the recorder's
    ring): `history` of the planner. One empty pass where none has load.
    """
    counts = recorded_counts(dumps, num_experts=num_experts)
    used = counts[counts.any(axis=(1, 2))]
    return used if len(used) else counts[:1]


def plan_init_location(
    counts: object, *, num_replicas: int, num_groups: int, num_nodes: int, num_gpus: int
) -> str:
    """JSON of a plan from nothing for recorded load: what to start SGLang with.

    counts: [layers, experts] or [passes, layers, experts], oldest first. The other arguments are
    those of `placement.eplb.rebalance_experts`, which see for errors.
    """
    load = to_float("counts", counts)
    history = None
    if load.ndim == 3:
        history, load = load, summed(load)
    problem = check(load, (num_replicas, num_groups, num_nodes, num_gpus), None, history, None)
    return location_json(plan(problem, "equal"))


def _decoded(text: object) -> Mapping[str, object]:
    remedy = "pass the text of the .json file, or the mapping of the .pt file"
    if not isinstance(text, str | bytes | bytearray | memoryview):
        raise EplbError("location", f"must be JSON text, got {type(text).__name__}", remedy)
    try:
        return msgspec.json.decode(text, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError, ValueError) as fault:
        raise EplbError("location", f"is not a JSON object ({fault})", remedy) from fault


def _mappings(name: str, values: object, most: int) -> Sequence[Mapping[str, Any]]:
    """A list of at most `most` mappings."""
    remedy = "pass a list of what torch.load gave, as SGLang wrote it"
    if not isinstance(values, Sequence) or isinstance(values, str | bytes):
        raise EplbError(name, f"must be a list of mappings, got {type(values).__name__}", remedy)
    if len(values) > most:
        raise TooLarge(name, f"has {len(values)} entries, at most {most} are read", "record less")
    for number, value in enumerate(values):
        if not isinstance(value, Mapping):
            raise EplbError(
                f"{name}[{number}]", f"must be a mapping, got {type(value).__name__}", remedy
            )
    return values


def _checked_map(name: str, values: object) -> IntArray:
    check_cells(name, values)
    found = to_int(name, values)
    if found.ndim != 2 or 0 in found.shape:
        raise EplbError(
            name, f"must have shape [layers, physical], got {found.shape}", "pass one row a layer"
        )
    check_sizes(name, layers=len(found), experts=found.shape[1])
    least, most = int(found.min()), int(found.max())
    if least < 0 or most >= found.shape[1] or len(np.unique(found)) <= most:
        raise EplbError(
            name,
            f"must name expert ids from 0 on without a gap, got {least} to {most} in layers of "
            f"{found.shape[1]} slots",
            "SGLang needs every slot filled and every expert somewhere",
        )
    for layer, row in enumerate(found):
        lost = np.setdiff1d(np.arange(most + 1), row)
        if len(lost):
            raise EplbError(
                f"{name}[{layer}]",
                f"has no replica of expert {int(lost[0])}, which another layer has",
                "SGLang needs every expert in every layer",
            )
    return found


def _steps(name: str, values: object) -> IntArray:
    """Counts [passes, layers, experts]; one sum of all passes is one pass."""
    check_cells(name, values)
    counts = to_array(name, values)
    if counts.ndim == 2:
        counts = counts[None]
    if counts.ndim != 3:
        raise EplbError(
            name,
            f"must be counts of shape [passes, layers, experts], got {list(counts.shape)}",
            "pass the dump as SGLang wrote it",
        )
    steps, layers, experts = counts.shape
    check_sizes(name, layers=layers, experts=experts, steps=steps)
    return whole_counts(name, counts)


def _passes_of_all_ranks(dumps: Sequence[Mapping[str, Any]]) -> IntArray:
    parts = [_steps(f"dumps[{i}].{COUNT}", dump[COUNT]) for i, dump in enumerate(dumps)]
    first = parts[0].shape[1:]
    for number, part in enumerate(parts):
        if part.shape[1:] != first:
            raise EplbError(
                f"dumps[{number}].{COUNT}",
                f"counts {list(part.shape[1:])} layers and experts, the first dump {list(first)}",
                "use dumps of one model at a time",
            )
    check_sizes("dumps", layers=first[0], experts=first[1], steps=sum(map(len, parts)))
    return np.concatenate(parts)


def _passes(dumps: Sequence[Mapping[str, Any]], num_experts: int | None) -> IntArray:
    maps = [_map_of(f"dumps[{i}]", dump) for i, dump in enumerate(dumps)]
    seen = int(maps[0].max()) + 1
    for number, found in enumerate(maps):
        if found.shape != maps[0].shape or int(found.max()) + 1 != seen:
            raise EplbError(
                f"dumps[{number}].{LAST_MAP}",
                f"has shape {found.shape} and {int(found.max()) + 1} experts, that of the first "
                f"dump {maps[0].shape} and {seen}",
                "use dumps of one model at a time",
            )
    experts = seen if num_experts is None else whole("num_experts", num_experts, seen)
    by_pass: dict[int, IntArray] = {}
    for number, (dump, found) in enumerate(zip(dumps, maps, strict=True)):
        name = f"dumps[{number}].{RECORDS}"
        for at, record in enumerate(_mappings(name, dump[RECORDS], RECORDS_MAX)):
            where = f"{name}[{at}]"
            key, physical = _record(where, record, found.shape)
            logical = to_logical(where, physical[None], found, experts)[0]
            if key in by_pass:
                by_pass[key] += logical
                continue
            by_pass[key] = logical
            check_sizes(where, layers=len(found), experts=experts, steps=len(by_pass))
    if not by_pass:
        raise EplbError("dumps", "hold no record", "record at least one forward pass")
    return np.stack([by_pass[key] for key in sorted(by_pass)])


def _map_of(name: str, dump: Mapping[str, Any]) -> IntArray:
    if LAST_MAP not in dump:
        raise EplbError(
            name, f"{RECORDS} need {LAST_MAP} beside them", "pass the dump as SGLang wrote it"
        )
    return _checked_map(f"{name}.{LAST_MAP}", dump[LAST_MAP])


def _record(name: str, record: Mapping[str, Any], shape: tuple[int, ...]) -> tuple[int, IntArray]:
    """Number of the forward pass and its counts, int64 [layers, physical]."""
    key = to_int(f"{name}.forward_pass_id", record.get("forward_pass_id"))
    if key.ndim != 0:
        raise EplbError(
            f"{name}.forward_pass_id", f"must be one integer, got {key.shape}", "see the dump"
        )
    where = f"{name}.global_physical_count"
    counts = _steps(where, record.get("global_physical_count"))
    if len(counts) != 1 or counts.shape[1:] != shape:
        got = counts.shape[1:] if len(counts) == 1 else counts.shape
        raise EplbError(where, f"has shape {got}, its map {shape}", "see the dump")
    return int(key), counts[0]
