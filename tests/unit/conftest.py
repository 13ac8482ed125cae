"""Unit tests run alone: starting Ray or opening a socket is a fault of test or design."""

import importlib.abc
import importlib.machinery
import socket
import sys
from collections.abc import Sequence
from types import ModuleType

import pytest


def _no_ray(*_args: object, **_kwargs: object) -> None:
    raise AssertionError("a unit test must not start Ray; move it to tests/integration")


def _no_socket(*_args: object, **_kwargs: object) -> None:
    raise AssertionError("a unit test must not open a socket; move it to tests/loopback")


class NoSocket(socket.socket):
    """Stands in for `socket.socket`: cannot be opened, only wrapped around a given descriptor.

    An event loop's own wake-up pair comes from `socket.socketpair`, which wraps descriptors.
    """

    def __init__(
        self, family: int = -1, type: int = -1, proto: int = -1, fileno: int | None = None
    ) -> None:
        if fileno is None:
            _no_socket()
        super().__init__(family, type, proto, fileno)


class RayFinder(importlib.abc.MetaPathFinder):
    """Makes `ray.init` raise in a Ray that is imported only while the test runs.

    Refusing its sockets would not do: Ray's own processes open theirs outside of Python.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != "ray":
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return spec
        execute = spec.loader.exec_module

        def execute_and_stop(module: ModuleType) -> None:
            execute(module)
            self._monkeypatch.setattr(module, "init", _no_ray)

        self._monkeypatch.setattr(spec.loader, "exec_module", execute_and_stop)
        return spec


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make `ray.init`, Python's sockets, ZeroMQ contexts, gRPC servers and channels raise."""
    monkeypatch.setattr(socket, "socket", NoSocket)
    # Importing Ray here would cost every run seconds, so a Ray that comes later is met by a finder.
    monkeypatch.setattr(sys, "meta_path", [RayFinder(monkeypatch), *sys.meta_path])
    for module, name, stop in (
        ("ray", "init", _no_ray),
        ("zmq", "Context", _no_socket),
        ("zmq.asyncio", "Context", _no_socket),
        ("grpc", "server", _no_socket),
        ("grpc", "insecure_channel", _no_socket),
        ("grpc.aio", "server", _no_socket),
        ("grpc.aio", "insecure_channel", _no_socket),
    ):
        if module in sys.modules:
            monkeypatch.setattr(sys.modules[module], name, stop)
