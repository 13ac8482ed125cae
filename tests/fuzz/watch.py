"""Runs a target on one input and looks at what it costs: the memory of each in proportion to its
size, and its time."""

from __future__ import annotations

import time
import tracemalloc

from tests.fuzz.target import Target

INPUT_S_MAX = 5.0
"""An input that takes longer hangs, however busy the machine is: common ones take below 1 ms."""


class Costly(AssertionError):
    """An input took more memory or time than its size allows."""


def allowance(target: Target, size: int) -> int:
    """Bytes that an input of `size` bytes may allocate at once."""
    return target.base_bytes + target.factor * size


def run_watched(target: Target, data: bytes) -> bool:
    """Whether the input was taken. Raises Costly, and whatever the target finds."""
    began_s = time.process_time()
    tracemalloc.start()
    try:
        taken = target.run(data)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    most = allowance(target, len(data))
    if peak > most:
        raise Costly(f"{len(data)} bytes made {target.name} allocate {peak}, allowed are {most}")
    took_s = time.process_time() - began_s
    if took_s > INPUT_S_MAX:
        raise Costly(f"{len(data)} bytes kept {target.name} for {took_s:.1f} s")
    return taken
