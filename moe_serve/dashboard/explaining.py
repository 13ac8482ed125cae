"""Why it is slow, for browsers: the controller's explanation as JSON, asked seldom.

Answers are kept for a moment, so that fifty tabs cost the controller one call. Where it cannot be
asked the answer says so as a cause of its own, since nothing else about speed is known then.

Responsible for the form and for asking seldom. Must never draw a conclusion from figures. Called by
`reading`.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from moe_serve.dashboard.frames import Json, record_view
from moe_serve.explain import words
from moe_serve.rpc import placement_pb2 as pb

KEYS_MAX = 16
"""Different questions whose answers are kept."""
_T = TypeVar("_T")


class Kept:
    """Answers of the controller by question, each asked again once it is `ttl_s` old.

    Whoever asks while the same question is under way waits for that answer.
    """

    def __init__(self, clock_s: Callable[[], float], ttl_s: float) -> None:
        self._clock_s = clock_s
        self._ttl_s = ttl_s
        self._kept: OrderedDict[Any, tuple[float, Any]] = OrderedDict()
        self._under_way: dict[Any, asyncio.Task[Any]] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._generation = 0

    async def ask(self, key: Any, call: Callable[[], Awaitable[_T]]) -> tuple[_T, float]:
        """(answer, its age in seconds). Raises what the call raises; that is not kept."""
        known = self._kept.get(key)
        if known is not None and self._clock_s() - known[0] < self._ttl_s:
            return known[1], self._clock_s() - known[0]
        task = self._under_way.get(key)
        if task is None:
            task = asyncio.create_task(self._put(key, call, self._generation))
            self._under_way[key] = task
            self._tasks.add(task)
            task.add_done_callback(lambda ended: self._ended(key, ended))
        # Shielded: one asker that leaves must not take the answer of the others along.
        at_s, answer = await asyncio.shield(task)
        return answer, self._clock_s() - at_s

    async def _put(
        self, key: Any, call: Callable[[], Awaitable[Any]], generation: int
    ) -> tuple[float, Any]:
        found = (self._clock_s(), await call())
        if generation != self._generation:
            return found
        self._kept[key] = found
        self._kept.move_to_end(key)
        while len(self._kept) > KEYS_MAX:
            self._kept.popitem(last=False)
        return found

    def _ended(self, key: Any, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if self._under_way.get(key) is task:
            del self._under_way[key]
        if not task.cancelled():
            task.exception()  # whoever asked may have left: then nobody else looks at it

    def last_age_s(self) -> float | None:
        """Age of the newest answer to any question, None before the first."""
        if not self._kept:
            return None
        return self._clock_s() - max(at_s for at_s, _ in self._kept.values())

    def close(self) -> None:
        """Let nothing run on."""
        for task in list(self._tasks):
            task.cancel()

    def forget(self) -> None:
        """Ask anew next time: something was changed. Whoever waits for an answer gets it; nobody
        else does."""
        self._generation += 1
        self._kept.clear()
        self._under_way.clear()


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
        "newest": record_view(answer.newest, 0) if answer.HasField("newest") else None,
        "wall_s": wall_s,
        "last_answer_age_s": age_s,
    }


def controller_away(*, wall_s: float, age_s: float | None) -> Json:
    """Document where nobody answered. age_s: of the last answer there was, None = none yet."""
    document = explanation(pb.ExplainResponse(verdict="slow"), wall_s=wall_s, age_s=0.0)
    cause = words.controller_away()
    document["last_answer_age_s"] = age_s
    document["causes"] = [
        {
            "kind": cause.kind.value,
            "share": cause.share,
            "text": words.sentence(cause),
            "next_step": words.next_step(cause),
            "rank": cause.rank,
            "layer": cause.layer,
            "expert": cause.expert,
            "evidence": {} if age_s is None else {"last_answer_age_s": age_s},
        }
    ]
    return document
