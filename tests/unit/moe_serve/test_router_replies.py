"""Replies that do not answer what was asked: each is the shard's fault, and nothing of it is
added."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from moe_serve.ports import SubReply
from placement.roles.router_records import RouterRules
from tests.unit.moe_serve.test_router_dispatch import a_core
from tests.unit.moe_serve.test_router_storm import a_world, outcomes

WRONG: dict[str, Callable[[SubReply], SubReply]] = {
    "of the next sub-call": lambda r: replace(r, sub_id=r.sub_id + 1),
    "of the sub-call before": lambda r: replace(r, sub_id=r.sub_id - 1),
    "of a row less": lambda r: replace(r, row_status=r.row_status[:-1]),
    "of a row more": lambda r: replace(r, row_status=np.append(r.row_status, r.row_status[:1])),
    "of an unknown status": lambda r: replace(r, row_status=np.full_like(r.row_status, 3)),
    "of an unknown refusal": lambda r: replace(
        r, row_status=np.full_like(r.row_status, 3), partial=r.partial[:0]
    ),
    "of an unknown refusal among rows": lambda r: replace(
        r,
        row_status=np.append(r.row_status[:-1], np.uint8(255)),
        partial=r.partial[: int(np.count_nonzero(r.row_status[:-1] == 0))],
    ),
    "of a sum less": lambda r: replace(r, partial=r.partial[:-1]),
    "of a sum more": lambda r: replace(r, partial=np.concatenate([r.partial, r.partial[:1]])),
    "of narrower rows": lambda r: replace(r, partial=r.partial[:, :-1]),
    "of another type": lambda r: replace(r, partial=r.partial.astype(np.float64)),
}


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", WRONG)
async def test_a_reply_that_is_not_the_answer_is_dropped_and_counts_against_its_shard(
    kind: str,
) -> None:
    world = a_world()
    core = a_core(world, rules=RouterRules(faults_to_eject=2))
    world.shards[1].change_reply = WRONG[kind]
    assert await outcomes(core, 8, at_once=1) == [None] * 8  # each is compared with the oracle
    report = core.report(0)
    assert report.counters["malformed_replies"] >= 2
    assert [rank for rank, _, _ in report.suspects] == [1]
    assert core.role.open_sub_calls == 0
    await core.stop()
