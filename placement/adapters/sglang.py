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

from placement.eplb import EplbError
from placement.eplb.arguments import check, whole
from placement.eplb.plan import plan
from placement.eplb.tensors import IntArray, summed, to_float, to_int

MAP: Final = "physical_to_logical_map"
COUNT: Final = "logical_count"
RECORDS: Final = "records"
LAST_MAP: Final = f"last_{MAP}"
COUNT_MAX: Final = 1 << 53
"""Pairs of one dump's pass: sums of many stay far from the end of int64."""


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


def logical_counts(
    dumps: Sequence[Mapping[str, Any]], *, num_experts: int | None = None
) -> IntArray:
    """Load of each recorded pass: int64 [passes, layers, experts], `history` of the planner.

    dumps: what `torch.load(path, weights_only=True)` gave for each file, in order of time. Two
    forms exist. Modes `stat`, `stat_approx`: `logical_count` [passes, layers, experts] of all
    ranks together; passes of several dumps follow one another, passes without load (the unused part
    of the recorder's ring) are left out. The ring is not turned back: once it has wrapped around,
    its passes are not oldest first. Modes `per_pass`, `per_token`: `records` of one rank, each
    `forward_pass_id` and `global_physical_count` [layers, physical], and the
    `last_physical_to_logical_map`; ranks are added up, passes come in order of id.

    num_experts: logical experts; None = as many as the maps name.

    Raises EplbError where a dump has neither form or dumps differ in form or shape.
    """
    packs = _mappings("dumps", dumps)
    if not packs:
        raise EplbError("dumps", "is empty", "pass at least one loaded file")
    if all(COUNT in dump for dump in packs):
        parts = [_steps(f"dumps[{i}].{COUNT}", dump[COUNT]) for i, dump in enumerate(packs)]
        if len({part.shape[1:] for part in parts}) > 1:
            raise EplbError(
                "dumps", "differ in layers or experts", "pass dumps of one model at a time"
            )
        counts = np.concatenate(parts)
        used = counts[counts.any(axis=(1, 2))]
        return used if len(used) else counts[:1]
    if all(RECORDS in dump and LAST_MAP in dump for dump in packs):
        return _passes(packs, num_experts)
    raise EplbError(
        "dumps",
        f"must all hold {COUNT}, or all hold {RECORDS} and {LAST_MAP}",
        "pass what torch.load gave for files of one recorder mode",
    )


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


def _mappings(name: str, values: object) -> Sequence[Mapping[str, Any]]:
    """A list of mappings."""
    remedy = "pass a list of what torch.load gave, as SGLang wrote it"
    if not isinstance(values, Sequence) or isinstance(values, str | bytes):
        raise EplbError(name, f"must be a list of mappings, got {type(values).__name__}", remedy)
    for number, value in enumerate(values):
        if not isinstance(value, Mapping):
            raise EplbError(
                f"{name}[{number}]", f"must be a mapping, got {type(value).__name__}", remedy
            )
    return values


def _checked_map(name: str, values: object) -> IntArray:
    found = to_int(name, values)
    if found.ndim != 2 or 0 in found.shape:
        raise EplbError(
            name, f"must have shape [layers, physical], got {found.shape}", "pass one row a layer"
        )
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
    counts = to_int(name, values)
    if counts.ndim == 2:
        counts = counts[None]
    if counts.ndim != 3 or 0 in counts.shape:
        raise EplbError(
            name,
            f"must be counts >= 0 of shape [passes, layers, experts], none of which is 0, got "
            f"{counts.shape}",
            "pass the dump as SGLang wrote it",
        )
    if counts.min() < 0 or counts.sum(axis=(1, 2), dtype=np.float64).max() > COUNT_MAX:
        raise EplbError(
            name,
            f"must be counts >= 0, at most {COUNT_MAX} a pass, got {int(counts.min())} to "
            f"{int(counts.max())}",
            "pass the dump as SGLang wrote it",
        )
    return counts


def _passes(dumps: Sequence[Mapping[str, Any]], num_experts: int | None) -> IntArray:
    maps = [_checked_map(f"dumps[{i}].{LAST_MAP}", dump[LAST_MAP]) for i, dump in enumerate(dumps)]
    seen = int(max(found.max() for found in maps)) + 1
    experts = seen if num_experts is None else whole("num_experts", num_experts, seen)
    by_pass: dict[int, IntArray] = {}
    for number, (dump, found) in enumerate(zip(dumps, maps, strict=True)):
        if found.shape != maps[0].shape:
            raise EplbError(
                f"dumps[{number}].{LAST_MAP}",
                f"has shape {found.shape}, that of the first dump {maps[0].shape}",
                "pass dumps of one model at a time",
            )
        layer = np.broadcast_to(np.arange(len(found))[:, None], found.shape)
        name = f"dumps[{number}].{RECORDS}"
        for at, record in enumerate(_mappings(name, dump[RECORDS])):
            key, physical = _record(f"{name}[{at}]", record, found.shape)
            if key not in by_pass:
                by_pass[key] = np.zeros((len(found), experts), dtype=np.int64)
            np.add.at(by_pass[key], (layer, found), physical)
    if not by_pass:
        raise EplbError("dumps", "hold no record", "record at least one forward pass")
    return np.stack([by_pass[key] for key in sorted(by_pass)])


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
