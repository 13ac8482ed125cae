"""The adapters against vLLM's and SGLang's own files, unpacked from their packages, not installed.

The folder is `PEERS_DIR`, else `.peers`, which `make peers` fills. A file that is not there skips
its tests with a line that says so. Nothing of theirs is imported: interfaces are read from the
syntax tree, and single functions without heavy imports are compiled on their own.
"""

import ast
import inspect
import json
import logging
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Optional

import numpy as np
import pytest
import torch

from moe_serve.cli.layouts import Holding, LayoutFormat, read_layout, save, written
from placement.adapters.sglang import (
    location_json,
    location_mapping,
    logical_counts,
    plan_init_location,
    read_location,
)
from placement.adapters.vllm import EplbMapsPolicy, EplbPolicy
from placement.eplb import inverse
from placement.layout import ExpertLayout
from placement.scoring import layer_balancedness, rank_load
from tests.architecture.tree import ROOT

pytestmark = pytest.mark.adapters

FOLDER = Path(os.environ.get("PEERS_DIR") or ROOT / ".peers")


def peer(name: str) -> ast.Module:
    """Syntax tree of a peer's file; the test is skipped where the file is not there."""
    path = FOLDER / name
    if not path.is_file():
        pytest.skip(f"{path} is not there; `make peers` fetches it")
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def function(tree: ast.AST, name: str) -> ast.FunctionDef:
    (found,) = [
        node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name == name
    ]
    return found


def within(tree: ast.AST, name: str) -> ast.ClassDef:
    (found,) = [n for n in ast.walk(tree) if isinstance(n, ast.ClassDef) and n.name == name]
    return found


def calls(tree: ast.AST, name: str) -> list[ast.Call]:
    """Calls of a function or method of that name."""
    return [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and name in (getattr(node.func, "attr", ""), getattr(node.func, "id", ""))
    ]


def alone(tree: ast.Module, *names: str, **more: object) -> dict[str, Any]:
    """The named top-level definitions, compiled with torch, numpy, `more` and nothing else."""
    body = [node for node in tree.body if getattr(node, "name", "") in names]
    assert [node.name for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    scope: dict[str, Any] = {"torch": torch, "np": np, "AbstractEplbPolicy": object, **more}
    exec(compile(ast.Module(body, []), "peer", "exec"), scope)  # noqa: S102  # a peer's planner
    return scope


def our_policy() -> type[EplbPolicy]:
    """The one of our two classes that the package's interface asks for."""
    tree = peer("vllm_eplb/abstract.py")
    returns = function(within(tree, "AbstractEplbPolicy"), "rebalance_experts").returns
    assert returns is not None
    return EplbMapsPolicy if ast.unparse(returns).startswith("tuple") else EplbPolicy


class TestVllm:
    def test_the_abstract_method_is_ours(self) -> None:
        tree = peer("vllm_eplb/abstract.py")
        method = function(within(tree, "AbstractEplbPolicy"), "rebalance_experts")
        assert "classmethod" in [ast.unparse(mark) for mark in method.decorator_list]
        theirs = [argument.arg for argument in method.args.args][1:]
        ours = inspect.signature(our_policy().rebalance_experts).parameters
        assert theirs == list(ours)
        assert [ast.literal_eval(default) for default in method.args.defaults] == [
            p.default for p in ours.values() if p.default is not inspect.Parameter.empty
        ]

    def test_nothing_else_is_abstract(self) -> None:
        tree = within(peer("vllm_eplb/abstract.py"), "AbstractEplbPolicy")
        methods = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
        assert methods == ["rebalance_experts"]

    @pytest.mark.parametrize("file", ["vllm_eplb/async_worker.py", "vllm_eplb/eplb_state.py"])
    def test_the_engines_calls_bind(self, file: str) -> None:
        found = calls(peer(file), "rebalance_experts")
        assert found
        for call in found:
            arguments = [None] * len(call.args)
            named = {keyword.arg or "": None for keyword in call.keywords}
            inspect.signature(our_policy().rebalance_experts).bind(*arguments, **named)

    def test_policies_are_looked_up_in_the_table_that_we_name(self) -> None:
        tree = peer("vllm_eplb/policy.py")
        targets = [
            target.id
            for node in tree.body
            if isinstance(node, ast.Assign | ast.AnnAssign)
            for target in (node.targets if isinstance(node, ast.Assign) else [node.target])
            if isinstance(target, ast.Name)
        ]
        assert "EPLB_POLICIES" in targets

    def test_the_answer_has_the_form_of_their_own_planners(self) -> None:
        their = alone(peer("vllm_eplb/default.py"), "DefaultEplbPolicy")["DefaultEplbPolicy"]
        rng = np.random.default_rng(0)
        weight = torch.from_numpy(rng.gamma(0.6, 100.0, (2, 32)) + 1).float()
        first = their.rebalance_experts(weight, 40, 1, 1, 8)
        ours = EplbPolicy.rebalance_experts(weight, 40, 1, 1, 8)
        assert type(first) is type(ours)
        assert (first.dtype, first.shape, first.device) == (ours.dtype, ours.shape, ours.device)
        assert (_balance(ours, weight) >= _balance(first, weight) - 1e-9).all()

    def test_from_a_live_map_few_slots_are_written(self) -> None:
        their = alone(peer("vllm_eplb/default.py"), "DefaultEplbPolicy")["DefaultEplbPolicy"]
        rng = np.random.default_rng(1)
        weight = torch.from_numpy(rng.gamma(0.6, 100.0, (2, 32)) + 1).float()
        live = their.rebalance_experts(weight, 40, 1, 1, 8)
        drifted = weight * torch.from_numpy(rng.lognormal(0, 0.2, (2, 32))).float()
        ours = EplbPolicy.rebalance_experts(drifted, 40, 1, 1, 8, live)
        theirs = their.rebalance_experts(drifted, 40, 1, 1, 8, live)
        assert int((ours != live).sum()) < int((theirs != live).sum())


def their_start(given: str) -> dict[str, Any]:
    """What SGLang's reader of `--init-expert-location` hands over, of this argument."""
    taken: dict[str, Any] = {}

    class Metadata:
        """Keeps what the reader hands over."""

        @staticmethod
        def init_by_mapping(_model: object, **fields: object) -> None:
            taken.update(fields)

    name = "compute_initial_expert_location_metadata"
    read = alone(
        peer("sglang_eplb/expert_location.py"),
        name,
        json=json,
        Path=Path,
        Optional=Optional,
        ModelConfig=object,
        logger=logging.getLogger("peer"),
        get_exec=lambda: SimpleNamespace(moe=SimpleNamespace(init_expert_location=given)),
        ExpertLocationMetadata=Metadata,
    )[name]
    read(object(), 0)
    return taken


class TestSglang:
    def test_the_file_has_the_keys_that_are_read(self) -> None:
        tree = peer("sglang_eplb/expert_location.py")
        reader = function(tree, "compute_initial_expert_location_metadata")
        read = {
            node.left.value
            for node in ast.walk(reader)
            if isinstance(node, ast.Compare) and isinstance(node.left, ast.Constant)
        }
        assert {"physical_to_logical_map", "logical_count"} <= read
        (call,) = calls(reader, "init_by_mapping")
        taken = {argument.arg for argument in function(tree, "init_by_mapping").args.args}
        given = {keyword.arg for keyword in call.keywords if keyword.arg}
        assert set(location_mapping([[0]])) <= taken - given

    def test_their_parser_finds_our_replicas(self) -> None:
        names = ("_compute_logical_to_all_physical_map", "_pad_nested_array")
        scope = alone(peer("sglang_eplb/expert_location.py"), *names)
        parse: Callable[..., torch.Tensor] = scope[names[0]]
        physical = np.array([[0, 1, 2, 0, 3, 0], [3, 2, 1, 0, 1, 2]])
        written = torch.tensor(location_mapping(physical)["physical_to_logical_map"])
        known = {"ep_size": 2, "moe_ep_rank": None, "server_args": None}
        asked = inspect.signature(parse).parameters
        found = parse(
            physical_to_logical_map=written,
            num_logical_experts=4,
            **{name: value for name, value in known.items() if name in asked},
        )
        assert np.array_equal(found.numpy(), inverse(physical, 4)[0])

    @pytest.mark.parametrize("form", ["argument", "json", "pt"])
    def test_what_we_plan_is_what_their_start_reads(self, tmp_path: Path, form: str) -> None:
        """Their reader of `--init-expert-location`, whole, on what is planned from recorded load,
        in each form that it takes."""
        counts = np.random.default_rng(2).integers(0, 90, (5, 2, 8))
        text = plan_init_location(counts, num_replicas=12, num_groups=1, num_nodes=1, num_gpus=4)
        ours = read_location(text)["physical_to_logical_map"]
        given = {
            "argument": text,
            "json": str(tmp_path / "location.json"),
            "pt": str(tmp_path / "location.pt"),
        }[form]
        if form == "json":
            Path(given).write_text(location_json(ours), encoding="utf-8")
        elif form == "pt":
            torch.save(location_mapping(ours), given)
        taken = their_start(given)
        assert np.array_equal(np.asarray(taken.pop("physical_to_logical_map")), ours)
        assert taken == {"moe_ep_rank": 0}

    @pytest.mark.parametrize("name", ["location.json", "location.pt"])
    def test_what_is_exported_is_what_their_start_reads(self, tmp_path: Path, name: str) -> None:
        """A service's placement of two MoE layers behind one dense layer, and their parser's view
        of who is where."""
        held = Holding("m", "v", 2, 4, 2, (0, 1), ((0, 1, 2, 7, 5, 6), (3, 0, 4, 5, 1, 7)))
        form, file = LayoutFormat.SGLANG, tmp_path / name
        save(file, form, written(form, held, (1, 2)))
        found = np.asarray(their_start(str(file))["physical_to_logical_map"])
        assert found.shape == (3, 6)
        for rank, keys in enumerate(held.rows):
            own = found[1:, 3 * rank : 3 * rank + 3] + [[0], [4]]
            assert sorted(own.ravel().tolist()) == sorted(keys)
        back = read_layout(file, None, held, (1, 2))
        assert back.rows == tuple(tuple(sorted(row)) for row in held.rows)

    def test_their_dumps_have_the_keys_that_we_read(self) -> None:
        tree = peer("sglang_eplb/expert_distribution.py")
        assert "logical_count" in _dict_keys(within(tree, "_StatAccumulator"))
        detail = _dict_keys(within(tree, "_DetailAccumulator"))
        assert {"records", "last_physical_to_logical_map", "forward_pass_id"} <= detail
        assert "global_physical_count" in _dict_keys(tree)

    def test_records_become_the_counts_that_they_make_of_them(self) -> None:
        name = "_convert_global_physical_count_to_logical_count"
        convert = alone(peer("sglang_eplb/expert_distribution.py"), name)[name]
        rng = np.random.default_rng(0)
        mapped = torch.tensor([[0, 1, 2, 0], [2, 1, 0, 1]])
        physical = torch.from_numpy(rng.integers(0, 9, (3, 2, 4)))
        dump = {
            "records": [
                {"forward_pass_id": i, "rank": 0, "global_physical_count": physical[i]}
                for i in range(3)
            ],
            "last_physical_to_logical_map": mapped,
        }
        theirs = convert(physical, 2, 3, mapped)
        assert np.array_equal(logical_counts([dump]), theirs.numpy())


def _dict_keys(tree: ast.AST) -> set[str]:
    return {k.arg for call in calls(tree, "dict") for k in call.keywords if k.arg}


def _balance(physical: torch.Tensor, weight: torch.Tensor) -> np.ndarray:
    found = []
    for row, load in zip(physical.numpy(), weight.double().numpy(), strict=True):
        layout = ExpertLayout(row.reshape(8, -1).astype(np.int32), 1, len(load))
        found.append(float(layer_balancedness(rank_load(layout, load[None], "equal"))[0]))
    return np.array(found)
