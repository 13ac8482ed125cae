"""Sub-calls and replies for tests, with every field given a sensible value."""

from typing import Any

import numpy as np
import numpy.typing as npt

from moe_serve.ports import Cause, DType, RowStatus, SubCall, SubReply


def sub_call(
    rows: npt.NDArray[Any],
    pairs: list[tuple[int, int, int, float, int]],
    **fields: Any,
) -> SubCall:
    """A sub-call of raw `rows` whose pairs are (row, slot, tag, gate, expert); pair_k counts up
    within a row."""
    column = list(zip(*pairs, strict=True)) if pairs else [(), (), (), (), ()]
    seen: dict[int, int] = {}
    pair_k = []
    for row in column[0]:
        pair_k.append(seen.get(row, 0))
        seen[row] = seen.get(row, 0) + 1
    dtype = {"float32": DType.FLOAT32, "uint16": DType.BFLOAT16, "float16": DType.FLOAT16}
    values: dict[str, Any] = {
        "router": "router-0",
        "call_id": 1,
        "sub_id": 0,
        "request_key": 7,
        "layer": 0,
        "phase": 0,
        "cause": Cause.FIRST,
        "incarnation": 1,
        "term": 1,
        "epoch": 1,
        "dtype": dtype[rows.dtype.name],
        "timeout_s": 10.0,
        "rows": rows,
        "row_id": np.arange(len(rows), dtype=np.int32),
        "pair_row": np.array(column[0], np.int32),
        "pair_slot": np.array(column[1], np.int32),
        "pair_tag": np.array(column[2], np.int64),
        "pair_gate": np.array(column[3], np.float32),
        "pair_k": np.array(pair_k, np.int32),
        "pair_expert": np.array(column[4], np.int32),
    }
    return SubCall(**(values | fields))


def sub_reply(partial: npt.NDArray[Any], statuses: list[RowStatus], **fields: Any) -> SubReply:
    """A reply whose served rows are `partial`."""
    values: dict[str, Any] = {
        "call_id": 1,
        "sub_id": 0,
        "incarnation": 1,
        "term": 1,
        "epoch": 1,
        "row_status": np.array(statuses, np.uint8),
        "partial": partial,
        "backlog_s": 0.25,
        "backlog_seq": 3,
        "queue_s": 0.5,
        "compute_s": 0.125,
        "detail": "",
        "rest_s": 0.25,
    }
    return SubReply(**(values | fields))
