"""Which fault comes next: a schedule drawn from a seed, the same one for ever.

Responsible for the list of faults, what each may excuse, and the draw. Knows no process. The
moment of a fault depends on the service (it must have healed from the one before), its kind,
target and size do not.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType
from typing import Final

import numpy as np

NODE_RANKS: Final = MappingProxyType({"b": (0, 1), "c": (2, 3), "d": (4, 5)})
"""Ranks on each logical node. The head, "a", holds routers and controller."""
RANKS, ROUTERS = 6, 2
LOSABLE_NODES = ("c", "d")
SPARED_RANK, SPARED_ROUTER = 0, 0
"""Parts whose process is never ended on purpose, so that there are lives as long as the soak. Every
other fault hits them as well."""


class Kind(StrEnum):
    """What is done to the service."""

    KILL_SHARD = "kill-shard"
    PAUSE_SHARD = "pause-shard"
    KILL_ROUTER = "kill-router"
    PAUSE_ROUTER = "pause-router"
    KILL_NODE = "kill-node"
    KILL_CONTROLLER = "kill-controller"
    PAUSE_CONTROLLER = "pause-controller"
    CUT = "cut"
    LOSE_REQUESTS = "lose-requests"
    LOSE_REPLIES = "lose-replies"
    BUDGET = "budget"
    DRAIN = "drain"
    CORRUPT_COPY = "corrupt-copy"
    SLOW_COPY = "slow-copy"
    HUNG_COPY = "hung-copy"
    FAILED_STEP = "failed-step"
    NO_MEMORY_TO_RESERVE = "no-memory-to-reserve"
    NO_MEMORY_TO_COPY = "no-memory-to-copy"
    NO_MEMORY_TO_VERIFY = "no-memory-to-verify"
    NO_MEMORY_TO_COMPUTE = "no-memory-to-compute"
    SLOW_COMPUTE = "slow-compute"
    HUNG_COMPUTE = "hung-compute"
    BAD_INPUT = "bad-input"
    CANCELS = "cancels"
    SHORT_DEADLINES = "short-deadlines"


COPY_FAULTS: Final = frozenset(
    {
        Kind.CORRUPT_COPY,
        Kind.SLOW_COPY,
        Kind.HUNG_COPY,
        Kind.FAILED_STEP,
        Kind.NO_MEMORY_TO_RESERVE,
        Kind.NO_MEMORY_TO_COPY,
        Kind.NO_MEMORY_TO_VERIFY,
    }
)
"""Ordered of one rank while another is drained, so that there are copies which they hit."""

ON_ROUTERS: Final = frozenset(
    {Kind.KILL_ROUTER, Kind.PAUSE_ROUTER, Kind.BAD_INPUT, Kind.CANCELS, Kind.SHORT_DEADLINES}
)

SECONDS: Final = MappingProxyType(
    {
        Kind.PAUSE_SHARD: (1.0, 8.0),
        Kind.PAUSE_ROUTER: (1.0, 8.0),
        Kind.PAUSE_CONTROLLER: (2.0, 12.0),
        Kind.CUT: (1.0, 8.0),
        Kind.LOSE_REQUESTS: (0.5, 3.0),
        Kind.LOSE_REPLIES: (0.5, 3.0),
        Kind.BUDGET: (3.0, 8.0),
        Kind.DRAIN: (2.0, 6.0),
        Kind.CORRUPT_COPY: (3.0, 8.0),
        Kind.SLOW_COPY: (3.0, 8.0),
        Kind.HUNG_COPY: (3.0, 12.0),
        Kind.FAILED_STEP: (3.0, 8.0),
        Kind.NO_MEMORY_TO_RESERVE: (3.0, 8.0),
        Kind.NO_MEMORY_TO_COPY: (3.0, 8.0),
        Kind.NO_MEMORY_TO_VERIFY: (3.0, 8.0),
        Kind.NO_MEMORY_TO_COMPUTE: (1.0, 5.0),
        Kind.SLOW_COMPUTE: (3.0, 10.0),
        Kind.HUNG_COMPUTE: (2.0, 12.0),
    }
)
"""Shortest and longest time a fault lasts."""

WEIGHTS: Final = MappingProxyType(
    {
        Kind.KILL_SHARD: 2.0,
        Kind.PAUSE_SHARD: 2.0,
        Kind.DRAIN: 2.0,
        Kind.BUDGET: 2.0,
        # A controller's life must be long enough for its slopes to mean something.
        Kind.KILL_CONTROLLER: 0.7,
        Kind.KILL_NODE: 0.5,
    }
)
"""How often a kind is drawn, against 1 of the others."""

MAY_FAIL: Final = MappingProxyType(
    {
        Kind.LOSE_REQUESTS: frozenset({"DEADLINE_EXCEEDED", "UNAVAILABLE"}),
        Kind.LOSE_REPLIES: frozenset({"DEADLINE_EXCEEDED", "UNAVAILABLE"}),
        Kind.NO_MEMORY_TO_COMPUTE: frozenset({"RESOURCE_EXHAUSTED", "UNAVAILABLE"}),
    }
)
"""Typed failures of common calls that a fault excuses while it lasts and until the service has
healed. Every expert has two replicas on two nodes, so the faults that are not here excuse none.

Messages lost on a connection that stays up look like work that takes long: a call is sent again
only within the budget of second tries, and what was neither answered nor sent again ends at its
deadline. A shard without memory for a batch refuses its rows; where other replicas have none
either, or the retry budget is spent, the caller is told so.
"""


@dataclass(frozen=True, slots=True)
class Act:
    """One fault. rank, other: two different ranks; router: number of a router; node: one that may
    be lost. seconds: how long it lasts, 0 where it is a moment. variant: 0 to 3, which form of the
    fault. seed: of what else has to be drawn while it is done."""

    number: int
    kind: Kind
    rank: int
    other: int
    router: int
    node: str
    seconds: float
    variant: int
    seed: int

    @property
    def target(self) -> str:
        """What it is done to, for people."""
        kind = self.kind
        if kind in COPY_FAULTS:
            return f"rank {self.rank} while rank {self.other} is drained"
        if kind in (Kind.LOSE_REQUESTS, Kind.LOSE_REPLIES):
            return f"router-{self.router} and rank {self.rank}"
        if kind in ON_ROUTERS:
            return f"router-{self.router}"
        if kind in (Kind.KILL_CONTROLLER, Kind.PAUSE_CONTROLLER):
            return "controller"
        return f"node {self.node}" if kind is Kind.KILL_NODE else f"rank {self.rank}"

    def __str__(self) -> str:
        lasts = f" for {self.seconds:.1f} s" if self.seconds else ""
        return f"#{self.number} {self.kind} {self.target} ({self.variant}){lasts}"

    @property
    def may_fail(self) -> frozenset[str]:
        """Codes of failures of common calls that it excuses."""
        return MAY_FAIL.get(self.kind, frozenset())


def draw_schedule(seed: int, count: int, kinds: tuple[Kind, ...] = tuple(Kind)) -> tuple[Act, ...]:
    """The first `count` faults of a seed. A longer schedule begins with the shorter one.

    The first round has each kind once in an order of its own; then they are drawn by WEIGHTS.
    """
    rng = np.random.default_rng((0x50A4, seed))
    first = [kinds[number] for number in rng.permutation(len(kinds))]
    weights = np.array([WEIGHTS.get(kind, 1.0) for kind in kinds])
    weights /= weights.sum()
    made = []
    for number in range(count):
        # Each act has a generator of its own: a change to what one kind draws moves no other.
        die = np.random.default_rng((0x50A4, seed, number))
        drawn = kinds[int(die.choice(len(kinds), p=weights))]
        made.append(_act(number, first[number] if number < len(first) else drawn, die))
    return tuple(made)


def _act(number: int, kind: Kind, die: np.random.Generator) -> Act:
    ranks = [r for r in range(RANKS) if kind is not Kind.KILL_SHARD or r != SPARED_RANK]
    routers = [r for r in range(ROUTERS) if kind is not Kind.KILL_ROUTER or r != SPARED_ROUTER]
    rank = ranks[int(die.integers(len(ranks)))]
    other = (rank + 1 + int(die.integers(RANKS - 1))) % RANKS
    least, most = SECONDS.get(kind, (0.0, 0.0))
    return Act(
        number=number,
        kind=kind,
        rank=rank,
        other=other,
        router=routers[int(die.integers(len(routers)))],
        node=LOSABLE_NODES[int(die.integers(len(LOSABLE_NODES)))],
        seconds=round(float(die.uniform(least, most)), 1),
        variant=int(die.integers(4)),
        seed=int(die.integers(1 << 31)),
    )
