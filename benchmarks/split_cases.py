"""What the splitter is measured on: recorded and made-up batches, and layouts planned on their
past.

A case is a model's layers over an EP group. The first half of its tokens is the past that layouts
are planned on; batches come from the second half. `wide` is the case of 256 experts on 32 ranks
with 9 slots: four layers of the recorded DeepSeek-V2-Lite side by side, two of each layer's six
choices a token, so that skew and the correlation between tokens are real.

Responsible for this input, the same for the same seed. Must never measure. Called by
`benchmarks.split`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from placement.layout import ExpertLayout
from placement.policy import PolicyInput, propose
from placement.policy.eplb import balanced_packing
from placement.split import CompiledLayer, compile_layer
from placement.topology import NUM_PHASES, DeviceProfile, MoeSpec, RankSpec, Topology

DATA_VARIABLE = "MOE_SERVE_DATA"
"""Environment variable that names the folder with `expert_traces/*.npz`."""

POLICIES = ("static", "eplb", "incremental")
LAYOUTS = (*POLICIES, "random")
SYNTHETIC_TOKENS = 16_384

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class Case:
    """Tokens of some layers over an EP group. ids: int32 [tokens, layers, k]."""

    name: str
    ids: Int32s
    num_experts: int
    num_ranks: int
    slots_per_rank: int

    @property
    def num_layers(self) -> int:
        """Layers of the case."""
        return int(self.ids.shape[1])

    @property
    def past(self) -> Int64s:
        """Pairs of the first half: int64 [layers, experts]."""
        seen = self.ids[: len(self.ids) // 2]
        return np.stack(
            [
                np.bincount(seen[:, layer].reshape(-1), minlength=self.num_experts)
                for layer in range(self.num_layers)
            ]
        ).astype(np.int64)

    def first_layers(self, layers: int) -> Case:
        """The case with its first layers only."""
        return replace(self, ids=self.ids[:, :layers])

    def past_activations(self, tokens: int) -> Int64s:
        """Batches of so many tokens in the first half that use an expert: int64 [layers, experts].

        What a layout for memory-bound batches is planned on: reads, not pairs, are its load.
        """
        uses = np.zeros((self.num_layers, self.num_experts), np.int64)
        for at in range(0, len(self.ids) // 2 - tokens + 1, tokens):
            for layer in range(self.num_layers):
                uses[layer, np.unique(self.ids[at : at + tokens, layer])] += 1
        return uses

    def batches(self, layer: int, tokens: int) -> list[Int32s]:
        """The second half of a layer in batches of so many tokens: int32 [tokens, k] each."""
        first = len(self.ids) // 2
        future = np.ascontiguousarray(self.ids[first:, layer])
        return [future[at : at + tokens] for at in range(0, len(future) - tokens + 1, tokens)]


def cases(seed: int) -> list[Case]:
    """Every case whose data is there; the first has 256 experts on 32 ranks."""
    found = []
    folder = trace_folder()
    if folder is not None:
        wide = _wide(folder, seed)
        lite = _requests(folder / "deepseek_v2_lite_prefill.npz", seed)[:, ::6]
        oss = _requests(folder / "gpt_oss_20b_decode.npz", seed)[:, ::6]
        found = [
            Case("wide", wide, 256, 32, 9),
            Case("DeepSeek-V2-Lite 8 x 9", lite, 64, 8, 9),
            Case("DeepSeek-V2-Lite 16 x 5", lite, 64, 16, 5),
            Case("GPT-OSS-20B 8 x 5", oss, 32, 8, 5),
        ]
    found.append(Case("synthetic", synthetic(seed, SYNTHETIC_TOKENS), 256, 32, 9))
    return found


def trace_folder() -> Path | None:
    """Folder of the recorded traces, None where it is not given."""
    given = os.environ.get(DATA_VARIABLE)
    folder = Path(given) / "expert_traces" if given else None
    return folder if folder is not None and folder.is_dir() else None


def synthetic(seed: int, tokens: int, layers: int = 2, num_experts: int = 256) -> Int32s:
    """Top-8 of Zipf popularities (exponent 0.8): int32 [tokens, layers, 8].

    In the second half a quarter of the hottest quarter has changed places with cold experts.
    """
    quarter = num_experts // 4
    rng = np.random.default_rng(seed)
    ids = np.empty((tokens, layers, 8), np.int32)
    for layer in range(layers):
        share = rng.permutation(1.0 / np.arange(1, num_experts + 1) ** 0.8)
        for half in (slice(0, tokens // 2), slice(tokens // 2, tokens)):
            # Top k of log share + Gumbel noise draws k experts without repetition.
            noise = rng.gumbel(size=(len(ids[half]), num_experts))
            ids[half, layer] = np.argsort(-(np.log(share) + noise), axis=1)[:, :8]
            hottest = np.argsort(-share, kind="stable")
            hot, cold = rng.permutation(hottest[:quarter]), rng.permutation(hottest[quarter:])
            hot, cold = hot[: quarter // 4], cold[: quarter // 4]
            share[hot], share[cold] = share[cold], share[hot]
    return ids


def layers_of(
    case: Case, layout: str, seed: int, demand: Int64s | None = None
) -> list[CompiledLayer]:
    """The case's layers under a policy's layout, planned on the pairs of the past (or on `demand`
    [layers, experts]), or a random valid one.
    """
    if layout == "random":
        return _random(case, seed)
    planned = _plan(case, layout, case.past if demand is None else demand)
    return [
        compile_layer(*planned.layer_slots(layer), case.num_experts, case.num_ranks)
        for layer in range(case.num_layers)
    ]


def packed_ranks(case: Case) -> Int64s:
    """Rank of each expert without replicas, heaviest first onto the lightest rank with room, equal
    numbers on all ranks: int64 [layers, experts].
    """
    return balanced_packing(case.past.astype(np.float64), case.num_ranks)[0]


def _plan(case: Case, policy: str, demand: Int64s) -> ExpertLayout:
    topology = Topology(
        ranks=tuple(
            RankSpec(
                rank=rank,
                node=f"node-{rank // 8}",
                failure_domain=f"node-{rank // 8}",
                num_slots=case.slots_per_rank * case.num_layers,
                profile="even",
            )
            for rank in range(case.num_ranks)
        ),
        profiles=(
            DeviceProfile(
                name="even", flops_per_s=1e12, memory_bytes_per_s=1e11, copy_bytes_per_s=1e9
            ),
        ),
    )
    scenarios = np.zeros((1, NUM_PHASES, case.num_layers, case.num_experts))
    scenarios[0, 0] = demand
    request = PolicyInput(
        spec=MoeSpec(
            model=case.name,
            weights_version="1",
            num_layers=case.num_layers,
            num_experts=case.num_experts,
            top_k=int(case.ids.shape[2]),
            hidden_size=2048,
            intermediate_size=1408,
            expert_bytes=17_301_504,
            slot_bytes=17_301_504,
        ),
        topology=topology,
        layout=ExpertLayout.empty(
            topology, num_layers=case.num_layers, num_experts=case.num_experts
        ),
        scenarios=scenarios,
        weights=np.ones(1),
        staging_slots=0,
    )
    if policy != "incremental":
        return propose(policy, request)
    live = propose("static", request)
    fields = {name: getattr(request, name) for name in request.__struct_fields__}
    return propose("incremental", PolicyInput(**{**fields, "layout": live}))


def _random(case: Case, seed: int) -> list[CompiledLayer]:
    rng = np.random.default_rng(seed)
    num_slots = case.num_ranks * case.slots_per_rank
    ranks = np.repeat(np.arange(case.num_ranks), case.slots_per_rank)
    layers = []
    for _ in range(case.num_layers):
        extra = rng.integers(0, case.num_experts, num_slots - case.num_experts)
        experts = rng.permutation(np.concatenate((np.arange(case.num_experts), extra)))
        layers.append(compile_layer(experts, ranks, case.num_experts, case.num_ranks))
    return layers


def _requests(path: Path, seed: int) -> Int32s:
    """Tokens of a trace with its requests in random order: int32 [tokens, layers, k]."""
    with np.load(path) as trace:
        ids, request = trace["topk_ids"], trace["request"]
    order = np.random.default_rng(seed).permutation(np.unique(request))
    turn = np.argsort(order, kind="stable")  # place of request order[i] in time
    ordered: Int32s = ids[np.argsort(turn[request], kind="stable")].astype(np.int32)
    return ordered


def _wide(folder: Path, seed: int) -> Int32s:
    rng = np.random.default_rng(seed)
    ids = _requests(folder / "deepseek_v2_lite_prefill.npz", seed)
    tokens, layers, width = ids.shape
    groups = []
    for first in range(0, layers - layers % 4, 4):
        columns = []
        for i in range(4):
            kept = np.argsort(rng.random((tokens, width)), axis=1)[:, :2]
            columns.append(np.take_along_axis(ids[:, first + i], kept, 1) + 64 * i)
        groups.append(np.concatenate(columns, axis=1))
    return np.stack(groups, axis=1).astype(np.int32)
