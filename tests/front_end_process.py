"""A front end, or a stranger, in a process of its own.

`python -m tests.front_end_process WHAT JSON` prints what it found out as JSON.

Tests run it on another side of the network, or only in another process, than the service.
"""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import numpy.typing as npt
import safetensors.numpy
import zmq

from moe_serve.bootstrap.parts import checkpoint_folder
from moe_serve.cli.admin import AdminTarget, GrpcAdmin
from moe_serve.client import Client, Phase
from moe_serve.errors import MoeServeError
from moe_serve.rpc import dispatch_pb2, dispatch_pb2_grpc
from moe_serve.rpc.auth import Role, TokenFile
from tests.marker_checkpoint import marker_oracle, marker_rows
from tests.traffic import draw, error_of

CONNECT_WAIT_MS = 15_000

Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int32]


def tiny_rows(rng: np.random.Generator, rows: int) -> Floats:
    return rng.standard_normal((rows, 128)).astype(np.float32)


def tiny_oracle() -> Callable[[int, Floats, Ids, Floats], npt.NDArray[np.float64]]:
    """The tiny model's experts in float64, straight from its file."""
    file = Path(checkpoint_folder("package:tiny_moe")) / "model.safetensors"
    tensors = safetensors.numpy.load_file(file)

    def compute(layer: int, hidden: Floats, ids: Ids, gates: Floats) -> npt.NDArray[np.float64]:
        out = np.zeros(hidden.shape)
        for row, k in np.ndindex(*ids.shape):
            name = f"model.layers.{layer}.mlp.experts.{ids[row, k]}"
            gate, up, down = (
                tensors[f"{name}.{part}_proj.weight"].astype(np.float64)
                for part in ("gate", "up", "down")
            )
            inner = gate @ hidden[row]
            out[row] += gates[row, k] * (down @ (inner / (1 + np.exp(-inner)) * (up @ hidden[row])))
        return out

    return compute


def forward(
    addresses: Sequence[str],
    model: str,
    calls: int,
    token_file: str | None = None,
    tls_ca: str | None = None,
) -> dict[str, Any]:
    """Calls with known answers through a client; every expert of every layer is asked for."""
    token = TokenFile(Path(token_file)).token(Role.DISPATCH) if token_file else None
    oracle = marker_oracle if model == "marker" else tiny_oracle()
    rows = marker_rows if model == "marker" else tiny_rows
    rng, worst, asked = np.random.default_rng(5), 0.0, set()
    with Client(addresses, token=token, tls_ca=tls_ca) as client:
        spec = client.spec()
        sizes = {"layers": spec.num_layers, "experts": spec.num_experts, "top_k": spec.top_k}
        for _ in range(calls):
            layer, hidden, ids, gates = draw(rng, rows, **sizes)
            output = client.forward(layer, hidden, ids, gates, phase=Phase.PREFILL)
            worst = max(worst, error_of(output, oracle(layer, hidden, ids, gates)))
            asked |= {(layer, int(expert)) for expert in ids.flat}
        return {
            "routers": sorted(client.addresses),
            "worst": worst,
            "asked": len(asked),
            "of": spec.num_layers * spec.num_experts,
        }


def dispatch_strangers(
    addresses: Sequence[str], tls_ca: str, tokens: Sequence[str]
) -> dict[str, list[str]]:
    """Statuses of GetModelSpec by router: with each token ("" is none), then with the first one in
    plain text."""
    roots = grpc.ssl_channel_credentials(Path(tls_ca).read_bytes())
    options = [("grpc.enable_http_proxy", 0)]
    found = {}
    for address in addresses:
        with grpc.secure_channel(address, roots, options=options) as channel:
            found[address] = [_model_spec_status(channel, token) for token in tokens]
        with grpc.insecure_channel(address, options=options) as channel:
            found[address].append(_model_spec_status(channel, tokens[0]))
    return found


def _model_spec_status(channel: grpc.Channel, token: str) -> str:
    metadata = [("authorization", f"Bearer {token}")] if token else []
    stub = dispatch_pb2_grpc.DispatchServiceStub(channel)
    try:
        stub.GetModelSpec(dispatch_pb2.GetModelSpecRequest(), timeout=20, metadata=metadata)
    except grpc.RpcError as error:
        name: str = error.code().name
        return name
    return "OK"


def admin_strangers(address: str, tls_ca: str, tokens: Sequence[str]) -> dict[str, dict[str, str]]:
    """Codes of a reading and of a changing call to the controller, by token."""
    targets = {token: AdminTarget(address, token, Path(tls_ca)) for token in tokens}
    return {
        token: {
            "placement": _code(lambda admin: admin.placement(), target),
            "drain": _code(lambda admin: admin.drain(0), target),
        }
        for token, target in targets.items()
    }


def _code(call: Callable[[GrpcAdmin], object], target: AdminTarget) -> str:
    admin = GrpcAdmin(target)
    try:
        call(admin)
    except MoeServeError as error:
        return error.code
    finally:
        admin.close()
    return "OK"


def bare_sockets(addresses: Sequence[str], wait_s: float) -> list[dict[str, Any]]:
    """What a ZeroMQ socket without keys gets from each shard: handshakes done, messages
    received."""
    found = []
    for address in addresses:
        # One each: a monitor is named by its socket's descriptor, which would be used again.
        with zmq.Context() as context:
            found.append(_bare_socket(context, address, wait_s))
            context.destroy(linger=0)
    return found


def _bare_socket(context: zmq.Context[Any], address: str, wait_s: float) -> dict[str, Any]:
    socket = context.socket(zmq.DEALER)
    monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_CONNECTED)
    socket.connect(f"tcp://{address}")
    for frames in ([b"\0" * 64, b"", b""], [b"hello"]):
        with contextlib.suppress(zmq.Again):  # turned away already: there is no way to send
            socket.send_multipart(frames, zmq.NOBLOCK)
    events: list[int] = []
    if monitor.poll(CONNECT_WAIT_MS):
        events.append(_event(monitor))
    answers = int(socket.poll(round(wait_s * 1000)) != 0)
    while monitor.poll(0):
        events.append(_event(monitor))
    return {
        "connected": zmq.EVENT_CONNECTED in events,
        "handshakes": events.count(zmq.EVENT_HANDSHAKE_SUCCEEDED),
        "answers": answers,
    }


def _event(monitor: zmq.Socket[Any]) -> int:
    return int.from_bytes(monitor.recv_multipart()[0][:2], "little")


WHAT: dict[str, Callable[..., Any]] = {
    "forward": forward,
    "dispatch_strangers": dispatch_strangers,
    "admin_strangers": admin_strangers,
    "bare_sockets": bare_sockets,
}

if __name__ == "__main__":
    print(json.dumps(WHAT[sys.argv[1]](**json.loads(sys.argv[2]))))
