"""Compile every numba kernel into its cache, so that no request and no test waits for a compiler.

Responsible for calling `warm()` of each kernel module. Must never hold a kernel. Called by
`make setup` as `python -m moe_serve.warm_kernels`; a shard or router compiles what is still missing
when it starts.
"""

import sys
import time
from collections.abc import Callable

import moe_serve.router.kernels
import moe_serve.shard.kernels
import placement.eplb.even.kernels
import placement.forecast.kernels
import placement.planner.kernels
import placement.policy.candidates.estimates.kernels
import placement.policy.candidates.kernels
import placement.policy.kernels
import placement.policy.leveled.drops.kernels
import placement.policy.leveled.kernels
import placement.roles.kernels
import placement.split.kernels
import placement.split.pairs.kernels

WARMERS: tuple[Callable[[], None], ...] = (
    placement.split.kernels.warm,
    placement.split.pairs.kernels.warm,
    placement.forecast.kernels.warm,
    placement.planner.kernels.warm,
    placement.policy.candidates.estimates.kernels.warm,
    placement.policy.candidates.kernels.warm,
    placement.policy.kernels.warm,
    placement.policy.leveled.drops.kernels.warm,
    placement.policy.leveled.kernels.warm,
    placement.eplb.even.kernels.warm,
    placement.roles.kernels.warm,
    moe_serve.router.kernels.warm,
    moe_serve.shard.kernels.warm,
)
"""`warm` of every module with numba kernels; a test compares this with the tree."""


def warm_all(warmers: tuple[Callable[[], None], ...] = WARMERS) -> dict[str, float]:
    """Call each warmer in order and return the seconds each took, by the name of its module."""
    seconds: dict[str, float] = {}
    for warm in warmers:
        begun_s = time.monotonic()
        warm()
        seconds[warm.__module__] = time.monotonic() - begun_s
    return seconds


def main() -> int:
    """Warm every kernel module and print the seconds it took."""
    for name, took_s in warm_all().items():
        sys.stdout.write(f"kernels compiled: {name} ({took_s:.1f} s)\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
