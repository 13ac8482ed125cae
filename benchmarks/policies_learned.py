"""A small learned policy: a network that forecasts the next window's shares, trained offline, in
front of the placement step that `incremental` uses.

The network sees each expert of a layer alone: its share in each of the last 12 quarters of windows,
the share's long mean, how alike the layer's last quarters are, and, in the variant with *memory*,
the share the same expert of the same layer had in the training traffic. Two hidden layers give a
correction to the log of the short mean; a softmax over the layer's experts gives shares. Trained by
cross-entropy against the next window's shares.

Without memory it can be used on any model; with memory it knows one model and one mixture: on
another model the memory is empty (even shares).

Responsible for features, network, training and the policy. Must never see the window it is asked
about. Called by the race; depends on numpy alone, so that a seed gives the same network everywhere
up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
import numpy.typing as npt

from placement.layout import ExpertLayout
from placement.policy import PolicyInput, propose

FloatArray = npt.NDArray[np.float64]
IntArray = npt.NDArray[np.int64]

QUARTERS_SEEN = 12
"""Quarters of windows the network looks at: three windows."""
WINDOW_QUARTERS = 4
HIDDEN = 32
STEPS = 1_500
BATCH = 64
"""Layers of windows a step."""
LEARNING_RATE = 3e-3
MEAN_WEIGHT = 0.5
"""Weight of the mean scenario beside the last quarters' deviations, as in production."""
_FLOOR = 0.02
"""Least share, in shares of an even one, so that logs stay bounded."""


@dataclass(frozen=True, eq=False)
class Network:
    """Weights, and the shares remembered from training: float64 [layers, experts] or None."""

    weights: tuple[FloatArray, ...]
    memory: FloatArray | None

    def shares(self, quarters: FloatArray) -> FloatArray:
        """Forecast shares [layers, experts] from quarters [n, layers, experts], oldest first."""
        memory = self.memory if _fits(self.memory, quarters) else None
        features, base = featured(quarters, memory, with_memory=self.memory is not None)
        logits = base + _forward(self.weights, features)[-1][..., 0]
        return _softmax(logits)


def train(timelines: Sequence[IntArray], seed: int, *, memory: bool, steps: int = STEPS) -> Network:
    """Network for timelines of one model, each int64 [windows, quarters, layers, experts].

    Raises ValueError where no timeline has more windows than the network looks at.
    """
    generator = np.random.default_rng(seed)
    known: FloatArray | None = None
    if memory:
        known = sum(
            (t.sum(axis=(0, 1)).astype(np.float64) for t in timelines),
            np.zeros(timelines[0].shape[2:]),
        )
    samples = [
        (*featured(quarters, known, with_memory=memory), truth)
        for timeline in timelines
        for quarters, truth in _examples(timeline)
    ]
    if not samples:
        raise ValueError(f"timelines need more than {QUARTERS_SEEN // WINDOW_QUARTERS} windows")
    features = np.concatenate([f for f, _, _ in samples])
    base = np.concatenate([b for _, b, _ in samples])
    truth = np.concatenate([t for _, _, t in samples])
    weights = _initial(features.shape[-1], generator)
    moments = [(np.zeros_like(w), np.zeros_like(w)) for w in weights]
    for step in range(1, steps + 1):
        rows = generator.integers(len(features), size=BATCH)
        gradients = _gradients(weights, features[rows], base[rows], truth[rows])
        rate = LEARNING_RATE * (1.0 - step / (steps + 1))
        _adam(weights, gradients, moments, step, rate)
    return Network(tuple(weights), known)


def policy_of(network: Network) -> Callable[[PolicyInput], ExpertLayout]:
    """`propose(request)`: the request's scenarios are the last quarters, oldest first, in pairs a
    second."""

    def propose_learned(request: PolicyInput) -> ExpertLayout:
        quarters = request.scenarios.sum(axis=1)
        if not quarters.any():
            return propose("incremental", request)
        rate = quarters[-WINDOW_QUARTERS:].sum(axis=-1).mean(axis=0)
        mean = network.shares(quarters) * rate[:, None]
        last = quarters[-WINDOW_QUARTERS:]
        around = np.maximum(mean[None] + last - last.mean(axis=0, keepdims=True), 0.0)
        demand = np.concatenate((mean[None], around))
        scenarios = np.zeros((len(demand), *request.scenarios.shape[1:]))
        scenarios[:, 0] = demand
        weights = np.full(len(demand), (1.0 - MEAN_WEIGHT) / len(around))
        weights[0] = MEAN_WEIGHT
        return propose(
            "incremental",
            msgspec.structs.replace(request, scenarios=scenarios, weights=weights),
        )

    return propose_learned


def featured(
    quarters: FloatArray, memory: FloatArray | None, *, with_memory: bool
) -> tuple[FloatArray, FloatArray]:
    """(features [layers, experts, n], log of the short mean's shares [layers, experts]).

    quarters: [n, layers, experts], oldest first; fewer than QUARTERS_SEEN are filled up with the
    oldest. Shares are in logs of shares of an even one: 0 is even.
    """
    seen = quarters[-QUARTERS_SEEN:]
    missing = QUARTERS_SEEN - len(seen)
    if missing:
        seen = np.concatenate((np.repeat(seen[:1], missing, axis=0), seen))
    logs = _logs(seen)
    short = _logs(seen[-WINDOW_QUARTERS:].sum(axis=0))
    long = _logs(seen.sum(axis=0))
    alike = _cosine(seen[-1], seen[-WINDOW_QUARTERS:-1].sum(axis=0))
    drifted = _cosine(seen[-WINDOW_QUARTERS:].sum(axis=0), seen[:-WINDOW_QUARTERS].sum(axis=0))
    shape = (*short.shape, 1)
    columns = [
        np.moveaxis(logs, 0, -1) - short[..., None],
        (long - short)[..., None],
        short[..., None],
        np.broadcast_to(alike[:, None, None], shape),
        np.broadcast_to(drifted[:, None, None], shape),
    ]
    if with_memory:
        known = np.zeros_like(short) if memory is None else _logs(memory)
        columns.append((known - short)[..., None] if memory is not None else known[..., None])
    return np.concatenate(columns, axis=-1), short


def mean_shares(quarters: FloatArray, *, quarters_kept: int) -> FloatArray:
    """The plain forecast to beat: shares [layers, experts] of the last quarters' sum."""
    load = quarters[-quarters_kept:].sum(axis=0) + _FLOOR
    shares: FloatArray = load / load.sum(axis=-1, keepdims=True)
    return shares


def cross_entropy(forecaster: Callable[[FloatArray], FloatArray], timeline: IntArray) -> float:
    """Mean over windows and layers of the cross-entropy of what came, in nats, above its own
    entropy (0 = a perfect forecast). forecaster: as `Network.shares`."""
    excess = []
    for quarters, truth in _examples(timeline):
        forecast = forecaster(quarters)
        safe = np.where(truth > 0, truth, 1.0)
        excess.append((truth * (np.log(safe) - np.log(forecast))).sum(axis=-1).mean())
    return float(np.mean(excess))


def _examples(timeline: IntArray) -> list[tuple[FloatArray, FloatArray]]:
    windows, parts = timeline.shape[:2]
    seen = QUARTERS_SEEN // parts
    flat = timeline.reshape(windows * parts, *timeline.shape[2:]).astype(np.float64)
    out = []
    for window in range(seen, windows):
        truth = timeline[window].sum(axis=0).astype(np.float64)
        truth /= truth.sum(axis=-1, keepdims=True)
        out.append((flat[(window - seen) * parts : window * parts], truth))
    return out


def _fits(memory: FloatArray | None, quarters: FloatArray) -> bool:
    return memory is not None and memory.shape == quarters.shape[1:]


def _logs(load: FloatArray) -> FloatArray:
    total = load.sum(axis=-1, keepdims=True)
    even = np.where(total > 0, load / np.where(total > 0, total, 1.0), 0.0) * load.shape[-1]
    logs: FloatArray = np.log(even + _FLOOR)
    return logs


def _cosine(a: FloatArray, b: FloatArray) -> FloatArray:
    size = np.linalg.norm(a, axis=-1) * np.linalg.norm(b, axis=-1)
    cosine: FloatArray = (a * b).sum(axis=-1) / np.where(size > 0, size, 1.0)
    return cosine


def _softmax(logits: FloatArray) -> FloatArray:
    powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
    shares: FloatArray = powers / powers.sum(axis=-1, keepdims=True)
    return shares


def _initial(inputs: int, generator: np.random.Generator) -> list[FloatArray]:
    """Weights and biases of two hidden layers and an output that begins at zero: no correction."""
    return [
        generator.standard_normal((inputs, HIDDEN)) / np.sqrt(inputs),
        np.zeros(HIDDEN),
        generator.standard_normal((HIDDEN, HIDDEN)) / np.sqrt(HIDDEN),
        np.zeros(HIDDEN),
        np.zeros((HIDDEN, 1)),
        np.zeros(1),
    ]


def _forward(weights: Sequence[FloatArray], features: FloatArray) -> list[FloatArray]:
    first = np.tanh(features @ weights[0] + weights[1])
    second = np.tanh(first @ weights[2] + weights[3])
    return [first, second, second @ weights[4] + weights[5]]


def _gradients(
    weights: Sequence[FloatArray], features: FloatArray, base: FloatArray, truth: FloatArray
) -> list[FloatArray]:
    """Of the mean cross-entropy of a batch: features [rows, experts, n], base and truth [rows,
    experts]."""
    first, second, out = _forward(weights, features)
    error = ((_softmax(base + out[..., 0]) - truth) / len(truth)).reshape(-1, 1)
    flat = features.reshape(-1, features.shape[-1])
    one, two = first.reshape(-1, HIDDEN), second.reshape(-1, HIDDEN)
    back_two = (error @ weights[4].T) * (1.0 - two**2)
    back_one = (back_two @ weights[2].T) * (1.0 - one**2)
    return [
        flat.T @ back_one,
        back_one.sum(axis=0),
        one.T @ back_two,
        back_two.sum(axis=0),
        two.T @ error,
        error.sum(axis=0),
    ]


def _adam(
    weights: list[FloatArray],
    gradients: Sequence[FloatArray],
    moments: Sequence[tuple[FloatArray, FloatArray]],
    step: int,
    rate: float,
) -> None:
    for row, (gradient, (mean, square)) in enumerate(zip(gradients, moments, strict=True)):
        mean[:] = 0.9 * mean + 0.1 * gradient
        square[:] = 0.999 * square + 0.001 * gradient**2
        size = np.sqrt(square / (1 - 0.999**step)) + 1e-8
        weights[row] = weights[row] - rate * (mean / (1 - 0.9**step)) / size
