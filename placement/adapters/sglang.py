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
from placement.eplb.arguments import check
from placement.eplb.plan import plan
from placement.eplb.tensors import IntArray, to_float, to_int

MAP: Final = "physical_to_logical_map"
COUNT: Final = "logical_count"


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
    if isinstance(location, Mapping):
        found: Mapping[str, object] = location
    else:
        try:
            found = msgspec.json.decode(location, type=dict[str, Any])
        except msgspec.DecodeError as fault:
            raise EplbError(
                "location", f"is not a JSON object ({fault})", "pass the text of the .json file"
            ) from fault
    if MAP in found:
        others = sorted(set(found) - {MAP})
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
        "location", f"has neither {MAP} nor {COUNT}: {', '.join(sorted(found))}", "pass one of them"
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
    if not dumps:
        raise EplbError("dumps", "is empty", "pass at least one loaded file")
    if all(COUNT in dump for dump in dumps):
        parts = [_steps(f"dumps[{i}].{COUNT}", dump[COUNT]) for i, dump in enumerate(dumps)]
        if len({part.shape[1:] for part in parts}) > 1:
            raise EplbError(
                "dumps", "differ in layers or experts", "pass dumps of one model at a time"
            )
        counts = np.concatenate(parts)
        used = counts[counts.any(axis=(1, 2))]
        return used if len(used) else counts[:1]
    if all("records" in dump and f"last_{MAP}" in dump for dump in dumps):
        return _passes(dumps, num_experts)
    raise EplbError(
        "dumps",
        f"must all hold {COUNT}, or all hold records and last_{MAP}",
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
        history, load = load, load.sum(axis=0)
    problem = check(load, (num_replicas, num_groups, num_nodes, num_gpus), None, history, None)
    return location_json(plan(problem, "equal"))


def _checked_map(name: str, values: object) -> IntArray:
    found = to_int(name, values)
    if found.ndim != 2 or 0 in found.shape:
        raise EplbError(
            name, f"must have shape [layers, physical], got {found.shape}", "pass one row a layer"
        )
    missing = np.setdiff1d(np.arange(int(found.max()) + 1), found)
    if found.min() < 0 or len(missing):
        raise EplbError(
            name,
            f"must name expert ids from 0 on without a gap, got {int(found.min())} to "
            f"{int(found.max())}",
            "SGLang needs every slot filled and every expert somewhere",
        )
    for layer, row in enumerate(found):
        lost = np.setdiff1d(np.arange(int(found.max()) + 1), row)
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
    if counts.ndim != 3 or 0 in counts.shape or counts.min() < 0:
        raise EplbError(
            name,
            f"must be counts >= 0 of shape [passes, layers, experts], got {counts.shape}",
            "pass the dump as SGLang wrote it",
        )
    return counts


def _passes(dumps: Sequence[Mapping[str, Any]], num_experts: int | None) -> IntArray:
    maps = [_checked_map(f"dumps[{i}].last_{MAP}", d[f"last_{MAP}"]) for i, d in enumerate(dumps)]
    experts = int(max(found.max() for found in maps)) + 1 if num_experts is None else num_experts
    by_pass: dict[int, IntArray] = {}
    for number, (dump, found) in enumerate(zip(dumps, maps, strict=True)):
        if found.shape != maps[0].shape or int(found.max()) >= experts:
            raise EplbError(
                f"dumps[{number}].last_{MAP}",
                f"has shape {found.shape} and experts up to {int(found.max())}; the first dump has "
                f"{maps[0].shape}, num_experts is {experts}",
                "pass dumps of one model at a time",
            )
        layer = np.broadcast_to(np.arange(len(found))[:, None], found.shape)
        for record in dump["records"]:
            name = f"dumps[{number}].global_physical_count"
            physical = _steps(name, record["global_physical_count"])[0]
            if physical.shape != found.shape:
                raise EplbError(
                    name, f"has shape {physical.shape}, its map {found.shape}", "see the dump"
                )
            counts = by_pass.setdefault(
                int(record["forward_pass_id"]), np.zeros((len(found), experts), dtype=np.int64)
            )
            np.add.at(counts, (layer, found), physical)
    if not by_pass:
        raise EplbError("dumps", "hold no record", "record at least one forward pass")
    return np.stack([by_pass[key] for key in sorted(by_pass)])
