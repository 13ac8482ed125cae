"""The spans of a shard: one for each sub-call that comes with a trace.

Responsible for what they say. Must never change or delay an answer: a span is taken once the answer
is on its way. Called by `server`, only where traces are on.
"""

from __future__ import annotations

from collections.abc import Callable

from moe_serve.errors import MoeServeError
from moe_serve.ports import SubCall, SubReply
from moe_serve.rpc.trace_context import parse
from moe_serve.shard.work_queue import ReplyTo
from moe_serve.telemetry.traces import Span, SpanKind, Traces, Value
from placement.roles.shard import ShardSlots
from placement.topology import Phase


class SubCallSpans:
    """Of one shard life. `clock` gives monotonic seconds."""

    def __init__(self, traces: Traces, slots: ShardSlots, clock: Callable[[], float]) -> None:
        self._traces = traces
        self._slots = slots
        self._clock = clock

    def of(self, call: SubCall, answer: ReplyTo) -> ReplyTo:
        """`answer`, after which the sub-call's span ends. What names no sound span has none."""
        parent = parse(call.trace)[0]
        context = None if parent is None else self._traces.begin(parent)
        if parent is None or context is None:
            return answer
        began_s = self._clock()

        def answer_and_tell(result: SubReply | MoeServeError) -> None:
            answer(result)
            self._traces.ended(
                Span(
                    name="shard",
                    kind=SpanKind.SERVER,
                    context=context,
                    parent_span_id=parent.span_id,
                    began_s=began_s,
                    ended_s=self._clock(),
                    failed=isinstance(result, MoeServeError),
                    attributes=self._said(call, result),
                )
            )

        return answer_and_tell

    def _said(self, call: SubCall, result: SubReply | MoeServeError) -> dict[str, Value]:
        said: dict[str, Value] = {
            "rank": self._slots.rank,
            "incarnation": self._slots.incarnation,
            "layer": call.layer,
            "phase": Phase(call.phase).name.lower(),
            "cause": call.cause.name.lower(),
            "rows": len(call.row_id),
            "pairs": len(call.pair_row),
            "request_id": call.request_id,
        }
        if isinstance(result, MoeServeError):
            return {**said, "outcome": result.code.lower()}
        # A detail begins with the word that says why; what follows may name slots.
        refused = bool(result.row_status.any())
        return {
            **said,
            "outcome": "refused" if refused else "ok",
            "term": result.term,
            "epoch": result.epoch,
            "wait_s": result.queue_s + result.rest_s,
            "compute_s": result.compute_s,
        }
