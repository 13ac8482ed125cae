"""The public gRPC API, package `moe_serve.rpc.v1`: code, tensors, status, tokens, options.

Responsible for what is the same on both ends of a connection. Must never hold a rule of routing or
placement, nor open a port. Called by routers, the controller's admin port, the client, the CLI and
the page; nothing else imports generated code.
"""

from moe_serve.rpc.v1 import dispatch_pb2, dispatch_pb2_grpc, placement_pb2, placement_pb2_grpc

API_VERSION = "moe_serve.rpc.v1"
"""Name of the package and version of the API, as `GetModelSpec` gives it."""

__all__ = [
    "API_VERSION",
    "dispatch_pb2",
    "dispatch_pb2_grpc",
    "placement_pb2",
    "placement_pb2_grpc",
]
