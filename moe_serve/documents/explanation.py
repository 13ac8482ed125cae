"""Why it is slow, as a document: the controller's explanation, or that nobody explains.

Responsible for its form, and for which errors mean that nobody does. Must never draw a conclusion
from figures. Called by page and command line.
"""

from __future__ import annotations

from moe_serve.documents.views import Json, record_view
from moe_serve.errors import DeadlineExceeded, FailedPrecondition, MoeServeError, Unavailable
from moe_serve.explain import words
from moe_serve.rpc import placement_pb2 as pb

_NO_ANSWER = frozenset({Unavailable.code, DeadlineExceeded.code})


def does_not_start(error: MoeServeError) -> bool:
    """Whether a controller answered only to say that it does not start."""
    refused = error.code == FailedPrecondition.code
    return refused and error.message.startswith(words.NO_START)


def is_away(error: MoeServeError) -> bool:
    """Whether there is no controller that could explain: nobody answers, it is between two lives,
    or it does not start.

    By code, since callers have types of their own for the first.
    """
    return error.code in _NO_ANSWER or does_not_start(error)


def explanation(answer: pb.ExplainResponse, *, wall_s: float, age_s: float) -> Json:
    """Document of the controller's explanation. wall_s: now; age_s: of the answer."""
    return {
        "verdict": answer.verdict,
        "causes": [
            {
                "kind": cause.kind,
                "share": cause.share,
                "text": cause.text,
                "next_step": cause.next_step,
                "rank": cause.rank,
                "layer": cause.layer,
                "expert": cause.expert,
                "evidence": dict(sorted(cause.evidence.items())),
            }
            for cause in answer.causes
        ],
        "stages": [
            {
                "phase": stage.phase,
                "stage": stage.stage,
                "requests": stage.requests,
                "seconds": stage.seconds,
                "p50_s": stage.p50_s,
                "p99_s": stage.p99_s,
                "buckets": list(stage.buckets),
            }
            for stage in answer.stages
        ],
        "ranks": [
            {
                "rank": part.rank,
                "sub_calls": part.sub_calls,
                "last": part.last,
                "late_s": part.late_s,
                "wire_s": part.wire_s,
                "wait_s": part.wait_s,
                "compute_s": part.compute_s,
                "pairs": part.pairs,
                "slowness": part.slowness,
            }
            for part in answer.ranks
        ],
        "bounds_s": list(answer.bounds_s),
        "seconds": answer.seconds,
        "age_s": answer.age_s,
        "requests": answer.requests,
        "mean_s": answer.mean_s,
        "p99_s": answer.p99_s,
        "newest": record_view(answer.newest) if answer.HasField("newest") else None,
        "wall_s": wall_s,
        "last_answer_age_s": age_s,
    }


def controller_away(reason: str, *, wall_s: float, age_s: float | None) -> Json:
    """Document where nobody answered. reason: what the call ended with; age_s: of the last answer
    there was, None = none yet."""
    cause = words.controller_away()
    told = pb.Cause(
        kind=cause.kind.value,
        share=cause.share,
        text=words.sentence(cause),
        next_step=words.next_step(cause),
        rank=cause.rank,
        layer=cause.layer,
        expert=cause.expert,
        evidence={} if age_s is None else {"last_answer_age_s": age_s},
    )
    document = explanation(
        pb.ExplainResponse(verdict="slow", causes=[told]), wall_s=wall_s, age_s=0.0
    )
    return document | {"last_answer_age_s": age_s, "reason": reason}
