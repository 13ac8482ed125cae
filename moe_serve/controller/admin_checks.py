"""Checks of operators' requests, and what the engine's answers mean as errors.

Responsible for typed errors that name the field and the limit. Must never ask the engine. Called by
`admin` and `admin_fleet`.
"""

from __future__ import annotations

from moe_serve.errors import (
    FailedPrecondition,
    FieldViolation,
    InvalidArgument,
    NotFound,
    ResourceExhausted,
)
from placement.messages.effects import Answer

TEXT_MAX = 200
"""Characters of a reason, plan id, policy, key, node or router name in a request."""


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


def check_count(field: str, value: int) -> None:
    """Raises InvalidArgument where a number is below 0."""
    if value < 0:
        raise wrong(field, f"{value} must be >= 0")
