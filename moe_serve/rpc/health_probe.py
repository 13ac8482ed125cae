"""Ask a gRPC server whether it serves, as a probe of a container does:
`python -m moe_serve.rpc.health_probe HOST:PORT [--service NAME] [--tls-ca FILE]`.

Kubernetes' own gRPC probe speaks no TLS. Exit 0: SERVING. 1: it says something else. 2: no answer,
with the reason on stderr. Health checks need no token.

Responsible for this one question. Must never print what a peer sends but the name of a status.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc  # type: ignore[import-untyped]

from moe_serve.errors import StartRefused
from moe_serve.rpc.options import channel_credentials

TIMEOUT_S = 3.0
"""Longest wait for the answer where nothing else is said."""


def serving(address: str, service: str, tls_ca: Path | None, timeout_s: float) -> bool:
    """Whether the server at host:port says that `service` ("" = itself) is SERVING.

    Raises grpc.RpcError where it gives no answer, StartRefused where the PEM file cannot be read.
    """
    if tls_ca is None:
        channel = grpc.insecure_channel(address)
    else:
        channel = grpc.secure_channel(address, channel_credentials(tls_ca))
    with channel:
        check = health_pb2_grpc.HealthStub(channel).Check
        answer = check(health_pb2.HealthCheckRequest(service=service), timeout=timeout_s)
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit status of the question that the arguments ask."""
    parser = argparse.ArgumentParser(prog="health_probe", description="Is a gRPC server serving?")
    parser.add_argument("address", metavar="HOST:PORT")
    parser.add_argument("--service", default="", help="name of a gRPC service; none = the server")
    parser.add_argument("--tls-ca", type=Path, help="PEM file of the authority; none = plain text")
    parser.add_argument("--timeout", type=float, default=TIMEOUT_S, metavar="SECONDS")
    asked = parser.parse_args(arguments)
    try:
        return 0 if serving(asked.address, asked.service, asked.tls_ca, asked.timeout) else 1
    except grpc.RpcError as error:
        code = getattr(error, "code", None)
        sys.stderr.write(f"{asked.address}: {code().name if code else type(error).__name__}\n")
    except StartRefused as error:
        sys.stderr.write(f"{error.message}\n")
    return 2


if __name__ == "__main__":
    sys.exit(main())
