"""Timelines of expert demand: what recorded or made-up requests ask of each expert, window by
window.

Responsible for reading the recorded traces, for the order in which requests arrive, and for
cutting the stream of tokens into windows and quarters of windows. Must never reorder tokens inside
a request, and must never look at a layout. Called by the placement benchmark, by the learned
policy's training and by their tests.

Words and an example. A *trace* holds, for each token of each recorded request, the experts its
router chose in every layer. A *timeline* is the trace with its requests in some order: `mixed`
(seeded permutation), `blocks` (the same permutation, then grouped by domain, domains in a seeded
order: the mixture flips a few times), `shifting` (each domain swells and fades: the mixture drifts)
or `labels` (as blocks, by the label that the trace itself gives, where that is finer than a domain:
GPT-OSS has one request a label, so that it is one more permutation). With 2,048 tokens a window, 4
quarters and top-6, each quarter of each layer sums to 512 x 6. Tokens that do not fill a last
window are dropped. A trace is used once: windows share no token, unless `passes` asks for more.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Final

import numpy as np
import numpy.typing as npt

from benchmarks.placement_synthetic import synthetic_counts, synthetic_source

IntArray = npt.NDArray[np.int64]

ORDERS: Final = ("mixed", "blocks", "labels", "shifting")
DATA_VARIABLE: Final = "MOE_SERVE_DATA"
DRIFT_WIDTH: Final = 0.6
"""Standard deviation of a domain's arrivals in `shifting`, as a share of (all / domains)."""

_STEM = "math physics chem bio computer engineering machine algebra statistics astronomy anatomy"
_SOCIAL = (
    "econ politics sociology psychology policy management marketing business relations account "
    "geography security sexuality"
)
_DOMAIN_WORDS: Final = (
    ("stem", tuple(_STEM.split())),
    ("law", ("law", "jurisprudence")),
    ("medicine", ("medicine", "clinical", "virology", "nutrition", "health", "genetics", "aging")),
    ("humanities", ("history", "philosophy", "religion", "moral", "logic", "fallacies")),
    ("social", tuple(_SOCIAL.split())),
)
"""Domain of a question's category: the first one with a word that the category contains."""


class TracesMissing(RuntimeError):
    """The recorded traces are not on this machine: says which file, and how to name its folder."""


@dataclass(frozen=True)
class Case:
    """A model's router and the fleet it is served on.

    file: name of the recorded trace, "" for made-up demand. slots_per_rank: filled slots.
    window_tokens: tokens of a window where the caller names none.
    """

    name: str
    title: str
    file: str
    layers: int
    experts: int
    top_k: int
    ranks: int
    slots_per_rank: int
    window_tokens: int = 2048

    @property
    def slots(self) -> int:
        """Filled slots of a layer, all ranks."""
        return self.ranks * self.slots_per_rank


_DEEPSEEK = ("deepseek_v2_lite_prefill.npz", 26, 64, 6)
_SYNTHETIC = ("", 58, 256, 8)
CASES: Final = MappingProxyType(
    {
        case.name: case
        for case in (
            Case("deepseek8", "DeepSeek-V2-Lite prefill, 8 ranks x 9", *_DEEPSEEK, 8, 9),
            Case("deepseek16", "DeepSeek-V2-Lite prefill, 16 ranks x 5", *_DEEPSEEK, 16, 5),
            Case(
                "gptoss8",
                "GPT-OSS-20B decode, 8 ranks x 5",
                "gpt_oss_20b_decode.npz",
                24,
                32,
                4,
                8,
                5,
            ),
            Case("tiny", "tiny model, 4 ranks x 10", "tiny_moe_requests.npz", 4, 32, 4, 4, 10),
            Case("synthetic", "simulated 58 x 256, 32 ranks x 9", *_SYNTHETIC, 32, 9, 16384),
            Case("synthetic320", "simulated 58 x 256, 32 ranks x 10", *_SYNTHETIC, 32, 10, 16384),
            Case("synthetic64", "simulated 58 x 256, 64 ranks x 5", *_SYNTHETIC, 64, 5, 16384),
        )
    }
)


def orders_of(case: Case) -> tuple[str, ...]:
    """Orders worth a run: `labels` only where labels are finer than domains, and of made-up demand,
    which is costly to plan for, the two ends.
    """
    if not case.file:
        return ("mixed", "blocks")
    return tuple(order for order in ORDERS if order != "labels" or case.name == "gptoss8")


@dataclass(frozen=True, eq=False)
class Trace:
    """Recorded requests.

    ids: uint8 [tokens, layers, k]. first: int64 [requests + 1], request r is the tokens
    [first[r], first[r + 1]). domains: one name a request. labels: what the trace itself calls them.
    """

    ids: npt.NDArray[np.uint8]
    first: IntArray
    domains: tuple[str, ...]
    labels: tuple[str, ...]


def load_case(name: str) -> Case:
    """The case of that name.

    Raises ValueError for an unknown name, TracesMissing where its trace is not here.
    """
    case = CASES.get(name)
    if case is None:
        raise ValueError(f"case {name!r} is not one of {', '.join(CASES)}")
    if case.file:
        _trace_path(case.file)
    return case


def timeline(
    case: Case,
    order: str,
    seed: int,
    window_tokens: int | None = None,
    quarters: int = 4,
    *,
    requests: Collection[int] | None = None,
    passes: int = 1,
) -> IntArray:
    """Pairs (tokens x k) asked of each expert: int64 [windows, quarters, layers, experts].

    order: one of ORDERS. window_tokens: divisible by quarters; None = the case's. requests:
    numbers of the requests to use, None = all. passes: times the trace is gone through, each with
    an order of its own.

    Raises ValueError for an unknown order, a window that the quarters do not divide, a request
    that does not exist, and where the tokens do not fill one window; TracesMissing as `load_case`.
    """
    tokens = case.window_tokens if window_tokens is None else window_tokens
    if order not in ORDERS:
        raise ValueError(f"order {order!r} is not one of {', '.join(ORDERS)}")
    if quarters < 1 or tokens < 1 or tokens % quarters:
        raise ValueError(f"window_tokens {tokens} must be a positive multiple of {quarters}")
    if passes < 1:
        raise ValueError(f"passes must be >= 1, got {passes}")
    parts = [
        _recorded(case, order, (seed, number), requests)
        if case.file
        else _made_up(case, order, (seed, number), requests, tokens // quarters)
        for number in range(passes)
    ]
    if case.file:
        return count_windows(np.concatenate(parts), case.experts, tokens, quarters)
    counts: IntArray = np.concatenate(parts).astype(np.int64)
    return _windows(counts, quarters)


def request_domains(case: Case, seed: int = 0) -> tuple[str, ...]:
    """Domain of each request, by its number. seed: matters for made-up demand only."""
    if case.file:
        return load_trace(case).domains
    source = synthetic_source(case.layers, case.experts, seed)
    return tuple(request.domain for request in source.requests)


def request_order(domains: list[str], order: str, generator: np.random.Generator) -> list[int]:
    """Indices of `domains` (one a request) in the order in which the requests arrive.

    >>> line = request_order(["a", "b", "a", "b"], "blocks", np.random.default_rng(1))
    >>> [["a", "b", "a", "b"][i] for i in line] in (["a", "a", "b", "b"], ["b", "b", "a", "a"])
    True
    """
    shuffled = [int(i) for i in generator.permutation(len(domains))]
    if order == "mixed":
        return shuffled
    names = sorted(set(domains))
    place = {names[int(i)]: at for at, i in enumerate(generator.permutation(len(names)))}
    if order in ("blocks", "labels"):
        return sorted(shuffled, key=lambda i: place[domains[i]])
    when = generator.normal(0.0, DRIFT_WIDTH, len(domains))
    return sorted(shuffled, key=lambda i: (place[domains[i]] + float(when[i]), i))


def count_windows(
    ids: npt.NDArray[np.uint8], num_experts: int, window_tokens: int, quarters: int
) -> IntArray:
    """Count ids [tokens, layers, k] -> int64 [windows, quarters, layers, experts].

    Raises ValueError where the tokens do not fill one window.
    """
    num_windows = len(ids) // window_tokens
    if num_windows == 0:
        raise ValueError(f"{len(ids)} tokens do not fill a window of {window_tokens}")
    layers = ids.shape[1]
    size = window_tokens // quarters
    out = np.empty((num_windows * quarters, layers, num_experts), dtype=np.int64)
    offset = np.arange(layers, dtype=np.int64)[None, :, None] * num_experts
    for part in range(len(out)):
        keys = ids[part * size : (part + 1) * size].astype(np.int64) + offset
        counts = np.bincount(keys.reshape(-1), minlength=layers * num_experts)
        out[part] = counts.reshape(layers, num_experts)
    return _windows(out, quarters)


@lru_cache(maxsize=2)
def load_trace(case: Case) -> Trace:
    """The recorded trace of a case. Raises TracesMissing where it is not here."""
    with np.load(_trace_path(case.file)) as stored:
        ids = stored["topk_ids"]
        request = stored["request"].astype(np.int64)
        named = "request_domain" in stored
        labels = tuple(str(x) for x in stored["request_domain" if named else "category"])
        domains = labels if named else tuple(domain_of(label) for label in labels)
    first = np.searchsorted(request, np.arange(len(domains) + 1))
    assert bool((np.diff(request) >= 0).all()), f"{case.file}: requests are not consecutive"
    assert ids.shape[1:] == (case.layers, case.top_k), f"{case.file}: shape {ids.shape}"
    return Trace(ids, first.astype(np.int64), domains, labels)


def domain_of(category: str) -> str:
    """Domain of a question's category.

    >>> domain_of("college chemistry"), domain_of("world religions"), domain_of("miscellaneous")
    ('stem', 'humanities', 'other')
    """
    lower = category.lower()
    for domain, words in _DOMAIN_WORDS:
        if any(word in lower for word in words):
            return domain
    return "other"


def _recorded(
    case: Case, order: str, seed: tuple[int, int], requests: Collection[int] | None
) -> npt.NDArray[np.uint8]:
    trace = load_trace(case)
    chosen = _chosen(requests, len(trace.domains))
    names = trace.labels if order == "labels" else trace.domains
    line = request_order([names[r] for r in chosen], order, np.random.default_rng(seed))
    rows = [np.arange(trace.first[chosen[i]], trace.first[chosen[i] + 1]) for i in line]
    ids: npt.NDArray[np.uint8] = trace.ids[np.concatenate(rows)]
    return ids


def _made_up(
    case: Case,
    order: str,
    seed: tuple[int, int],
    requests: Collection[int] | None,
    part_tokens: int,
) -> IntArray:
    source = synthetic_source(case.layers, case.experts, seed[0])
    chosen = _chosen(requests, len(source.requests))
    domains = [source.requests[r].domain for r in chosen]
    line = request_order(domains, order, np.random.default_rng(seed))
    return synthetic_counts(source, [chosen[i] for i in line], case.top_k, part_tokens, sum(seed))


def _windows(parts: IntArray, quarters: int) -> IntArray:
    num_windows = len(parts) // quarters
    if num_windows == 0:
        raise ValueError(f"{len(parts)} parts do not fill a window of {quarters}")
    whole = parts[: num_windows * quarters]
    return whole.reshape(num_windows, quarters, *parts.shape[1:])


def _chosen(requests: Collection[int] | None, count: int) -> list[int]:
    chosen = list(range(count)) if requests is None else sorted(set(requests))
    if chosen and not 0 <= chosen[0] <= chosen[-1] < count:
        raise ValueError(f"requests must lie in [0, {count}), got {chosen[0]}..{chosen[-1]}")
    if not chosen:
        raise ValueError("requests names none; a timeline needs at least one")
    return chosen


def _trace_path(file: str) -> Path:
    folder = os.environ.get(DATA_VARIABLE, "")
    if not folder:
        raise TracesMissing(
            f"{file}: {DATA_VARIABLE} is not set; let it name the folder that holds expert_traces/"
        )
    path = Path(folder) / "expert_traces" / file
    if not path.is_file():
        raise TracesMissing(f"{path} does not exist; does {DATA_VARIABLE} name the right folder?")
    return path
