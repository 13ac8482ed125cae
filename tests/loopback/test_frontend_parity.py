"""transformers models with remote experts give the logits and texts of the local models.

The far side computes with the local model's own weights in float64, behind a real gRPC server; the
front end is loaded from the saved checkpoint without its experts.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5")

from moe_serve.client import Client, Phase  # noqa: E402
from moe_serve.errors import FailedPrecondition, InvalidArgument, StartRefused  # noqa: E402
from moe_serve.frontends.library import experts_modules  # noqa: E402
from moe_serve.frontends.passes import rows_of_mask  # noqa: E402
from moe_serve.frontends.transformers import ExpertCall, attach, load_front_end  # noqa: E402
from moe_serve.weights.errors import WeightsError  # noqa: E402
from tests.fakes.dispatch_service import FakeRouter, threaded_router  # noqa: E402

ATOL = 1e-4
COMMON = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": None,
    # Larger than the default, so that experts, gates and attention matter.
    "initializer_range": 0.2,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "olmoe": ("Olmoe", {"num_experts": 8, "intermediate_size": 24}),
    "qwen3_moe": (
        "Qwen3Moe",
        {
            "num_experts": 8,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
            "head_dim": 8,
            "tie_word_embeddings": True,
        },
    ),
    "mixtral": ("Mixtral", {"num_local_experts": 8, "intermediate_size": 24}),
    "qwen2_moe": (
        "Qwen2Moe",
        {
            "num_experts": 8,
            "moe_intermediate_size": 24,
            "shared_expert_intermediate_size": 40,
            "mlp_only_layers": [1],
        },
    ),
    "deepseek_v3": (
        "DeepseekV3",
        {
            "n_routed_experts": 8,
            "moe_intermediate_size": 24,
            "intermediate_size": 40,
            "n_shared_experts": 1,
            "n_group": 4,
            "topk_group": 2,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 2.5,
            "num_key_value_heads": 4,
            "kv_lora_rank": 16,
            "q_lora_rank": 16,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 8,
            "v_head_dim": 8,
        },
    ),
}
MOE_LAYERS = {"qwen2_moe": (0, 2), "deepseek_v3": (1, 2)}


@dataclass
class Rig:
    """A local model, its checkpoint, the front end made from it, and the service behind that."""

    local: Any
    folder: Path
    front: Any
    router: FakeRouter
    client: Client


def remote(model: Any) -> dict[str, Any]:
    """Settings of a fake router that computes with a local model's experts."""
    modules = list(experts_modules(model).values())
    weights = [
        (m.gate_up_proj.detach().double().numpy(), m.down_proj.detach().double().numpy())
        for m in modules
    ]

    def experts(layer: int, expert: int, rows: np.ndarray) -> np.ndarray:
        gate_up, down = weights[layer][0][expert], weights[layer][1][expert]
        gate, up = np.split(rows @ gate_up.T, 2, axis=1)
        return (gate / (1 + np.exp(-gate)) * up) @ down.T

    return {
        "experts": experts,
        "num_layers": len(modules),
        "num_experts": int(modules[0].num_experts),
        "top_k": int(model.config.num_experts_per_tok),
        "hidden_size": int(model.config.hidden_size),
    }


def make(family: str, folder: Path) -> Any:
    """A small random model, saved; every tensor differs from its initial value."""
    name, own = FAMILIES[family]
    torch.manual_seed(7)
    config = getattr(transformers, f"{name}Config")(**(COMMON | own))
    config._experts_implementation = "eager"
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.ndim == 1 and tensor.is_floating_point():
                tensor.add_(torch.randn_like(tensor) * 0.1)
        rotary = model.model.rotary_emb
        model.model.rotary_emb = type(rotary)(config)
    model.generation_config.repetition_penalty = 1.3
    model.save_pretrained(folder)
    return model


@pytest.fixture(scope="module", params=[*FAMILIES, "tiny"])
def rig(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    if request.param == "tiny":
        folder = Path(str(resources.files("moe_serve.demo") / "tiny_moe"))
        local = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, experts_implementation="eager"
        ).eval()
    else:
        folder = tmp_path_factory.mktemp(request.param)
        local = make(request.param, folder)
    layers = MOE_LAYERS.get(request.param, ())
    with (
        threaded_router(**remote(local), checkpoint_layers=layers) as router,
        Client([router.address]) as client,
    ):
        yield Rig(local, folder, load_front_end(str(folder)), router, client)
    torch.set_num_threads(threads)


def prompts(model: Any) -> dict[str, Any]:
    """Three prompts of different lengths, padded on the left."""
    rng = np.random.default_rng(3)
    ids = torch.from_numpy(rng.integers(3, min(97, model.config.vocab_size), (3, 9)))
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    mask[2, :7] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


# ------------------------------------------------------------------------------- parity


def test_logits_equal_those_of_the_local_model(rig: Rig) -> None:
    inputs = prompts(rig.local)
    plain = {"input_ids": inputs["input_ids"][:1]}
    with torch.inference_mode(), attach(rig.front, rig.client):
        for given, valid in (
            (plain, torch.ones(1, 9, dtype=torch.bool)),
            (inputs, inputs["attention_mask"].bool()),
        ):
            diff = (rig.front(**given).logits - rig.local(**given).logits)[valid]
            assert float(diff.abs().max()) <= ATOL
    # The model's experts matter: the far side did something.
    with torch.inference_mode():
        silent = rig.local(**plain).logits
        for module in experts_modules(rig.local).values():
            module.down_proj.data.mul_(0.5)
        halved = rig.local(**plain).logits
        for module in experts_modules(rig.local).values():
            module.down_proj.data.mul_(2.0)
    assert float((silent - halved).abs().max()) > 100 * ATOL


def test_greedy_texts_are_equal(rig: Rig) -> None:
    inputs = prompts(rig.local)
    options = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
    calls: list[ExpertCall] = []
    with torch.inference_mode(), attach(rig.front, rig.client, on_call=calls.append) as attached:
        there = rig.front.generate(**inputs, **options)
    here = rig.local.generate(**inputs, **options)
    assert there.tolist() == here.tolist()
    layers = len(experts_modules(rig.local))
    assert [call.layer for call in calls] == list(range(layers)) * 12
    k = int(rig.local.config.num_experts_per_tok)
    assert [call.phase for call in calls] == [Phase.PREFILL] * layers + [Phase.DECODE] * 11 * layers
    # Padding is no work, in the calls and on the wire.
    real = int(inputs["attention_mask"].sum())
    assert calls[0].valid_pairs() == real * k
    assert calls[-1].topk_ids.shape == (3, k)
    assert calls[-1].row_valid is None
    sent = rig.router.requests[-len(calls) :]
    assert [request.request_id for request in sent] == [call.request_id for call in calls]
    assert sent[0].row_valid != b""
    stats = attached.stats
    assert (stats.calls, stats.rows) == (len(calls), layers * (27 + 11 * 3))
    assert stats.pairs == sum(call.valid_pairs() for call in calls)
    assert stats.seconds > 0


def test_the_front_end_holds_no_expert_weights(rig: Rig) -> None:
    held = {
        name: parameter.numel()
        for name, parameter in rig.front.named_parameters()
        if ".experts." in name
    }
    assert len(held) == 2 * len(experts_modules(rig.local))
    assert set(held.values()) == {0}
    rest = {n: p for n, p in rig.local.state_dict().items() if ".mlp.experts." not in n}
    for name, tensor in rig.front.state_dict().items():
        if ".mlp.experts." not in name:
            assert torch.equal(tensor, rest.pop(name)), name
    assert rest == {}
    rig.front.to("cpu")  # meta parameters could not be moved
    assert not any(parameter.requires_grad for parameter in rig.front.parameters())
    assert not rig.front.training
    assert rig.front.generation_config.to_diff_dict() == rig.local.generation_config.to_diff_dict()


# ------------------------------------------------------------------------- one small model


@pytest.fixture(scope="module")
def olmoe(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Rig]:
    folder = tmp_path_factory.mktemp("one")
    local = make("olmoe", folder)
    with threaded_router(**remote(local)) as router, Client([router.address]) as client:
        yield Rig(local, folder, load_front_end(str(folder)), router, client)


IDS = torch.tensor([[5, 6, 7, 8]])


def test_detaching_gives_the_model_its_own_experts_back(olmoe: Rig) -> None:
    with torch.inference_mode():
        before = olmoe.local(IDS).logits
        implementation = olmoe.local.config._experts_implementation
        attached = attach(olmoe.local, olmoe.client)
        asked = len(olmoe.router.requests)
        olmoe.local(IDS)
        assert len(olmoe.router.requests) == asked + 3
        attached.detach()
        attached.detach()
        assert torch.equal(olmoe.local(IDS).logits, before)
        assert len(olmoe.router.requests) == asked + 3
    assert olmoe.local.config._experts_implementation == implementation == "eager"
    decoder = olmoe.local.base_model
    assert not decoder._forward_pre_hooks
    assert not decoder._forward_hooks
    assert not any(hasattr(m, "_moe_serve_binding") for m in olmoe.local.modules())


def test_a_model_is_attached_once(olmoe: Rig) -> None:
    attached = attach(olmoe.front, olmoe.client)
    with pytest.raises(FailedPrecondition, match="attached already"):
        attach(olmoe.front, olmoe.client)
    attached.detach()
    with attach(olmoe.front, olmoe.client):
        pass


def test_without_attachment_the_far_side_is_not_made_up(olmoe: Rig) -> None:
    with attach(olmoe.front, olmoe.client):
        pass
    olmoe.front.set_experts_implementation("moe_serve")
    with torch.inference_mode(), pytest.raises(FailedPrecondition, match="not attached"):
        olmoe.front(IDS)
    olmoe.front.set_experts_implementation("eager")


def test_training_is_refused(olmoe: Rig) -> None:
    asked = len(olmoe.router.requests)
    with attach(olmoe.local, olmoe.client):
        with pytest.raises(FailedPrecondition, match="for inference"):
            olmoe.local(IDS)  # parameters that want gradients
        olmoe.local.train()
        with torch.no_grad(), pytest.raises(FailedPrecondition, match=r"call model\.eval"):
            olmoe.local(IDS)
        olmoe.local.eval()
    assert len(olmoe.router.requests) == asked
    with attach(olmoe.front, olmoe.client):
        olmoe.front(IDS)  # the front end has none, so it needs no inference_mode


def test_the_sentinel_id_is_sent_as_an_invalid_pair(olmoe: Rig) -> None:
    calls: list[ExpertCall] = []
    with attach(olmoe.front, olmoe.client, on_call=calls.append), torch.inference_mode():
        module = next(iter(experts_modules(olmoe.front).values()))
        hidden = torch.randn(3, 32)
        ids = torch.tensor([[0, 8], [8, 8], [2, 3]])
        gates = torch.tensor([[0.5, float("nan")], [1.0, 1.0], [0.25, 0.75]])
        output = module(hidden, ids, gates)
    own = next(iter(experts_modules(olmoe.local).values()))
    clean = torch.where(ids == 8, 0.0, gates)
    with torch.inference_mode():
        exact = own(hidden, ids, clean)
    torch.testing.assert_close(output, exact, atol=1e-5, rtol=1e-5)
    assert not output[1].any()
    assert calls[0].pair_valid is not None
    assert calls[0].pair_valid.tolist() == [[True, False], [False, False], [True, True]]
    assert calls[0].valid_pairs() == 3
    assert olmoe.router.requests[-1].pair_valid == bytes([0b110001])


def test_a_pass_leaves_nothing_behind_for_the_next(olmoe: Rig) -> None:
    mask = torch.tensor([[0, 1, 1, 1]])
    calls: list[ExpertCall] = []
    with attach(olmoe.front, olmoe.client, on_call=calls.append), torch.inference_mode():
        olmoe.front(IDS, mask)  # by position
        module = next(iter(experts_modules(olmoe.front).values()))
        module(torch.randn(4, 32), torch.zeros(4, 1, dtype=torch.long), torch.ones(4, 1))
        # The decoder alone, without its head, is a pass too.
        olmoe.front.base_model(input_ids=IDS)
    first, single, decoder = calls[0], calls[3], calls[4]
    assert first.row_valid is not None
    assert first.row_valid.tolist() == [False, True, True, True]
    assert decoder.row_valid is None
    assert decoder.request_id != first.request_id
    assert single.row_valid is None


def test_a_prompt_of_one_token_is_prefill_and_a_second_pass_with_cache_is_decode(
    olmoe: Rig,
) -> None:
    calls: list[ExpertCall] = []
    with attach(olmoe.front, olmoe.client, on_call=calls.append), torch.inference_mode():
        made = olmoe.front(IDS[:, :1], use_cache=True)
        cache = getattr(made, "cache", None)
        if cache is None:
            cache = made.past_key_values
        olmoe.front(IDS[:, 1:2], cache=cache, attention_mask=torch.ones(1, 2, dtype=torch.long))
        olmoe.front(IDS[:, 2:4], cache=cache, attention_mask=torch.ones(1, 4, dtype=torch.long))
        embeds = olmoe.front.get_input_embeddings()(IDS)
        olmoe.front(inputs_embeds=embeds)
        with pytest.raises(InvalidArgument, match="input_ids or inputs_embeds"):
            olmoe.front.base_model()
    phases = [call.phase for call in calls[::3]]
    assert phases == [Phase.PREFILL, Phase.DECODE, Phase.PREFILL, Phase.PREFILL]


def test_threads_run_passes_of_one_model_at_once(olmoe: Rig) -> None:
    inputs = prompts(olmoe.local)
    with torch.no_grad():
        want = [
            olmoe.local(
                inputs["input_ids"][i : i + 1], attention_mask=inputs["attention_mask"][i : i + 1]
            ).logits
            for i in range(3)
        ]

    def run(i: int) -> float:
        row = slice(i % 3, i % 3 + 1)
        mask = inputs["attention_mask"][row]
        with torch.inference_mode():
            got = olmoe.front(inputs["input_ids"][row], attention_mask=mask).logits
        return float((got - want[i % 3])[mask.bool()].abs().max())

    with attach(olmoe.front, olmoe.client), ThreadPoolExecutor(4) as pool:
        assert max(pool.map(run, range(24))) <= ATOL


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_front_ends(olmoe: Rig, dtype: str) -> None:
    front = load_front_end(str(olmoe.folder), dtype=dtype)
    assert {p.dtype for p in front.parameters()} == {getattr(torch, dtype)}
    with torch.inference_mode():
        exact = olmoe.local(IDS).logits
        with attach(front, olmoe.client):
            got = front(IDS).logits
    kind = olmoe.router.requests[-1].hidden_states.data_type
    assert kind == {"bfloat16": 2, "float16": 3}[dtype]
    assert got.dtype == getattr(torch, dtype)
    scale = float(exact.abs().max())
    assert float((got.float() - exact).abs().max()) < 0.15 * scale


def test_rows_may_travel_narrower_than_they_are(olmoe: Rig) -> None:
    with torch.inference_mode():
        exact = olmoe.local(IDS).logits
        with attach(olmoe.front, olmoe.client, dtype="bfloat16"):
            got = olmoe.front(IDS).logits
    assert olmoe.router.requests[-1].hidden_states.data_type == 2
    assert got.dtype == torch.float32
    assert 0 < float((got - exact).abs().max()) < 0.15 * float(exact.abs().max())
    with pytest.raises(InvalidArgument, match="dtype"):
        attach(olmoe.front, olmoe.client, dtype="int8")


# ----------------------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"num_layers": 2}, "MoE layers: the model has 3"),
        ({"hidden_size": 64}, "hidden_size: the model has 32"),
        ({"num_experts": 16}, "the model has 8, the service's 'marker' 16"),
        ({"top_k": 1}, "takes at most 1"),
        ({"checkpoint_layers": (1, 2, 3)}, "MoE layers at"),
    ],
)
def test_a_service_of_another_shape_is_refused(
    olmoe: Rig, settings: dict[str, Any], words: str
) -> None:
    with (
        threaded_router(**(remote(olmoe.local) | settings)) as router,
        Client([router.address]) as client,
        pytest.raises(InvalidArgument, match=words),
    ):
        attach(olmoe.front, client)
    assert not any(hasattr(m, "_moe_serve_binding") for m in olmoe.front.modules())


def test_a_model_that_cannot_switch_is_refused_and_left_as_it_was(
    olmoe: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The library decides by reading its own source and then skips the class silently.
    kind = type(olmoe.front)
    monkeypatch.setattr(kind, "_can_set_experts_implementation", classmethod(lambda _cls: False))
    with pytest.raises(FailedPrecondition, match="cannot use remote experts"):
        attach(olmoe.front, olmoe.client)
    assert not any(hasattr(m, "_moe_serve_binding") for m in olmoe.front.modules())
    assert not olmoe.front.base_model._forward_pre_hooks


def test_without_the_library_the_next_step_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "transformers.integrations.moe", None)
    with pytest.raises(StartRefused, match="pip install 'transformers>=5'"):
        load_front_end("/nowhere")


def test_another_dtype_or_no_checkpoint_is_refused(olmoe: Rig, tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="dtype: is 'int8'"):
        load_front_end(str(olmoe.folder), dtype="int8")
    with pytest.raises(WeightsError, match="does not exist"):
        load_front_end(str(tmp_path / "none"))


def test_a_checkpoint_that_lacks_a_tensor_is_refused_by_name(olmoe: Rig, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    folder = tmp_path / "lacking"
    shutil.copytree(olmoe.folder, folder)
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.1.mlp.gate.weight"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(StartRefused, match=r"lacks model\.layers\.1\.mlp\.gate\.weight of the"):
        load_front_end(str(folder))


def test_published_names_and_stored_rotary_tables_are_understood(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    local = make("mixtral", tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    assert any("block_sparse_moe.gate" in name for name in tensors), "as published"
    # Older versions of the library stored what is computed today.
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.full((4,), 9.0)
    save_file(tensors, tmp_path / "model.safetensors")
    front = load_front_end(str(tmp_path))
    assert torch.equal(front.model.rotary_emb.inv_freq, local.model.rotary_emb.inv_freq)


def test_deepseek_keeps_its_gate_in_float32(tmp_path: Path) -> None:
    make("deepseek_v3", tmp_path)
    ours = load_front_end(str(tmp_path), dtype="bfloat16")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    kinds = {n: t.dtype for n, t in theirs.state_dict().items() if ".mlp.experts." not in n}
    assert {n: t.dtype for n, t in ours.state_dict().items() if n in kinds} == kinds
    assert kinds["model.layers.1.mlp.gate.weight"] == torch.float32


def test_generation_settings_of_the_checkpoint_are_read(olmoe: Rig) -> None:
    stored = json.loads((olmoe.folder / "generation_config.json").read_text())
    assert stored["repetition_penalty"] == 1.3
    assert olmoe.front.generation_config.repetition_penalty == 1.3


@pytest.mark.parametrize(
    ("mask", "length", "cached", "rows"),
    [
        ([[0, 1, 1]], 3, 0, [False, True, True]),
        ([[0, 1, 1]], 2, 1, None),
        ([[1, 1, 0]], 2, 1, [True, False]),
        ([[1, 1, 1]], 3, 0, None),
        ([[0, 1, 1, 0]], 3, 0, None),  # longer than the pass: a static cache's
        ([[[0, 1, 1]]], 3, 0, None),
        (None, 3, 0, None),
    ],
)
def test_rows_of_a_mask(mask: Any, length: int, cached: int, rows: list[bool] | None) -> None:
    given = None if mask is None else torch.tensor(mask)
    got = rows_of_mask(given, 1, length, cached)
    assert (None if got is None else got.tolist()) == rows
