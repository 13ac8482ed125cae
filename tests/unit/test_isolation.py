"""The fence around unit tests holds."""

import asyncio
import importlib
import socket
import subprocess
import sys

import grpc
import pytest
import zmq


def test_a_socket_cannot_be_opened() -> None:
    with pytest.raises(AssertionError, match="must not open a socket"):
        socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    with pytest.raises(AssertionError, match="must not open a socket"):
        socket.create_connection(("127.0.0.1", 9))


def test_zeromq_and_grpc_cannot_be_opened() -> None:
    with pytest.raises(AssertionError, match="must not open a socket"):
        zmq.Context()
    with pytest.raises(AssertionError, match="must not open a socket"):
        grpc.insecure_channel("127.0.0.1:9")


def test_ray_cannot_start_whenever_it_is_imported() -> None:
    ray = importlib.import_module("ray")
    # Looked at before it is called: a broken fence must fail here, not start a cluster.
    assert ray.init.__name__ == "_no_ray"
    with pytest.raises(AssertionError, match="must not start Ray"):
        ray.init()


@pytest.mark.asyncio
async def test_an_event_loop_still_works() -> None:
    assert await asyncio.to_thread(lambda: 7) == 7


@pytest.mark.parametrize(
    "name", ["placement.eplb", "placement.adapters.vllm", "placement.adapters.sglang"]
)
def test_the_library_needs_neither_ray_nor_torch_nor_an_engine(name: str) -> None:
    code = f"""
import sys
absent = ("ray", "torch", "vllm", "sglang", "moe_serve", "grpc", "zmq")
sys.modules.update(dict.fromkeys(absent))  # None: an import of it raises
import {name}
from placement.eplb import rebalance_experts
assert rebalance_experts([[0.0, 0.0]], 2, 1, 1, 2)[0].tolist() == [[0, 1]]  # no kernel to compile
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
