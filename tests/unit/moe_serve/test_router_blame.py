"""Who is to blame for a sub-call without an answer: every error that a shard may give, one by one.

Only what the shard itself failed at may eject it. Whatever a caller did wrong, and "busy", may not,
however often.
"""

import pytest

from moe_serve.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    FieldViolation,
    InvalidArgument,
    MoeServeError,
    NotFound,
    PermissionDenied,
    ResourceExhausted,
    Unauthenticated,
    Unavailable,
)
from moe_serve.ports import SubReply
from placement.roles.router_records import RouterRules
from tests.unit.moe_serve.test_router_dispatch import a_core
from tests.unit.moe_serve.test_router_storm import a_world, outcomes

TOO_LARGE = FieldViolation("hidden_states", "the message has 9 bytes, the limit is 8")
SHARDS_OWN = [Unavailable("compute failed: RuntimeError"), Unavailable("the thread has ended")]
BUSY = [ResourceExhausted("the queue is full")]
CALLERS = [
    InvalidArgument("gates: must be finite"),
    ResourceExhausted("too large", violations=(TOO_LARGE,)),
    FailedPrecondition("of another model"),
    NotFound("no such layer"),
    DeadlineExceeded("too late"),
    Unauthenticated("no token"),
    PermissionDenied("not with this token"),
    MoeServeError("the shard failed on this request; see its log"),
]


async def suspects_after(error: MoeServeError) -> tuple[list[int], list[MoeServeError]]:
    """Ranks that are avoided after rank 1 gave this error again and again, and how the requests
    ended that failed."""
    world = a_world()
    core = a_core(world, rules=RouterRules(faults_to_eject=1))

    def gives(_reply: SubReply) -> SubReply:
        raise error

    world.shards[1].change_reply = gives
    ends = await outcomes(core, 12, at_once=1)
    suspects = [rank for rank, _, _ in core.report(0).suspects]
    await core.stop()
    return suspects, [end for end in ends if end is not None]


def name(error: MoeServeError) -> str:
    return f"{type(error).__name__}: {error.message}"


@pytest.mark.asyncio
@pytest.mark.parametrize("error", SHARDS_OWN, ids=name)
async def test_what_a_shard_fails_at_ejects_it_and_fails_no_request(error: MoeServeError) -> None:
    assert await suspects_after(error) == ([1], [])


@pytest.mark.asyncio
@pytest.mark.parametrize("error", BUSY, ids=name)
async def test_a_busy_shard_is_not_ejected_and_others_are_asked(error: MoeServeError) -> None:
    assert await suspects_after(error) == ([], [])


@pytest.mark.asyncio
@pytest.mark.parametrize("error", CALLERS, ids=name)
async def test_what_a_caller_did_wrong_ends_the_request_and_ejects_nobody(
    error: MoeServeError,
) -> None:
    suspects, ends = await suspects_after(error)
    assert suspects == []
    assert ends
    assert {type(end) for end in ends} == {type(error)}
