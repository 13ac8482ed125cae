"""Checks of operators' requests, and what the engine's answers mean as errors.

Responsible for typed errors that name the field and the limit. Must never ask the engine. Called by
`admin` and `admin_fleet`.
"""

from __future__ import annotations

from collections.abc import Iterable

from moe_serve.errors import (
    FailedPrecondition,
    FieldViolation,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
)
from moe_serve.ports import NodeInfo
from placement.messages.effects import Answer

TEXT_MAX = 200
"""Characters of a reason, plan id, policy, key, node or router name in a request."""
NODES_SHOWN_MAX = 8
"""Nodes that a refusal names at most."""


def raise_for(answer: Answer) -> None:
    """Raise the error an answer is; return where it is ok."""
    if answer.code == "ok":
        return
    text = answer.message
    if answer.missing_bytes:
        violations = (FieldViolation("missing_bytes", str(answer.missing_bytes)),)
        raise FailedPrecondition(text, violations=violations)
    if answer.code == "not_found":
        raise NotFound(text)
    if answer.code == "busy":
        raise ResourceExhausted(text, retry_after_s=1.0)
    raise FailedPrecondition(text)


def wrong(field: str, description: str) -> InvalidArgument:
    """The error of one field."""
    return InvalidArgument(
        f"{field}: {description}", violations=(FieldViolation(field, description),)
    )


def check_text(field: str, text: str, *, needed: bool = False) -> None:
    """Raises InvalidArgument where a text is too long, or missing."""
    if len(text) > TEXT_MAX:
        raise wrong(field, f"has {len(text)} characters, at most {TEXT_MAX} are taken")
    if needed and not text:
        raise wrong(field, "must be given")


def check_rank(rank: int, count: int) -> None:
    """Raises InvalidArgument where a service of `count` ranks has none of that number."""
    if not 0 <= rank < count:
        raise wrong("rank", f"{rank} must lie in [0, {count}); see `moe-serve status`")


def check_node(node: str, nodes: Iterable[NodeInfo]) -> None:
    """Raises InvalidArgument where no alive node has that name. No nodes at all = the cluster gave
    no answer: anything may be right then."""
    known = sorted({one.node for one in nodes if one.alive})
    if not known or node in known:
        return
    more = len(known) - NODES_SHOWN_MAX
    named = ", ".join(known[:NODES_SHOWN_MAX]) + (f" and {more} more" if more > 0 else "")
    raise wrong(
        "node", f"the cluster has no alive node {node!r}; leave it out, or name one of {named}"
    )


def check_count(field: str, value: int) -> None:
    """Raises InvalidArgument where a number is below 0."""
    if value < 0:
        raise wrong(field, f"{value} must be >= 0")
