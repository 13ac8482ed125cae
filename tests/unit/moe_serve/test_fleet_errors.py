"""What the fleet makes of a cluster whose head does not answer: a typed error, no verdict on a
part."""

from typing import Any

import pytest
import ray
from ray.exceptions import RayError

from moe_serve.bootstrap.fleet import RayFleet
from moe_serve.errors import Unavailable


@pytest.mark.asyncio
async def test_a_head_that_is_away_is_unavailable(monkeypatch: pytest.MonkeyPatch) -> None:
    def away(*_args: Any, **_more: Any) -> None:
        raise RayError("timed out")

    monkeypatch.setattr(ray, "get_actor", away)
    fleet = RayFleet(None)  # type: ignore[arg-type]  # the plan is not looked at
    with pytest.raises(Unavailable, match="Ray gives no answer: RayError"):
        await fleet.alive("tiny:shard:0:1")
    with pytest.raises(Unavailable):
        await fleet.find_shard("tiny:shard:0:1")
