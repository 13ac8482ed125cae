"""Put a transformers (>= 5) MoE model in front of the service: its experts are computed remotely.

Responsible for the adapter only: gate, shared experts and scaling stay in the model; hidden states,
expert ids and gate weights go out layer by layer. The library's own experts registry is used, so no
class is patched. Must never be part of a training run: remote experts have no gradient. Called by
whoever runs the model; several threads may run passes of one attached model at once.

    model = load_front_end("/models/OLMoE-1B-7B", dtype="bfloat16")   # holds no expert weight
    with Client(addresses) as client, attach(model, client):
        model.generate(**inputs)
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from moe_serve.errors import FailedPrecondition, InvalidArgument
from moe_serve.frontends.library import checkpoint_layer, experts_modules, registry
from moe_serve.frontends.loading import DTYPES, load_front_end
from moe_serve.frontends.passes import CurrentPass, PassWatcher
from placement.topology import Phase

if TYPE_CHECKING:
    import torch

    from moe_serve.client import Client, ModelSpec

__all__ = ["Attachment", "AttachmentStats", "ExpertCall", "attach", "load_front_end"]

IMPLEMENTATION: Final = "moe_serve"
"""Name in the library's experts registry."""
_BINDING: Final = "_moe_serve_binding"

CallHook = Callable[["ExpertCall"], None]


@dataclass(frozen=True, slots=True)
class ExpertCall:
    """One remote call, for whoever audits: ids int32 [T, k], masks bool (None = all valid), seconds
    of the round trip."""

    request_id: str
    layer: int
    phase: Phase
    topk_ids: npt.NDArray[np.int32]
    row_valid: npt.NDArray[np.bool_] | None
    pair_valid: npt.NDArray[np.bool_] | None
    seconds: float

    def valid_pairs(self) -> int:
        """Pairs of this call that are work: valid in a valid row."""
        valid = np.ones(self.topk_ids.shape, np.bool_)
        if self.pair_valid is not None:
            valid &= self.pair_valid
        if self.row_valid is not None:
            valid &= self.row_valid[:, None]
        return int(valid.sum())


@dataclass(frozen=True, slots=True)
class AttachmentStats:
    """Totals of the answered calls: rows as sent, pairs that were valid, seconds waited."""

    calls: int = 0
    rows: int = 0
    pairs: int = 0
    seconds: float = 0.0


class Attachment:
    """A model attached to a service; made by `attach`.

    `detach` (or leaving the `with`) gives the model its own experts back, if it has them.
    """

    def __init__(
        self, model: Any, watcher: PassWatcher, experts: list[Any], on_call: CallHook | None
    ) -> None:
        self._model = model
        self._watcher: PassWatcher | None = watcher
        self._experts = experts
        self._previous = model.get_experts_implementation()
        self._on_call = on_call
        self._lock = threading.Lock()
        self._stats = AttachmentStats()

    @property
    def stats(self) -> AttachmentStats:
        """Totals so far."""
        return self._stats

    def record(self, call: ExpertCall) -> None:
        """Count an answered call and hand it to the caller's hook."""
        with self._lock:
            last = self._stats
            self._stats = replace(
                last,
                calls=last.calls + 1,
                rows=last.rows + call.topk_ids.shape[0],
                pairs=last.pairs + call.valid_pairs(),
                seconds=last.seconds + call.seconds,
            )
        if self._on_call is not None:
            self._on_call(call)

    def detach(self) -> None:
        """Undo `attach`; idempotent."""
        if self._watcher is None:
            return
        self._watcher.remove()
        self._watcher = None
        for module in self._experts:
            delattr(module, _BINDING)
        self._model.set_experts_implementation(self._previous)

    def __enter__(self) -> Attachment:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.detach()


@dataclass(frozen=True, slots=True)
class _Binding:
    """What one experts module needs to make its call."""

    layer: int
    num_experts: int
    client: Client
    current: CurrentPass
    name: str
    dtype: str | None
    timeout_s: float | None
    attachment: Attachment


def attach(
    model: Any,
    client: Client,
    *,
    name: str = "front-end",
    dtype: str | None = None,
    timeout_s: float | None = None,
    on_call: CallHook | None = None,
) -> Attachment:
    """Send a model's expert computation to the service from now on.

    Args:
        model: a transformers >= 5 MoE model (eval mode), with or without expert weights.
        client: blocking client of the service; its spec must fit the model.
        name: prefix of request ids.
        dtype: element type that travels (float32, bfloat16, float16); None = that of the hidden
            states. A narrower one halves the bytes and rounds.
        timeout_s: deadline of one layer call.
        on_call: called after each remote call, on the thread that runs the model.

    Raises:
        StartRefused: transformers is absent or older than 5.
        InvalidArgument: the model has no routed experts, or the service serves another shape.
        FailedPrecondition: the model is attached already, or cannot use remote experts.
    """
    functions = registry()
    if dtype is not None and dtype not in DTYPES:
        raise InvalidArgument(f"dtype: is {dtype!r}; want one of {', '.join(DTYPES)}")
    experts = experts_modules(model)
    if any(hasattr(module, _BINDING) for module in experts.values()):
        raise FailedPrecondition("the model is attached already; detach it first")
    spec = client.spec()
    _check_fit(model, experts, spec)
    if IMPLEMENTATION not in functions.valid_keys():
        functions.register(IMPLEMENTATION, _remote_experts)
    watcher = PassWatcher(model.base_model)
    attachment = Attachment(model, watcher, list(experts.values()), on_call)
    for layer, module in enumerate(experts.values()):
        binding = _Binding(
            layer, spec.num_experts, client, watcher.current, name, dtype, timeout_s, attachment
        )
        setattr(module, _BINDING, binding)
    model.set_experts_implementation(IMPLEMENTATION)
    # The library skips, without a word, classes that it thinks cannot switch.
    if any(m.config._experts_implementation != IMPLEMENTATION for m in experts.values()):
        attachment.detach()
        raise FailedPrecondition(f"{type(model).__name__} cannot use remote experts")
    return attachment


def _check_fit(model: Any, experts: dict[str, Any], spec: ModelSpec) -> None:
    """Raises InvalidArgument where model and service differ in shape."""
    config = model.config.get_text_config()
    wanted = {
        "MoE layers": (len(experts), spec.num_layers),
        "hidden_size": (int(config.hidden_size), spec.hidden_size),
    }
    layers = tuple(checkpoint_layer(name) for name in experts)
    if len(layers) == spec.num_layers and None not in layers:
        wanted["MoE layers at"] = (layers, spec.checkpoint_layers)  # type: ignore[assignment]
    for name, module in experts.items():
        wanted[f"experts in {name}"] = (int(module.num_experts), spec.num_experts)
    for what, (ours, theirs) in wanted.items():
        if ours != theirs:
            raise InvalidArgument(
                f"{what}: the model has {ours}, the service's {spec.model!r} {theirs}"
            )
    if int(config.num_experts_per_tok) > spec.top_k:
        raise InvalidArgument(
            f"experts a token: the model has {config.num_experts_per_tok}, the service's "
            f"{spec.model!r} takes at most {spec.top_k}"
        )


def _remote_experts(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """The registered experts function: (T, H), (T, k), (T, k) -> (T, H), gate weights applied."""
    binding: _Binding | None = getattr(self, _BINDING, None)
    if binding is None:
        raise FailedPrecondition(
            "this model uses the moe_serve experts but is not attached; call attach(model, client)"
        )
    if hidden_states.requires_grad or self.training:
        raise FailedPrecondition(
            "remote experts are for inference: call model.eval() and use torch.inference_mode()"
        )
    ids = top_k_index.cpu().numpy()
    # The library marks pairs of other expert-parallel ranks with the id num_experts: they are no
    # work.
    real = ids != binding.num_experts
    pair_valid = None if real.all() else real
    phase, row_valid = binding.current.phase, binding.current.row_valid
    if row_valid is not None and row_valid.shape[0] != hidden_states.shape[0]:
        raise InvalidArgument(
            f"{hidden_states.shape[0]} rows in MoE layer {binding.layer}, the pass has "
            f"{row_valid.shape[0]}"
        )
    request_id = f"{binding.name}-{binding.current.number}-{binding.layer}"
    began_s = time.monotonic()
    output = binding.client.forward(
        binding.layer,
        _to_numpy(hidden_states, binding.dtype),
        ids,
        top_k_weights.float().cpu().numpy(),
        phase=phase,
        request_id=request_id,
        row_valid=row_valid,
        pair_valid=pair_valid,
        timeout_s=binding.timeout_s,
    )
    seconds = time.monotonic() - began_s
    binding.attachment.record(
        ExpertCall(
            request_id, binding.layer, phase, ids.astype(np.int32), row_valid, pair_valid, seconds
        )
    )
    return _to_torch(output).to(device=hidden_states.device, dtype=hidden_states.dtype)


def _to_numpy(rows: torch.Tensor, dtype: str | None) -> npt.NDArray[Any]:
    """Raw array of rows as they travel: bfloat16 as uint16 bit patterns."""
    import torch

    plain = rows.detach().cpu().contiguous()
    if dtype is not None:
        plain = plain.to(getattr(torch, dtype))
    if plain.dtype == torch.bfloat16:
        bits: npt.NDArray[Any] = plain.view(torch.uint16).numpy()
        return bits
    if plain.dtype not in (torch.float32, torch.float16):
        raise InvalidArgument(f"hidden states are {plain.dtype}; want float32, bfloat16 or float16")
    values: npt.NDArray[Any] = plain.numpy()
    return values


def _to_torch(output: npt.NDArray[Any]) -> torch.Tensor:
    """A reply as a tensor. It is read-only memory of a message; torch wants its own."""
    import torch

    answer = torch.from_numpy(output.copy())
    return answer.view(torch.bfloat16) if answer.dtype == torch.uint16 else answer
