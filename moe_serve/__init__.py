"""The body of moe_serve: Ray actors, gRPC, ZeroMQ, torch, the page and the command line.

Responsible for carrying out what `placement` decides. Must never hold a rule of placement,
splitting, retrying, queueing or fairness. Used through `moe_serve.client`, `moe_serve.frontends`
and the command `moe-serve`.
"""

from placement import __version__

__all__ = ["__version__"]
