"""A deployed service from outside: readiness, parity, bad input, operators, a killed shard.

The tiny model of the package on two logical nodes, every expert in both (floor 2).
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt
import pytest
import safetensors.numpy
from grpc_health.v1 import health_pb2, health_pb2_grpc

from moe_serve.bootstrap.parts import checkpoint_folder
from moe_serve.client import Client
from moe_serve.errors import (
    FailedPrecondition,
    InvalidArgument,
    MoeServeError,
    NotFound,
    ResourceExhausted,
    Unavailable,
)
from moe_serve.router.service import SERVICE_NAME
from moe_serve.rpc import codec, dispatch_pb2, dispatch_pb2_grpc
from moe_serve.rpc.options import MESSAGE_SLACK_BYTES
from moe_serve.rpc.status import from_item_error, from_rpc_error
from placement.topology import Phase
from tests.service_cluster import (
    Placement,
    Service,
    locations,
    part_pids,
    router_totals,
    service_config,
    stub_channel,
    wait_until,
)
from tests.traffic import TOLERANCE, Source, Traffic, Workload, draw, error_of

LAYERS, EXPERTS, TOP_K, HIDDEN = 4, 32, 4, 128
SLOTS = 72
"""Every expert twice takes 64 slots of each of four ranks, staging another one."""
MESSAGE_BYTES_MAX = 1 << 20
DECODE = int(dispatch_pb2.FORWARD_PHASE_DECODE)

Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int32]


class Oracle:
    """The tiny model's experts in float64, straight from its file."""

    def __init__(self) -> None:
        file = Path(checkpoint_folder("package:tiny_moe")) / "model.safetensors"
        self._tensors = safetensors.numpy.load_file(file)

    def __call__(self, layer: int, hidden: Floats, ids: Ids, gates: Floats) -> Any:
        out = np.zeros(hidden.shape, np.float64)
        for row, k in np.ndindex(*ids.shape):
            x = hidden[row].astype(np.float64)
            gate = self._matrix(layer, int(ids[row, k]), "gate") @ x
            up = self._matrix(layer, int(ids[row, k]), "up") @ x
            with np.errstate(over="ignore"):
                inner = gate / (1.0 + np.exp(-gate)) * up
            down = self._matrix(layer, int(ids[row, k]), "down") @ inner
            out[row] += float(gates[row, k]) * down
        return out

    def _matrix(self, layer: int, expert: int, projection: str) -> npt.NDArray[np.float64]:
        name = f"model.layers.{layer}.mlp.experts.{expert}.{projection}_proj.weight"
        matrix: npt.NDArray[np.float64] = self._tensors[name].astype(np.float64)
        return matrix


def rows_of(rng: np.random.Generator, count: int) -> Floats:
    return rng.standard_normal((count, HIDDEN)).astype(np.float32)


@pytest.fixture(scope="module")
def workload() -> Workload:
    return Workload(
        lambda rng: draw(rng, rows_of, layers=LAYERS, experts=EXPERTS, top_k=TOP_K, rows_max=3),
        Oracle(),
    )


@pytest.fixture(scope="module")
def running_service(deploy_service: Any, scratch: Path) -> Service:
    deployed: Service = deploy_service(
        service_config(
            "tiny",
            "package:tiny_moe",
            scratch / "state",
            slots=SLOTS,
            rebalance={"floor": 2, "drain_wait_s": 1.0},
            limits={"max_message_bytes": MESSAGE_BYTES_MAX},
        )
    )
    return deployed


@pytest.fixture
def service(running_service: Service) -> Service:
    """The module's service, quiet and paused before each test, whatever the last one did."""
    running_service.admin.pause("a test is going on")
    running_service.wait_quiet(120.0)
    return running_service


def sources(service: Service) -> list[Source]:
    return [Source(a, stream) for a in service.routers for stream in (False, True)]


@contextmanager
def dispatch_stub(address: str) -> Iterator[Any]:
    with stub_channel(address) as channel:
        yield dispatch_pb2_grpc.DispatchServiceStub(channel)


def good_arrays(rows: int = 3, seed: int = 1, top_k: int = TOP_K) -> codec.ForwardArrays:
    rng = np.random.default_rng(seed)
    ids = np.stack([rng.permutation(EXPERTS)[:top_k] for _ in range(rows)]).astype(np.int32)
    return codec.ForwardArrays(
        model="tiny",
        layer=1,
        phase=DECODE,
        data_type=codec.FP32,
        hidden=rows_of(rng, rows),
        topk_ids=ids,
        topk_weights=rng.random((rows, top_k)).astype(np.float32),
    )


def check_output(
    response: dispatch_pb2.ForwardResponse, arrays: codec.ForwardArrays, oracle: Any
) -> None:
    output, _ = codec.output_array(response)
    want = oracle(arrays.layer, arrays.hidden, arrays.topk_ids, arrays.topk_weights)
    assert error_of(output, want) <= TOLERANCE


# ------------------------------------------------------------------------------------- readiness


def serving(address: str) -> bool:
    with stub_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        answer = stub.Check(health_pb2.HealthCheckRequest(service=SERVICE_NAME), timeout=10.0)
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def test_ready_means_every_expert_listed_in_both_domains(service: Service) -> None:
    placement = service.placement()
    found = locations(placement)
    assert sorted(found) == [(layer, e) for layer in range(LAYERS) for e in range(EXPERTS)]
    node = {rank.rank: rank.node for rank in placement.ranks}
    assert set(node.values()) == {"a", "b"}
    assert all({node[rank] for rank, _ in places} == {"a", "b"} for places in found.values())
    assert len(service.routers) == 2
    assert all(serving(address) for address in service.routers)


def test_every_router_names_both(service: Service) -> None:
    for address in service.routers:
        with dispatch_stub(address) as stub:
            spec = stub.GetModelSpec(dispatch_pb2.GetModelSpecRequest(), timeout=10.0)
        assert sorted(spec.router_addresses) == sorted(service.routers)
        assert (spec.num_layers, spec.num_experts, spec.top_k) == (LAYERS, EXPERTS, TOP_K)
        assert (spec.hidden_size, spec.max_message_bytes) == (HIDDEN, MESSAGE_BYTES_MAX)
        assert list(spec.checkpoint_layers) == [0, 1, 2, 3]


# ---------------------------------------------------------------------------------------- parity


@pytest.mark.parametrize("stream", [False, True])
def test_client_agrees_with_the_checkpoint(
    service: Service, workload: Workload, stream: bool
) -> None:
    with Client(service.routers, stream=stream) as client:
        for seed in range(8):
            layer, hidden, ids, gates = workload.make(np.random.default_rng(seed))
            output = client.forward(layer, hidden, ids, gates, phase=Phase.PREFILL)
            assert error_of(output, workload.oracle(layer, hidden, ids, gates)) <= TOLERANCE


def test_a_batch_above_the_limit_is_cut_and_joined(service: Service, workload: Workload) -> None:
    rows = 2 * MESSAGE_BYTES_MAX // (4 * HIDDEN) + 7
    rng = np.random.default_rng(2)
    hidden = np.repeat(rows_of(rng, 4), rows // 4 + 1, axis=0)[:rows]
    ids = np.tile(np.array([[3, 9, 27, 1]], np.int32), (rows, 1))
    gates = np.full((rows, TOP_K), 0.25, np.float32)
    with Client(service.routers) as client:
        output = client.forward(2, hidden, ids, gates, phase=Phase.PREFILL)
    some = np.r_[0 : rows : rows // 8, rows - 1]
    want = workload.oracle(2, hidden[some], ids[some], gates[some])
    assert error_of(output[some], want) <= TOLERANCE


# -------------------------------------------------------------------------------------- bad input

Request = dispatch_pb2.ForwardRequest


@dataclass(frozen=True)
class Bad:
    """One fault, and what must be said about it."""

    name: str
    spoil: Callable[[Request], None]
    field: str
    error: type[MoeServeError] = InvalidArgument


def set_raw(tensor: str, change: Callable[[npt.NDArray[Any]], None], dtype: str) -> Any:
    def spoil(request: Request) -> None:
        target = getattr(request, tensor)
        values = np.frombuffer(target.raw, dtype).copy()
        change(values)
        target.raw = values.tobytes()

    return spoil


def put(index: int, value: float) -> Callable[[npt.NDArray[Any]], None]:
    def change(values: npt.NDArray[Any]) -> None:
        values[index] = value

    return change


def shape(tensor: str, *sizes: int) -> Callable[[Request], None]:
    def spoil(request: Request) -> None:
        del getattr(request, tensor).shape[:]
        getattr(request, tensor).shape.extend(sizes)

    return spoil


def pairs_of(width: int) -> Callable[[Request], None]:
    """k of `width`, in agreement everywhere."""

    def spoil(request: Request) -> None:
        ids = np.tile(np.arange(width, dtype=np.int32), (3, 1))
        request.topk_ids.CopyFrom(codec.tensor(ids, codec.INT32))
        request.topk_weights.CopyFrom(codec.tensor(np.ones((3, width), np.float32), codec.FP32))

    return spoil


def assign(**fields: Any) -> Callable[[Request], None]:
    def spoil(request: Request) -> None:
        for name, value in fields.items():
            setattr(request, name, value)

    return spoil


def retype(tensor: str, data_type: int) -> Callable[[Request], None]:
    def spoil(request: Request) -> None:
        getattr(request, tensor).data_type = data_type

    return spoil


def cut(tensor: str, num_bytes: int) -> Callable[[Request], None]:
    def spoil(request: Request) -> None:
        getattr(request, tensor).raw = getattr(request, tensor).raw[:-num_bytes]

    return spoil


BAD = (
    Bad("dtype", retype("hidden_states", codec.INT32), "hidden_states"),
    Bad("no dtype", retype("hidden_states", 0), "hidden_states"),
    Bad("rank", shape("hidden_states", 3, 1, HIDDEN), "hidden_states"),
    Bad("hidden size", shape("hidden_states", 6, HIDDEN // 2), "hidden_states"),
    Bad("negative size", shape("hidden_states", -3, HIDDEN), "hidden_states"),
    Bad("huge size", shape("hidden_states", 1 << 40, 1 << 40), "hidden_states"),
    Bad("byte length", cut("hidden_states", 1), "hidden_states"),
    Bad("ids of another length", cut("topk_ids", 4), "topk_ids"),
    Bad("ids of another type", retype("topk_ids", codec.FP32), "topk_ids"),
    Bad("gates of another type", retype("topk_weights", codec.BF16), "topk_weights"),
    Bad("id below 0", set_raw("topk_ids", put(5, -1), "<i4"), "topk_ids[1][1]"),
    Bad("id of E", set_raw("topk_ids", put(4, EXPERTS), "<i4"), "topk_ids[1][0]"),
    Bad(
        "id twice in a row",
        set_raw("topk_ids", lambda v: v.__setitem__(1, v[0]), "<i4"),
        "topk_ids[0][1]",
    ),
    Bad("k of 0", pairs_of(0), "topk_ids"),
    Bad("k above top_k", pairs_of(TOP_K + 1), "topk_ids"),
    Bad("NaN gate", set_raw("topk_weights", put(2, np.nan), "<f4"), "topk_weights[0][2]"),
    Bad("Inf gate", set_raw("topk_weights", put(11, np.inf), "<f4"), "topk_weights[2][3]"),
    Bad("unknown layer", assign(layer=LAYERS), "layer"),
    Bad("layer below 0", assign(layer=-1), "layer"),
    Bad("unknown model", assign(model="another"), "model"),
    Bad("no phase", assign(phase=0), "phase"),
    Bad("bitmap too short", assign(row_valid=b"", pair_valid=b"\x01"), "pair_valid"),
)


def bad_request(bad: Bad) -> Request:
    request = codec.forward_request(good_arrays())
    bad.spoil(request)
    return request


def unary_error(stub: Any, request: Request) -> MoeServeError:
    with pytest.raises(grpc.RpcError) as failed:
        stub.Forward(request, timeout=20.0)
    return from_rpc_error(failed.value)


def check_error(bad: Bad, error: MoeServeError) -> None:
    assert type(error) is bad.error, f"{bad.name}: {error!r}"
    fields = [violation.field for violation in error.violations]
    assert any(field.startswith(bad.field) for field in fields), f"{bad.name}: {fields}"
    assert all(violation.description for violation in error.violations)


def test_bad_input_is_named_and_hurts_nobody_else(service: Service, workload: Workload) -> None:
    pids = service.pids()
    good = good_arrays(seed=9)
    with Traffic(sources(service), workload) as traffic:
        for address in service.routers:
            with dispatch_stub(address) as stub:
                for bad in BAD:
                    check_error(bad, unary_error(stub, bad_request(bad)))
                # One stream: each bad item between two good ones.
                items = []
                for number, bad in enumerate(BAD):
                    for sequence, request in (
                        (2 * number, codec.forward_request(good)),
                        (2 * number + 1, bad_request(bad)),
                    ):
                        items.append(
                            dispatch_pb2.StreamForwardRequest(sequence=sequence, request=request)
                        )
                answers = {a.sequence: a for a in stub.StreamForward(iter(items), timeout=30.0)}
                assert len(answers) == len(items)
                for number, bad in enumerate(BAD):
                    check_output(answers[2 * number].response, good, workload.oracle)
                    check_error(bad, from_item_error(answers[2 * number + 1].error))
        traffic.more(20)
    after = service.placement()
    refused = router_totals(after, ("refused_requests", "failed"))
    print(f"bad input: {4 * len(BAD)} refusals beside {traffic.requests} requests; {refused}")
    assert traffic.failures == []
    assert part_pids(after) == pids


def test_zero_rows_come_back_as_zero_rows(service: Service) -> None:
    with Client(service.routers) as client:
        output = client.forward(
            0,
            np.zeros((0, HIDDEN), np.float32),
            np.zeros((0, TOP_K), np.int32),
            np.zeros((0, TOP_K), np.float32),
            phase=Phase.DECODE,
        )
    assert output.shape == (0, HIDDEN)


def test_nan_and_inf_in_hidden_states_stay_in_their_rows(
    service: Service, workload: Workload
) -> None:
    arrays = good_arrays(rows=4)
    hidden = arrays.hidden.copy()
    hidden[1, 7], hidden[2, 0] = np.nan, np.inf
    with Client(service.routers) as client:
        output = client.forward(1, hidden, arrays.topk_ids, arrays.topk_weights, phase=Phase.DECODE)
    assert not np.isfinite(output[1]).any()
    assert not np.isfinite(output[2]).all()
    rest = [0, 3]
    want = workload.oracle(1, hidden[rest], arrays.topk_ids[rest], arrays.topk_weights[rest])
    assert error_of(output[rest], want) <= TOLERANCE


def request_of(num_bytes: int) -> tuple[codec.ForwardArrays, Request]:
    """A good request of exactly so many bytes: rows for the most, a request id for the rest."""
    for top_k in range(TOP_K, 0, -1):
        rows = num_bytes // (4 * HIDDEN + 8 * top_k)
        for count in range(rows, rows - 3, -1):
            arrays = good_arrays(rows=count, top_k=top_k)
            missing = num_bytes - codec.forward_request(arrays).ByteSize() - 2
            if 0 < missing <= 120:
                arrays = replace(arrays, request_id="r" * missing)
                return arrays, codec.forward_request(arrays)
    raise AssertionError(f"no request of {num_bytes} bytes")


def test_a_message_at_the_limit_and_one_byte_over(service: Service, workload: Workload) -> None:
    arrays, at_limit = request_of(MESSAGE_BYTES_MAX)
    assert at_limit.ByteSize() == MESSAGE_BYTES_MAX
    over = Request.FromString(at_limit.SerializeToString())
    over.request_id += "r"
    assert over.ByteSize() == MESSAGE_BYTES_MAX + 1
    far_over = Request.FromString(at_limit.SerializeToString())
    far_over.hidden_states.raw += bytes(2 * MESSAGE_SLACK_BYTES)
    pids = service.pids()
    with dispatch_stub(service.routers[0]) as stub:
        output, _ = codec.output_array(stub.Forward(at_limit, timeout=30.0))
        error = unary_error(stub, over)
        assert isinstance(error, ResourceExhausted)
        assert [violation.field for violation in error.violations] == ["hidden_states"]
        assert str(MESSAGE_BYTES_MAX) in error.message
        assert isinstance(unary_error(stub, far_over), ResourceExhausted)
    some = slice(0, len(output), len(output) // 5)
    want = workload.oracle(1, arrays.hidden[some], arrays.topk_ids[some], arrays.topk_weights[some])
    assert error_of(output[some], want) <= TOLERANCE
    assert service.pids() == pids


# -------------------------------------------------------------------------------------- operators


def filled(placement: Placement, rank: int) -> int:
    return sum(slot.layer >= 0 for slot in placement.ranks[rank].slots)


def test_a_budget_is_lowered_refused_and_raised(service: Service, workload: Workload) -> None:
    start = service.placement()
    slot_bytes, full = start.slot_bytes, start.ranks[1].budget_bytes
    assert full == SLOTS * slot_bytes
    with Traffic(sources(service), workload) as traffic:
        answer = service.admin.set_budget(1, 60 * slot_bytes)
        assert answer.num_slots == 60
        low = service.wait(
            "rank 1 has 60 slots",
            lambda p: (
                p.ranks[1].num_slots == 60
                and p.ranks[1].resident_bytes + p.ranks[1].reserved_bytes <= 60 * slot_bytes
                and p.state == "paused"
            ),
        )
        assert filled(low, 1) <= 59
        # Two domains of every expert need 64 slots and one for staging on average.
        with pytest.raises(FailedPrecondition) as refused:
            service.admin.set_budget(1, 8 * slot_bytes)
        (violation,) = refused.value.violations
        assert violation.field == "missing_bytes"
        assert int(violation.description) > 0
        assert int(violation.description) % slot_bytes == 0
        assert service.placement().ranks[1].num_slots == 60
        service.admin.set_budget(1, full)
        service.wait("rank 1 has its slots back", lambda p: p.ranks[1].num_slots == SLOTS)
        traffic.more(20)
    service.wait_quiet()
    print(f"budget: {traffic.requests} requests meanwhile, {traffic.failed} failed")
    assert traffic.failures == []


def test_a_rank_is_drained_and_filled_again(service: Service, workload: Workload) -> None:
    pids = service.pids()
    with Traffic(sources(service), workload) as traffic:
        service.admin.drain(2)
        emptied = service.wait(
            "rank 2 is empty", lambda p: filled(p, 2) == 0 and p.state == "paused"
        )
        assert emptied.ranks[2].state == "draining"
        assert not emptied.missing
        # Two ranks can still hold every expert, one cannot.
        service.admin.drain(1)
        with pytest.raises(FailedPrecondition) as refused:
            service.admin.drain(3)
        assert [violation.field for violation in refused.value.violations] == ["missing_bytes"]
        service.admin.undrain(1)
        service.admin.undrain(2)
        service.wait("rank 2 is up", lambda p: p.ranks[2].state == "up" and filled(p, 2) > 0)
        traffic.more(20)
    end = service.wait_quiet()
    print(f"drain: {traffic.requests} requests meanwhile, {traffic.failed} failed")
    assert traffic.failures == []
    assert part_pids(end) == pids


def hot_workload(oracle: Any, placement: Placement, layer: int) -> Workload:
    """All tokens want the same few experts of one layer, which share their two ranks: the other
    two ranks have nothing to do."""
    homes: dict[tuple[int, ...], list[int]] = {}
    for (where, expert), places in locations(placement).items():
        if where == layer:
            homes.setdefault(tuple(rank for rank, _ in places), []).append(expert)
    hot = max((held for ranks, held in homes.items() if len(ranks) == 2), key=len)[:TOP_K]
    assert len(hot) == TOP_K, homes
    ids = np.tile(np.array([hot], np.int32), (4, 1))

    def make(rng: np.random.Generator) -> Any:
        return layer, rows_of(rng, 4), ids, rng.random((4, TOP_K)).astype(np.float32)

    return Workload(make, oracle)


def moves_done(placement: Placement) -> int:
    return sum(placement.moves_done.values())


def test_a_plan_is_looked_at_then_applied_and_stale_ones_are_refused(
    service: Service, workload: Workload
) -> None:
    start = service.placement()
    fast = [replace(source, pause_s=0.01) for source in sources(service)]
    with Traffic(fast, hot_workload(workload.oracle, start, 0)) as traffic:

        def plan(max_moves: int) -> Any:
            found = service.admin.compute_plan("", max_moves)
            return found if found.moves else None

        second = wait_until("the hot load makes a plan worth it", lambda: plan(4), 40.0)
        first = wait_until("the load is still hot", lambda: plan(1), 10.0)
        assert len(first.moves) == 1
        assert first.moves[0].reason
        assert first.copy_bytes > 0
        service.admin.apply_plan(first.plan_id, validate_only=True)
        # Looking at plans moved nothing, and paused nothing starts by itself.
        looked = service.placement()
        assert (locations(looked), looked.epoch) == (locations(start), start.epoch)
        assert looked.state == "paused"
        service.admin.apply_plan(first.plan_id, validate_only=False)
        moved = service.wait(
            "the plan has run", lambda p: locations(p) != locations(start) and p.state == "paused"
        )
        # Where one move is all there is to gain, it is the same plan twice.
        why = "already" if second.plan_id == first.plan_id else "changed"
        for validate_only in (True, False):
            with pytest.raises(FailedPrecondition, match=why):
                service.admin.apply_plan(second.plan_id, validate_only=validate_only)
        with pytest.raises(NotFound):
            service.admin.apply_plan("no such plan", validate_only=False)
        assert locations(service.placement()) == locations(moved)
    print(
        f"plans: {len(second.moves)} moves worth it, {len(first.moves)} applied; "
        f"{traffic.requests} requests, {traffic.failed} failed"
    )
    assert traffic.failures == []


def test_the_controller_moves_by_itself_only_while_it_is_not_paused(
    service: Service, workload: Workload
) -> None:
    start = service.placement()
    fast = [replace(source, pause_s=0.01) for source in sources(service)]
    with Traffic(fast, hot_workload(workload.oracle, start, 3)) as traffic:
        wait_until(
            "a plan would be worth it", lambda: service.admin.compute_plan("", 0).moves, 40.0
        )
        windows = service.admin.load().window
        wait_until("two more windows", lambda: service.admin.load().window >= windows + 2)
        assert moves_done(service.placement()) == moves_done(start)
        service.admin.resume()
        service.wait("it moves by itself", lambda p: moves_done(p) > moves_done(start))
        service.admin.pause("enough")
    end = service.wait_quiet()
    print(
        f"by itself: {moves_done(end) - moves_done(start)} moves after resume; "
        f"{traffic.requests} requests, {traffic.failed} failed"
    )
    assert traffic.failures == []


# --------------------------------------------------------------------------------- killed shards


def test_a_killed_shard_is_replaced_and_no_call_fails(service: Service, workload: Workload) -> None:
    start = service.placement()
    pids = part_pids(start)
    node = {rank.rank: rank.node for rank in start.ranks}
    with Traffic(sources(service), workload) as traffic:
        # Stopped first, so that calls wait on it and are lost with it.
        os.kill(pids["rank 0"], signal.SIGSTOP)
        time.sleep(0.3)
        os.kill(pids["rank 0"], signal.SIGKILL)
        end = service.wait(
            "a new shard holds its share",
            lambda p: (
                p.ranks[0].pid not in (0, pids["rank 0"])
                and p.ranks[0].state == "up"
                and not p.missing
                and p.state == "paused"
                and all(
                    {node[rank] for rank, _ in places} == {"a", "b"}
                    for places in locations(p).values()
                )
            ),
            120.0,
        )
        traffic.more(20)
    names = ("requests", "failed", "retried_pairs", "hedged_pairs", "lost_pairs")
    before = router_totals(start, names)
    totals = {name: n - before[name] for name, n in router_totals(end, names).items()}
    print(
        f"killed shard: {traffic.requests} requests ({traffic.per_s:.0f}/s), {traffic.failed} "
        f"failed, slowest {traffic.slowest_s:.2f} s; routers {totals}"
    )
    assert traffic.failures == []
    assert totals["failed"] == 0
    assert totals["lost_pairs"] > 0
    # Another rank was asked: by a retry, or by a hedge before the loss was known.
    assert totals["retried_pairs"] + totals["hedged_pairs"] > 0
    assert {n: p for n, p in part_pids(end).items() if n != "rank 0"} == {
        n: p for n, p in pids.items() if n != "rank 0"
    }
    assert end.ranks[0].incarnation > start.ranks[0].incarnation


def test_health_says_not_serving_while_experts_are_missing(
    service: Service, workload: Workload
) -> None:
    pids = service.pids()
    shards = [pid for name, pid in pids.items() if name.startswith("rank")]
    layer, hidden, ids, gates = workload.make(np.random.default_rng(1))
    for pid in shards:
        os.kill(pid, signal.SIGKILL)
    wait_until("no router is ready", lambda: not any(serving(a) for a in service.routers), 60.0)
    with Client(service.routers) as client:
        with pytest.raises(Unavailable, match="retry later"):
            client.forward(layer, hidden, ids, gates, phase=Phase.DECODE, timeout_s=5.0)
        wait_until("both routers are ready", lambda: all(map(serving, service.routers)), 150.0)
        assert not service.placement().missing
        output = client.forward(layer, hidden, ids, gates, phase=Phase.DECODE)
    assert error_of(output, workload.oracle(layer, hidden, ids, gates)) <= TOLERANCE
    after = part_pids(service.wait_quiet(120.0))
    assert not set(shards) & set(after.values())
    assert {n: p for n, p in after.items() if n.startswith("router")} == {
        n: p for n, p in pids.items() if n.startswith("router")
    }
