"""The admin client: PlacementService over gRPC, with typed errors.

Responsible for finding the address, for token and TLS, and for deadlines. Must never import Ray:
reading a service needs no driver. Called by every command that asks a running service.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Protocol

import grpc

from moe_serve.bootstrap.record import ServiceRecord, read_record
from moe_serve.cli.exits import CannotReach
from moe_serve.errors import DeadlineExceeded, InvalidArgument, NotFound, StartRefused, Unavailable
from moe_serve.rpc import placement_pb2 as pb
from moe_serve.rpc import placement_pb2_grpc
from moe_serve.rpc.auth import Role, TokenFile, bearer_metadata
from moe_serve.rpc.options import channel_credentials, channel_options
from moe_serve.rpc.status import DETAILS_KEY, from_rpc_error

CALL_TIMEOUT_S = 15.0
"""Reads and small commands."""
PLAN_TIMEOUT_S = 60.0
"""A plan is computed in the controller; its own deadline is 30 s."""
LAST_CALL_S = 2.0
"""What a call gets at least, where the time of a wait is nearly over: an answer takes its time."""
LOCALHOST = "localhost"
STEPS_PAGE = 200
PAGES_MAX = 100
"""Pages of steps read at most; a plan has fewer."""


@dataclass(frozen=True, slots=True)
class AdminTarget:
    """Where a controller listens and how to be let in. Empty = not needed."""

    address: str
    token: str = ""
    tls_ca_file: Path | None = None

    def __repr__(self) -> str:  # a token must not reach a traceback
        return f"AdminTarget({self.address!r})"


class Admin(Protocol):
    """What commands ask of a controller. Every method raises MoeServeError; CannotReach where
    nobody answers."""

    def placement(self) -> pb.GetPlacementResponse:
        """Who is where, what moves, what is wrong."""
        ...

    def watch_placement(self) -> Iterator[pb.GetPlacementResponse]:
        """The same, again at every change."""
        ...

    def load(self) -> pb.GetLoadResponse:
        """Load of the newest closed window."""
        ...

    def compute_plan(self, policy: str, max_moves: int) -> pb.PlanView:
        """A plan; nothing moves. "" and 0: as configured."""
        ...

    def plan_to(
        self, before_plan: str, target: Sequence[Sequence[int]] = ()
    ) -> pb.ComputePlanResponse:
        """A plan back to the placement before a plan ("newest": the newest that is known), or to
        the keys by rank of `target`; nothing moves."""
        ...

    def apply_plan(self, plan_id: str, validate_only: bool) -> str:
        """Run a computed plan, or only check it. Returns the controller's sentence."""
        ...

    def steps(self) -> Iterator[pb.Step]:
        """Steps of the running plan, in order."""
        ...

    def events(self, after_seq: int, follow: bool) -> Iterator[pb.DecisionRecord]:
        """Decision records after a number, oldest first; with `follow` without end."""
        ...

    def explain(self, seconds: float) -> pb.ExplainResponse:
        """Why it is slow now; looks so far back, 0 = the newest ten load windows."""
        ...

    def explain_plan(self, plan_id: str) -> pb.ExplainPlanResponse:
        """All that is known of one plan, "" = the newest."""
        ...

    def pause(self, reason: str) -> None:
        """Stop automatic plans."""
        ...

    def resume(self) -> None:
        """Let automatic plans run again."""
        ...

    def drain(self, rank: int) -> pb.DrainRankResponse:
        """Move everything off a rank."""
        ...

    def undrain(self, rank: int) -> None:
        """Let a drained rank hold replicas again."""
        ...

    def set_budget(self, rank: int, budget_bytes: int) -> pb.SetBudgetResponse:
        """Bytes of expert slots a rank may use."""
        ...

    def add_rank(
        self, group: int, node: str, again: int | None, key: str = ""
    ) -> pb.AddRankResponse:
        """One more rank of a group; `again`: a removed one back, as it was. Sent again with the
        same `key` it adds no other."""
        ...

    def remove_rank(self, rank: int, accept_lower_floor: bool) -> pb.RemoveRankResponse:
        """A rank leaves for good, once it is empty."""
        ...

    def replace_rank(
        self, rank: int, incarnation: int, accept_lower_floor: bool
    ) -> pb.ReplaceRankResponse:
        """That life of a rank's shard is replaced, once it is empty."""
        ...

    def replace_router(
        self, router: str, incarnation: int, accept_gap: bool
    ) -> pb.ReplaceRouterResponse:
        """That life of a router is replaced, once its open calls have ended."""
        ...

    def restart_controller(self, term: int) -> pb.RestartControllerResponse:
        """The controller of that term ends and is started again."""
        ...

    def within(self, seconds: float) -> AbstractContextManager[None]:
        """For a wait of so long: calls in this context end with it, where their own deadline is
        later; one that is made near its end gets LAST_CALL_S. Streams are left alone."""
        ...

    def close(self) -> None:
        """End the connection."""
        ...


def find_target(
    address: str, service: str, token_file: Path | None, tls_ca: Path | None
) -> AdminTarget:
    """Where to connect: the address given, else the one that `up` recorded on this machine.

    Token and TLS files given win over those of the record, which is used for them only where it
    is of the same address. Raises CannotReach, InvalidArgument, StartRefused.
    """
    record: ServiceRecord | None = None
    try:
        record = read_record(service)
    except NotFound as error:
        if not address:
            raise CannotReach(error.message) from error
    if address:
        _check_address(address)
        if record is not None and not same_place(record.admin_address, address):
            record = None
        elif record is not None:
            address = record.admin_address  # its token goes where it was meant to, and nowhere else
    else:
        assert record is not None
        address = record.admin_address
        if not address:
            raise CannotReach(
                f"service {record.service} is being started, or was when its `moe-serve up` was "
                f"killed; wait, or end it with `moe-serve down {record.service}`"
            )
    if record is not None:
        token_file = token_file or (Path(record.token_file) if record.token_file else None)
        tls_ca = tls_ca or (Path(record.tls_ca_file) if record.tls_ca_file else None)
    return AdminTarget(address, _token(token_file), tls_ca)


def same_place(one: str, other: str) -> bool:
    """Whether two HOST:PORT mean one place, however they are spelled. Asks no name server:
    `localhost` is either loopback address, any other name is itself alone."""
    (host, port), (other_host, other_port) = _place(one), _place(other)
    hosts = {host, other_host}
    return port == other_port and (
        host == other_host or (LOCALHOST in hosts and hosts <= {LOCALHOST, "127.0.0.1", "::1"})
    )


def _place(address: str) -> tuple[str, str]:
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]").lower()
    with suppress(ValueError):  # a name
        host = str(ip_address(host))
    return host, str(int(port)) if port.isdecimal() else port


def _check_address(address: str) -> None:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65_536:
        raise InvalidArgument(
            f"--address {address!r} is not host:port; it is the admin address that `up` printed"
        )


def _token(file: Path | None) -> str:
    """The admin token of the file, or its read token where it has no other."""
    if file is None:
        return ""
    tokens = TokenFile(file)
    try:
        return tokens.token(Role.ADMIN)
    except StartRefused:
        return tokens.token(Role.READ)


def _from_service(error: Any) -> bool:
    """Whether the service itself said so (no window yet, between two lives), not the transport."""
    trailing = getattr(error, "trailing_metadata", None)
    return any(key == DETAILS_KEY for key, _ in (trailing() if callable(trailing) else None) or ())


class GrpcAdmin:
    """`Admin` over one gRPC channel."""

    def __init__(self, target: AdminTarget) -> None:
        self._address = target.address
        # A proxy of the environment is for the world outside, not for the cluster's own ports.
        options: list[tuple[str, Any]] = [*channel_options(), ("grpc.enable_http_proxy", 0)]
        if target.tls_ca_file is not None:
            credentials = channel_credentials(target.tls_ca_file)
            self._channel = grpc.secure_channel(target.address, credentials, options=options)
        else:
            self._channel = grpc.insecure_channel(target.address, options=options)
        self._metadata = bearer_metadata(target.token) if target.token else ()
        self._stub: Any = placement_pb2_grpc.PlacementServiceStub(self._channel)
        self._ends_s = float("inf")

    def placement(self) -> pb.GetPlacementResponse:
        """See `Admin.placement`."""
        answer: pb.GetPlacementResponse = self._call("GetPlacement", pb.GetPlacementRequest())
        return answer

    def watch_placement(self) -> Iterator[pb.GetPlacementResponse]:
        """See `Admin.watch_placement`."""
        for answer in self._stream("WatchPlacement", pb.WatchPlacementRequest()):
            yield answer.placement

    def load(self) -> pb.GetLoadResponse:
        """See `Admin.load`."""
        answer: pb.GetLoadResponse = self._call("GetLoad", pb.GetLoadRequest())
        return answer

    def compute_plan(self, policy: str, max_moves: int) -> pb.PlanView:
        """See `Admin.compute_plan`."""
        request = pb.ComputePlanRequest(policy=policy, max_moves=max_moves)
        answer: pb.ComputePlanResponse = self._call("ComputePlan", request, PLAN_TIMEOUT_S)
        return answer.plan

    def plan_to(
        self, before_plan: str, target: Sequence[Sequence[int]] = ()
    ) -> pb.ComputePlanResponse:
        """See `Admin.plan_to`."""
        request = pb.ComputePlanRequest(
            before_plan=before_plan,
            target=[pb.RankTarget(rank=rank, experts=keys) for rank, keys in enumerate(target)],
        )
        answer: pb.ComputePlanResponse = self._call("ComputePlan", request, PLAN_TIMEOUT_S)
        return answer

    def apply_plan(self, plan_id: str, validate_only: bool) -> str:
        """See `Admin.apply_plan`."""
        request = pb.ApplyPlanRequest(plan_id=plan_id, validate_only=validate_only)
        return str(self._call("ApplyPlan", request, PLAN_TIMEOUT_S).message)

    def steps(self) -> Iterator[pb.Step]:
        """See `Admin.steps`."""
        token = ""
        for _ in range(PAGES_MAX):
            answer = self._call(
                "ListSteps", pb.ListStepsRequest(page_size=STEPS_PAGE, page_token=token)
            )
            yield from answer.steps
            token = answer.next_page_token
            if not token:
                return

    def events(self, after_seq: int, follow: bool) -> Iterator[pb.DecisionRecord]:
        """See `Admin.events`."""
        request = pb.WatchEventsRequest(after_seq=after_seq, no_follow=not follow)
        for answer in self._stream("WatchEvents", request, None if follow else CALL_TIMEOUT_S):
            yield answer.record

    def explain(self, seconds: float) -> pb.ExplainResponse:
        """See `Admin.explain`."""
        answer: pb.ExplainResponse = self._call("Explain", pb.ExplainRequest(seconds=seconds))
        return answer

    def explain_plan(self, plan_id: str) -> pb.ExplainPlanResponse:
        """See `Admin.explain_plan`."""
        request = pb.ExplainPlanRequest(plan_id=plan_id)
        answer: pb.ExplainPlanResponse = self._call("ExplainPlan", request)
        return answer

    def pause(self, reason: str) -> None:
        """See `Admin.pause`."""
        self._call("Pause", pb.PauseRequest(reason=reason))

    def resume(self) -> None:
        """See `Admin.resume`."""
        self._call("Resume", pb.ResumeRequest())

    def drain(self, rank: int) -> pb.DrainRankResponse:
        """See `Admin.drain`."""
        request = pb.DrainRankRequest(rank=rank)
        answer: pb.DrainRankResponse = self._call("DrainRank", request, PLAN_TIMEOUT_S)
        return answer

    def undrain(self, rank: int) -> None:
        """See `Admin.undrain`."""
        self._call("UndrainRank", pb.UndrainRankRequest(rank=rank))

    def set_budget(self, rank: int, budget_bytes: int) -> pb.SetBudgetResponse:
        """See `Admin.set_budget`."""
        request = pb.SetBudgetRequest(rank=rank, budget_bytes=budget_bytes)
        answer: pb.SetBudgetResponse = self._call("SetBudget", request, PLAN_TIMEOUT_S)
        return answer

    def add_rank(
        self, group: int, node: str, again: int | None, key: str = ""
    ) -> pb.AddRankResponse:
        """See `Admin.add_rank`."""
        request = pb.AddRankRequest(group=group, node=node, rank=again, key=key)
        answer: pb.AddRankResponse = self._call("AddRank", request, PLAN_TIMEOUT_S)
        return answer

    def remove_rank(self, rank: int, accept_lower_floor: bool) -> pb.RemoveRankResponse:
        """See `Admin.remove_rank`."""
        request = pb.RemoveRankRequest(rank=rank, accept_lower_floor=accept_lower_floor)
        answer: pb.RemoveRankResponse = self._call("RemoveRank", request, PLAN_TIMEOUT_S)
        return answer

    def replace_rank(
        self, rank: int, incarnation: int, accept_lower_floor: bool
    ) -> pb.ReplaceRankResponse:
        """See `Admin.replace_rank`."""
        request = pb.ReplaceRankRequest(
            rank=rank, incarnation=incarnation, accept_lower_floor=accept_lower_floor
        )
        answer: pb.ReplaceRankResponse = self._call("ReplaceRank", request, PLAN_TIMEOUT_S)
        return answer

    def replace_router(
        self, router: str, incarnation: int, accept_gap: bool
    ) -> pb.ReplaceRouterResponse:
        """See `Admin.replace_router`."""
        request = pb.ReplaceRouterRequest(
            router=router, incarnation=incarnation, accept_gap=accept_gap
        )
        answer: pb.ReplaceRouterResponse = self._call("ReplaceRouter", request, PLAN_TIMEOUT_S)
        return answer

    def restart_controller(self, term: int) -> pb.RestartControllerResponse:
        """See `Admin.restart_controller`."""
        request = pb.RestartControllerRequest(term=term)
        answer: pb.RestartControllerResponse = self._call("RestartController", request)
        return answer

    @contextmanager
    def within(self, seconds: float) -> Iterator[None]:
        """See `Admin.within`."""
        before_s = self._ends_s
        self._ends_s = min(before_s, time.monotonic() + seconds)
        try:
            yield
        finally:
            self._ends_s = before_s

    def close(self) -> None:
        """See `Admin.close`."""
        self._channel.close()

    def _call(self, method: str, request: Any, timeout_s: float = CALL_TIMEOUT_S) -> Any:
        left_s = max(LAST_CALL_S, self._ends_s - time.monotonic())
        with self._typed(method):
            call = getattr(self._stub, method)
            return call(request, timeout=min(timeout_s, left_s), metadata=self._metadata)

    def _stream(self, method: str, request: Any, timeout_s: float | None = None) -> Iterator[Any]:
        with self._typed(method):
            answers = getattr(self._stub, method)(
                request, timeout=timeout_s, metadata=self._metadata
            )
            try:
                yield from answers
            finally:
                answers.cancel()

    @contextmanager
    def _typed(self, method: str) -> Iterator[None]:
        try:
            yield
        except grpc.RpcError as failed:
            error = from_rpc_error(failed)
            if isinstance(error, Unavailable | DeadlineExceeded) and not _from_service(failed):
                raise CannotReach(
                    f"{method}: the controller at {self._address} does not answer "
                    f"({error.message}); is the service up? `moe-serve doctor` looks"
                ) from failed
            raise error from failed
