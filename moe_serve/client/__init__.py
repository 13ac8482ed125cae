"""Python client of the data path: `Client` for threads, `AsyncClient` for asyncio. Imports no Ray.

Responsible for splitting, deadlines and failover between routers. Must never hold a rule of
placement: callers and client use logical expert ids only.

    with Client(["127.0.0.1:50051"]) as client:
        output = client.forward(0, hidden, topk_ids, topk_weights, phase=Phase.DECODE)
"""

from moe_serve.client.aio import AsyncClient
from moe_serve.client.model_spec import ModelSpec
from moe_serve.client.sync import Client
from placement.topology import Phase

__all__ = ["AsyncClient", "Client", "ModelSpec", "Phase"]
