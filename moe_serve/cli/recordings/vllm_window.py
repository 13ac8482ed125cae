"""vLLM's load window: the arrays `expert_load_window` and `physical_to_logical_map` of its state.

Responsible for turning physical experts into logical ones and a ring into an order of time. Pure.
Called by the readers of files that may hold them.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from moe_serve.cli.recordings.trace import CountTrace, count_trace
from moe_serve.errors import InvalidArgument
from placement.adapters.counts import check_sizes, to_logical, whole_counts


def window_trace(file: Path, arrays: Mapping[str, npt.NDArray[Any]]) -> CountTrace:
    """`expert_load_window` [steps, layers, physical] with `physical_to_logical_map` [layers,
    physical].

    The window is a ring: `expert_load_window_step`, where it is given, is the place written next,
    so what lies there is the oldest. Raises InvalidArgument, EplbError.
    """
    window, where = arrays["expert_load_window"], f"{file}: expert_load_window"
    mapping = arrays.get("physical_to_logical_map")
    if mapping is None:
        raise InvalidArgument(
            f"{where} needs physical_to_logical_map [layers, physical] beside it, to know which "
            "expert was counted"
        )
    if window.ndim != 3:
        raise InvalidArgument(
            f"{where} must be [steps, layers, physical], got {window.dtype} {list(window.shape)}"
        )
    steps, layers, physical = window.shape
    check_sizes(where, layers=layers, experts=physical, steps=steps)
    counts = whole_counts(where, window)
    step = arrays.get("expert_load_window_step")
    if step is not None:
        if step.size != 1 or step.dtype.kind not in "iu" or not 0 <= int(step.item()) <= steps:
            raise InvalidArgument(
                f"{file}: expert_load_window_step must be one integer in [0, {steps}]"
            )
        counts = np.roll(counts, -int(step.item()), axis=0)
    return count_trace(
        where, to_logical(f"{file}: physical_to_logical_map", counts, np.asarray(mapping))
    )
