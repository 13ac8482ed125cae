"""Targets of the gRPC edge: what tenants, operators and peers may send, and what clients read."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from functools import cache, partial
from types import SimpleNamespace
from typing import Any

import grpc
import numpy as np
from google.protobuf.message import DecodeError, Message

from moe_serve.controller.admin import PlacementServicer
from moe_serve.controller.book import Book
from moe_serve.controller.parts import PartTable
from moe_serve.controller.recent import Recent
from moe_serve.controller.stages import StageFolder
from moe_serve.errors import MoeServeError, StartRefused, Unauthenticated
from moe_serve.router.checks import ForwardInput, check_forward
from moe_serve.router.flight import ForwardOutput
from moe_serve.router.service import DispatchServicer
from moe_serve.router.settings import RouterSettings
from moe_serve.rpc import codec, dispatch_pb2, dispatch_pb2_grpc, placement_pb2
from moe_serve.rpc.auth import TokenFile
from moe_serve.rpc.status import DETAILS_KEY, from_item_error, from_rpc_error, to_status
from moe_serve.rpc.undecodable import DecodeInterceptor
from moe_serve.telemetry.traces import NO_TRACES
from placement.config import RebalanceConfig
from placement.engine import RebalanceEngine
from placement.messages.codec import decode_event, encode
from placement.messages.effects import Answer
from tests.builders import PROFILE, make_spec, make_topology
from tests.fake_shards import HIDDEN, marker_spec
from tests.fuzz import mutations
from tests.fuzz.target import Target, joined, pieces, refused, scratch

SPEC = marker_spec()
MESSAGE_BYTES_MAX = 16_384
STATUS_BYTES_MAX = 8192
"""Trailing metadata that common peers take."""
ITEMS_MAX = 8


# ------------------------------------------------------------------------------------- Forward
def forward_messages() -> list[dispatch_pb2.ForwardRequest]:
    ids = np.array([[0, 1], [2, 5], [4, 3]], np.int32)
    rows = {
        codec.FP32: np.ones((3, HIDDEN), np.float32),
        codec.BF16: np.full((3, HIDDEN), 0x3F80, np.uint16),
        codec.FP16: np.ones((3, HIDDEN), np.float16),
    }
    made = [
        codec.ForwardArrays("marker", 1, 1, kind, hidden, ids, np.full((3, 2), 0.5, np.float32))
        for kind, hidden in rows.items()
    ]
    masks = codec.ForwardArrays(
        "",
        0,
        2,
        codec.FP32,
        rows[codec.FP32],
        np.array([[9], [-1], [1]], np.int32),
        np.array([[np.nan], [1], [-1]], np.float32),
        request_id="r" * 128,
        attempt=100,
        row_valid=np.array([False, True, True]),
        pair_valid=np.array([[True], [False], [True]]),
    )
    none = codec.ForwardArrays(
        "marker",
        0,
        1,
        codec.FP32,
        np.ones((0, HIDDEN), np.float32),
        np.ones((0, 3), np.int32),
        np.ones((0, 3), np.float32),
    )
    return [codec.forward_request(arrays) for arrays in (*made, masks, none)]


def fits_metadata(error: MoeServeError) -> bool:
    assert to_status(error).ByteSize() <= STATUS_BYTES_MAX
    return refused(error)


def same_again(found: ForwardInput, model: str) -> None:
    """What was read, sent again, is read the same."""
    arrays = codec.ForwardArrays(
        model,
        found.layer,
        int(found.phase) + 1,
        int(found.dtype),
        found.hidden,
        found.topk_ids,
        found.gates,
        request_id=found.request_id,
        attempt=found.attempt,
        pair_valid=found.valid.astype(bool),
    )
    again = check_forward(codec.forward_request(arrays), SPEC, 2 * MESSAGE_BYTES_MAX)
    for name in ("hidden", "topk_ids", "gates", "valid"):
        one, other = getattr(found, name), getattr(again, name)
        assert one.shape == other.shape, name
        assert one.tobytes() == other.tobytes(), name
    assert (found.layer, found.phase, found.dtype) == (again.layer, again.phase, again.dtype)


def look_at(found: ForwardInput) -> None:
    """Limits of what the router goes on with."""
    rows, width = found.topk_ids.shape
    assert found.hidden.shape == (rows, SPEC.hidden_size)
    assert found.gates.shape == found.valid.shape == (rows, width)
    assert 1 <= width <= SPEC.top_k
    assert 0 <= found.layer < SPEC.num_layers
    used = found.valid.astype(bool)
    assert ((found.topk_ids[used] >= 0) & (found.topk_ids[used] < SPEC.num_experts)).all()
    assert np.isfinite(found.gates[used]).all()
    for ids, valid in zip(found.topk_ids, used, strict=True):
        assert len(set(ids[valid].tolist())) == int(valid.sum())
    assert not found.hidden.flags.writeable


def dispatch_forward(data: bytes) -> bool:
    try:
        request = dispatch_pb2.ForwardRequest.FromString(data)
    except DecodeError:
        return False
    try:
        found = check_forward(request, SPEC, MESSAGE_BYTES_MAX)
    except MoeServeError as error:
        return fits_metadata(error)
    look_at(found)
    same_again(found, request.model)
    return True


# -------------------------------------------------------------------------------------- streams
class Aborted(Exception):
    """What a call was ended with."""

    def __init__(self, code: grpc.StatusCode) -> None:
        super().__init__(code.name)
        self.code = code


class Context:
    """A call without a wire."""

    def __init__(self, left_s: float | None = 10.0) -> None:
        self._left_s = left_s

    def time_remaining(self) -> float | None:
        return self._left_s

    async def abort(
        self, code: grpc.StatusCode, details: str = "", trailing_metadata: Any = ()
    ) -> None:
        assert details
        assert sum(len(value) for _, value in trailing_metadata) <= STATUS_BYTES_MAX
        raise Aborted(code)


class Core:
    """A router's core that answers every sound request with its own rows."""

    def __init__(self) -> None:
        self.settings = RouterSettings("router-0", 0, 1, SPEC)
        self.pulse = SimpleNamespace(add=lambda name: None)
        self.peers: tuple[str, ...] = ()
        self.role = SimpleNamespace(table=None)
        self.traces = NO_TRACES
        self.lines = SimpleNamespace(failed=lambda error, request_id, layer: None)

    async def forward(self, found: ForwardInput, timeout_s: float) -> ForwardOutput:
        look_at(found)
        assert timeout_s <= 4294967.295 + 1e-6
        return ForwardOutput(found.hidden, 1, 1, "v1")


@cache
def loop() -> asyncio.AbstractEventLoop:
    return asyncio.new_event_loop()


@cache
def dispatch_handlers() -> dict[str, Any]:
    """The router's own handlers, behind the check for bytes that are no message."""
    found: dict[str, Any] = {}

    class Server:
        def add_generic_rpc_handlers(self, handlers: Any) -> None:
            pass

        def add_registered_method_handlers(self, service: str, methods: Any) -> None:
            found.update({f"/{service}/{name}": method for name, method in methods.items()})

    dispatch_pb2_grpc.add_DispatchServiceServicer_to_server(
        DispatchServicer(Core(), "127.0.0.1:1"),  # type: ignore[arg-type]
        Server(),
    )

    async def guarded() -> dict[str, Any]:
        made = {}
        for path, handler in found.items():

            async def go_on(_details: Any, handler: Any = handler) -> Any:
                return handler

            details = SimpleNamespace(method=path)
            made[path.rpartition("/")[2]] = await DecodeInterceptor().intercept_service(
                go_on, details
            )
        return made

    return loop().run_until_complete(guarded())


def dispatch_stream(data: bytes) -> bool:
    """Every item is answered once, by its number, whatever the others are."""
    handler = dispatch_handlers()["StreamForward"]
    items = [handler.request_deserializer(part) for part in pieces(data, ITEMS_MAX)]
    readable = [item for item in items if isinstance(item, Message)]

    async def sent() -> AsyncIterator[Any]:
        for item in items:
            yield item

    async def ask() -> list[dispatch_pb2.StreamForwardResponse]:
        found = []
        try:
            async for answer in handler.stream_stream(sent(), Context()):
                found.append(answer)  # noqa: PERF401 - those before the end count, too
        except Aborted as ended:
            code = ended.code
        else:
            assert len(found) == len(items)
            return found
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert len(readable) < len(items)
        return []

    answers = loop().run_until_complete(asyncio.wait_for(ask(), 10))
    asked = sorted(item.sequence for item in readable)
    if not answers:
        return False
    assert sorted(answer.sequence for answer in answers) == asked
    good = True
    for answer in answers:
        if answer.WhichOneof("result") == "error":
            assert answer.ByteSize() <= STATUS_BYTES_MAX
            good = refused(from_item_error(answer.error))
    return good


def stream_seeds() -> list[bytes]:
    items = [
        dispatch_pb2.StreamForwardRequest(sequence=number, request=request, timeout_ms=50 * number)
        for number, request in enumerate(forward_messages())
    ]
    return [
        joined([item.SerializeToString() for item in items]),
        joined([items[0].SerializeToString()]),
    ]


def dispatch_response(data: bytes) -> bool:
    """What clients read: the answer of a router that may be broken, or none of ours."""
    try:
        response = dispatch_pb2.ForwardResponse.FromString(data)
    except DecodeError:
        return False
    try:
        output, data_type = codec.output_array(response)
    except MoeServeError as error:
        return refused(error)
    assert output.nbytes == len(response.output.raw)
    assert codec.tensor(output, data_type).raw == response.output.raw
    return True


def response_seeds() -> list[bytes]:
    return [
        dispatch_pb2.ForwardResponse(
            output=codec.tensor(np.ones((3, HIDDEN), np.float32), codec.FP32), term=1, epoch=2
        ).SerializeToString()
    ]


class FailedCall(grpc.RpcError):
    """A failed call as clients see it."""

    def __init__(self, details: bytes) -> None:
        self._details = details

    def code(self) -> grpc.StatusCode:
        return grpc.StatusCode.INVALID_ARGUMENT

    def details(self) -> str:
        return "text"

    def trailing_metadata(self) -> tuple[tuple[str, bytes], ...]:
        return ((DETAILS_KEY, self._details),)


def rpc_status(data: bytes) -> bool:
    """Details of a failed call, as clients read them: never worse than no details."""
    error = from_rpc_error(FailedCall(data))
    assert isinstance(error, MoeServeError)
    wait_s = getattr(error, "retry_after_s", None)
    assert wait_s is None or 0 < wait_s < float("inf")
    return error.message != "text"


def status_seeds() -> list[bytes]:
    from moe_serve import errors

    fields = (errors.FieldViolation("a", "b"),)
    made = [
        errors.InvalidArgument("no", violations=fields),
        errors.ResourceExhausted("full", retry_after_s=2.5),
        errors.StaleTerm("old", term=7),
        errors.WireLost("gone"),
    ]
    found = []
    for error in made:
        status = to_status(error)
        status.code = 3  # of the call that carries it
        found.append(status.SerializeToString())
    return found


def _status_message() -> Message:
    return to_status(MoeServeError("x")).__class__()


# ---------------------------------------------------------------------------------------- admin
METHODS = (
    ("ComputePlan", placement_pb2.ComputePlanRequest),
    ("ApplyPlan", placement_pb2.ApplyPlanRequest),
    ("Pause", placement_pb2.PauseRequest),
    ("Resume", placement_pb2.ResumeRequest),
    ("DrainRank", placement_pb2.DrainRankRequest),
    ("UndrainRank", placement_pb2.UndrainRankRequest),
    ("SetBudget", placement_pb2.SetBudgetRequest),
    ("ListSteps", placement_pb2.ListStepsRequest),
    ("WatchEvents", placement_pb2.WatchEventsRequest),
    ("Explain", placement_pb2.ExplainRequest),
    ("ExplainPlan", placement_pb2.ExplainPlanRequest),
)


REFUSALS = (
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.NOT_FOUND,
    grpc.StatusCode.FAILED_PRECONDITION,
)


class Source:
    """A controller that notes what the engine would be asked, and says yes."""

    def __init__(self) -> None:
        self.settings: Any = SimpleNamespace(
            ranks=(1, 2),
            spec=make_spec(),
            watchers_max=4,
            config=RebalanceConfig(),
            profiles=(PROFILE,),
        )
        self.engine = RebalanceEngine(
            make_spec(),
            make_topology([3, 3]),
            RebalanceConfig(),
            term=1,
            first_epoch=1,
            start_s=0.0,
        )
        self.bell = SimpleNamespace(wait=self._never)
        self.life: Any = SimpleNamespace(
            driver=SimpleNamespace(ask=self._ask, engine=self.engine, check_moves=lambda: None),
            supervision=SimpleNamespace(undrain=self._undrain),
        )
        self.asked: list[Any] = []

    def sight(self) -> Any:
        return SimpleNamespace(
            state=self.engine.state,
            book=Book(records_kept=16, moves_kept=16),
            settings=self.settings,
            parts=PartTable(),
            stages=StageFolder(),
            recent=Recent(PartTable(), make_spec()),
            now_s=100.0,
            started_s=0.0,
        )

    async def _never(self, seen: int) -> int:
        raise AssertionError("asked to follow")

    async def _ask(self, make: Any) -> Answer:
        event = make(1)
        assert encode(decode_event(encode(event))) == encode(event)
        self.asked.append(event)
        return Answer(request_id=1, code="ok", message="done", plan_id="p")

    async def _undrain(self, rank: int) -> Answer:
        assert 0 <= rank < 2
        return Answer(request_id=1, code="ok", message="done")


@cache
def source() -> Source:
    return Source()


@cache
def servicer() -> PlacementServicer:
    return PlacementServicer(source())


def placement_request(data: bytes) -> bool:
    """One byte names the method; what reaches the engine is within what its events may hold."""
    name, kind = METHODS[(data[0] if data else 0) % len(METHODS)]
    try:
        request = kind.FromString(data[1:])
    except DecodeError:
        return False
    if name == "WatchEvents":
        request.no_follow = True
    source().asked.clear()

    async def ask() -> Any:
        call = getattr(servicer(), name)(request, Context())
        if name == "WatchEvents":
            return [answer async for answer in call]
        return await call

    try:
        loop().run_until_complete(ask())
    except Aborted as ended:
        code = ended.code
    else:
        code = grpc.StatusCode.OK
    if code is not grpc.StatusCode.OK:
        assert code in REFUSALS
        assert not source().asked
        return False
    for event in source().asked:
        # An engine must be able to take it, whatever it answers.
        source().engine.replayed(source().engine.snapshot()).step(event)
    return True


def placement_seeds() -> list[bytes]:
    made: list[tuple[str, Message]] = [
        ("ComputePlan", placement_pb2.ComputePlanRequest(policy="incremental", max_moves=4)),
        ("Pause", placement_pb2.PauseRequest(reason="looking")),
        ("Resume", placement_pb2.ResumeRequest()),
        ("ApplyPlan", placement_pb2.ApplyPlanRequest(plan_id="p1")),
        ("DrainRank", placement_pb2.DrainRankRequest(rank=1)),
        ("UndrainRank", placement_pb2.UndrainRankRequest(rank=1)),
        ("SetBudget", placement_pb2.SetBudgetRequest(rank=0, budget_bytes=5000)),
        ("ListSteps", placement_pb2.ListStepsRequest(page_size=10, page_token="12")),
        ("WatchEvents", placement_pb2.WatchEventsRequest(after_seq=3)),
        ("Explain", placement_pb2.ExplainRequest(seconds=30.0)),
    ]
    numbers = {name: number for number, (name, _) in enumerate(METHODS)}
    return [bytes([numbers[name]]) + message.SerializeToString() for name, message in made]


def mutated_request(data: bytes, rng: Any) -> bytes:
    number = rng.randrange(len(METHODS)) if rng.random() < 0.1 or not data else data[0]
    inner = mutations.of_messages(METHODS[number % len(METHODS)][1])
    return bytes([number]) + inner(data[1:], rng)


# --------------------------------------------------------------------------------------- tokens
def token_file(data: bytes) -> bool:
    """A token file: read, or refused without a word of what it holds."""
    path = scratch() / "tokens"
    path.write_bytes(data)
    path.chmod(0o600)
    try:
        tokens = TokenFile(path)
    except StartRefused as error:
        return refused(error)
    assert tokens.fault == ""
    return True


@cache
def live_tokens() -> TokenFile:
    path = scratch() / "live"
    path.touch(mode=0o600)
    path.write_text("dispatch " + "d" * 20 + "\nadmin " + "a" * 20 + "\n")
    return TokenFile(path)


def authorization(data: bytes) -> bool:
    """The header of a call, as gRPC gives it: text of any bytes."""
    try:
        return bool(live_tokens().roles(data.decode("latin-1")))
    except Unauthenticated as error:
        return refused(error)


_forward = partial(mutations.of_messages, dispatch_pb2.ForwardRequest)()
TARGETS = (
    Target(
        "dispatch_forward",
        dispatch_forward,
        lambda: [message.SerializeToString() for message in forward_messages()],
        _forward,
    ),
    Target(
        "dispatch_stream",
        dispatch_stream,
        stream_seeds,
        mutations.of_pieces(ITEMS_MAX, mutations.of_messages(dispatch_pb2.StreamForwardRequest)),
        base_bytes=1 << 20,
    ),
    Target(
        "dispatch_response",
        dispatch_response,
        response_seeds,
        mutations.of_messages(dispatch_pb2.ForwardResponse),
    ),
    Target("rpc_status", rpc_status, status_seeds, mutations.of_messages(_status_message)),
    Target(
        "placement_request",
        placement_request,
        placement_seeds,
        mutated_request,
        base_bytes=2 << 20,
    ),
    Target(
        "token_file",
        token_file,
        lambda: [b"dispatch " + b"d" * 20 + b"\n# x\nadmin " + b"a" * 16 + b" # y\n"],
        mutations.words_of((b"dispatch ", b"read ", b"admin ", b"\n", b"#", b"t" * 16)),
    ),
    Target(
        "authorization",
        authorization,
        lambda: [b"Bearer " + b"d" * 20, b"bearer  " + b"a" * 20 + b" "],
        mutations.words_of((b"Bearer ", b" ", b"d" * 20)),
    ),
)
