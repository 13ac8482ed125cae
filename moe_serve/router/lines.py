"""What a router writes into its log of single requests: those that failed, were sent a second time,
or were slow.

In a storm all of them would be alike, so of each kind one line is written now and then and says
how many were left out.

Responsible for these lines and their bound. Must never write what a caller sent but its request's
id. Called by `service` and `second_tries`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

from moe_serve.errors import MoeServeError
from moe_serve.router.checks import ForwardInput
from moe_serve.router.flight import ANSWER, ForwardOutput, Stamps
from moe_serve.router.settings import RouterSettings
from moe_serve.router.stages import Stages
from moe_serve.stage_counts import STAGES
from moe_serve.telemetry import make_logger
from placement.roles.router import RouterRole

QUIET_S: Final = MappingProxyType(
    {"request failed": 0.1, "slow request": 0.1, "call sent again": 1.0}
)
"""Time between two lines, by what they say."""


class RouterLines:
    """Of one router life. `clock` gives monotonic seconds; `role` knows the newest table."""

    def __init__(
        self, settings: RouterSettings, clock: Callable[[], float], role: RouterRole
    ) -> None:
        self._log = make_logger(
            part=settings.router, node=settings.node, incarnation=settings.incarnation
        )
        self._clock = clock
        self._role = role
        self._quiet_until_s: dict[str, float] = {}
        self._left_out: dict[str, int] = {}

    def failed(self, error: MoeServeError, request_id: str, layer: int) -> None:
        """A request failed. A caller's fault is told to the caller alone, and so is a full
        queue."""
        if error.code == "INTERNAL":
            self._log.error(
                "request failed",
                **self._known(request_id),
                layer=layer,
                cause=repr(error.__cause__ or error),
            )
        elif error.code == "UNAVAILABLE":
            self._now_and_then(
                "request failed", request_id, {"layer": layer, "cause": error.message}
            )

    def sent_again(self, request_id: str, layer: int, cause: str) -> None:
        """A call of a request is sent again. cause: "retry" or "hedge"."""
        self._now_and_then("call sent again", request_id, {"layer": layer, "cause": cause})

    def slow(
        self, request: ForwardInput, output: ForwardOutput, stamps: Stamps, ended_s: float
    ) -> None:
        """A request was answered, and late. Says where its time went, by stage, and the rank whose
        answer came last."""
        if self._is_quiet("slow request"):
            return
        own = Stages()
        own.answered(request.phase, stamps, ended_s)
        spent_s = own.counts().seconds[request.phase].tolist()
        said: dict[str, Any] = {
            "term": output.term,
            "epoch": output.epoch,
            "layer": request.layer,
            "rows": int(request.hidden.shape[0]),
            "phase": request.phase.name.lower(),
            "seconds": round(ended_s - stamps.began_s, 6),
            "stages_s": {name: round(s, 6) for name, s in zip(STAGES, spent_s, strict=True)},
        }
        if stamps.answers:
            said["last_rank"] = int(stamps.answers[-len(ANSWER)])
        self._now_and_then("slow request", request.request_id, said)

    def _now_and_then(self, event: str, request_id: str, said: Mapping[str, Any]) -> None:
        if self._is_quiet(event):
            return
        left_out = self._left_out.pop(event, 0)
        say = self._log.warning if event != "call sent again" else self._log.info
        say(event, **{**self._known(request_id), **said}, more_before=left_out)
        self._quiet_until_s[event] = self._clock() + QUIET_S[event]

    def _is_quiet(self, event: str) -> bool:
        """Whether the last such line was written just now; counts what is left out then."""
        quiet = self._clock() < self._quiet_until_s.get(event, 0.0)
        if quiet:
            self._left_out[event] = self._left_out.get(event, 0) + 1
        return quiet

    def _known(self, request_id: str) -> dict[str, Any]:
        table = self._role.table
        known = {} if table is None else {"term": table.term, "epoch": table.epoch}
        return {**known, "request_id": request_id}
