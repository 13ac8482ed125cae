"""Terms: the number that fences controllers, and how one is claimed.

Responsible for: term = 1 + the greatest anybody has seen, claimed by an atomic create-if-absent,
the loser trying the next; first epoch = 1 + the greatest anybody has seen. Must never be skipped
before a command is sent. Called when a life begins.
"""

from __future__ import annotations

from collections.abc import Iterable

from moe_serve.controller.journal import Journal
from moe_serve.errors import Unavailable
from moe_serve.ports import Fleet, RouterInfo, ShardInfo

CLAIMS_MAX = 64
"""Terms tried in one go: each loss means that another controller won, so more is no accident."""


async def claim_term(fleet: Fleet, journal: Journal, seen: Iterable[int]) -> int:
    """Claim the next free term above all of `seen` and all claimed ones.

    The intention is journalled first: a journal that knows of no claim as high as the newest is not
    the newest controller's. Raises Unavailable after CLAIMS_MAX losses.
    """
    term = max([0, await fleet.highest_term(), *seen])
    for _ in range(CLAIMS_MAX):
        term += 1
        await journal.intend_term(term)
        if await fleet.claim_term(term):
            return term
        term = max(term, await fleet.highest_term())
    raise Unavailable(
        f"no term could be claimed in {CLAIMS_MAX} tries; is another controller alive?"
    )


def first_epoch(
    journal_epoch: int, shards: Iterable[ShardInfo], routers: Iterable[RouterInfo]
) -> int:
    """Number of the first table that a new controller may publish."""
    return 1 + max(
        [
            journal_epoch,
            *(s.highest_epoch for s in shards),
            *(r.highest_epoch for r in routers),
        ]
    )
