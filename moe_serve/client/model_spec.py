"""What a client needs to know of the service: shapes, limits, addresses. Read once and after a
failover."""

from __future__ import annotations

from dataclasses import dataclass

from moe_serve.rpc import dispatch_pb2


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """Answer to GetModelSpec. `checkpoint_layers[layer]` is the checkpoint's number of an MoE
    layer; `max_rows` the rows of one request that fit `max_message_bytes` in the widest type."""

    model: str
    weights_version: str
    num_layers: int
    checkpoint_layers: tuple[int, ...]
    num_experts: int
    top_k: int
    hidden_size: int
    data_types: tuple[int, ...]
    max_message_bytes: int
    max_rows: int
    router_addresses: tuple[str, ...]
    api_version: str
    simulated: bool

    @classmethod
    def from_response(cls, response: dispatch_pb2.GetModelSpecResponse) -> ModelSpec:
        """Spec of a response."""
        return cls(
            model=response.model,
            weights_version=response.weights_version,
            num_layers=response.num_layers,
            checkpoint_layers=tuple(response.checkpoint_layers),
            num_experts=response.num_experts,
            top_k=response.top_k,
            hidden_size=response.hidden_size,
            data_types=tuple(int(kind) for kind in response.data_types),
            max_message_bytes=response.max_message_bytes,
            max_rows=response.max_rows,
            router_addresses=tuple(response.router_addresses),
            api_version=response.api_version,
            simulated=response.simulated,
        )
