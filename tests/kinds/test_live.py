"""Standing still with a healthy face: a rebalance that hangs while all answers say "fine", and a
step that waits for a rank that has nothing to do."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest

from moe_serve.controller.views import placement_view
from moe_serve.rpc import placement_pb2 as pb
from tests.fakes.controller import Rig, controller, make_cluster, make_settings, until
from tests.fakes.served import EXPERTS, TOP_K, Served, a_request, check, serving


def ended(rig: Rig) -> set[str]:
    """Rules of the records that say that something was aborted."""
    kept = rig.service.book.newest(1000)
    return {one.record.rule for one in kept if one.record.outcome == "aborted"}


@pytest.mark.asyncio
async def test_a_rebalance_that_hangs_is_told_counted_aborted_and_followed_by_the_next(
    tmp_path: Path,
) -> None:
    cluster = make_cluster()
    async with controller(make_settings(tmp_path), cluster) as rig:
        await rig.ready()
        cluster.copy_s = 3600.0
        cluster.demand = {0: 400, 1: 10, 2: 10, 3: 10}

        def view() -> pb.GetPlacementResponse:
            return placement_view(rig.service.sight())

        await until(lambda: any("rebalance stalled" in p for p in view().problems))
        assert view().plans_stalled == 1
        assert view().state == "degraded"
        await until(lambda: "plan_stalled" in ended(rig))
        assert rig.service.describe()["ready"], "nobody's tokens wait for it"
        cluster.copy_s = 0.0
        await until(lambda: len(rig.listed(0)) >= 2 and rig.state.run is None, wait_s=20.0)
        await until(lambda: not any("stalled" in p for p in view().problems), wait_s=20.0)


ROWS_OF = {
    "no rows": np.zeros((0, TOP_K), np.int32),
    "one row": np.array([[0, 1, 2]], np.int32),
    "all rows to the same three experts": np.tile(np.array([[0, 1, 2]], np.int32), (500, 1)),
    "one expert gets them all": np.full((200, 1), 4, np.int32),
    "no pair is valid": np.full((7, TOP_K), EXPERTS, np.int32),
}


@pytest.mark.asyncio
@pytest.mark.parametrize("what", ROWS_OF)
async def test_ranks_without_rows_hold_nobody_up(what: str) -> None:
    """Eight ranks of which most have nothing to do, no rows at all: right shape, soon."""
    ids = ROWS_OF[what]
    rows, k = ids.shape
    valid = np.full((rows, k), "valid" not in what, np.uint8)
    rng = np.random.default_rng(2)
    served = Served(8, copies=1, num_slots=3)
    async with serving(served) as (router,):
        request = a_request(
            rows,
            hidden=rng.standard_normal((rows, 8)).astype(np.float32),
            topk_ids=ids,
            gates=np.ones((rows, k), np.float32),
            valid=valid,
        )
        began_s = asyncio.get_running_loop().time()
        got = await router.forward(request, 10.0)
        took_s = asyncio.get_running_loop().time() - began_s
        check(request, got)
        print(f"{what}: {took_s * 1e3:.1f} ms (bar 1 s)")
        asked = {channel.address.rank for channel in served.channels if channel.calls}
        assert len(asked) <= max(1, len(np.unique(ids)))
