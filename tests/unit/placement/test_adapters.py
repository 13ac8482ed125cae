"""Hand-over to vLLM and SGLang, against interfaces written down here as they were read.

`make test-adapters` holds the same against the packages' own files.
"""

import inspect
import json

import numpy as np
import pytest
import torch

from placement.adapters import counts, sglang
from placement.adapters.counts import TooLarge
from placement.adapters.sglang import (
    location_json,
    location_mapping,
    logical_counts,
    plan_init_location,
    read_location,
    recorded_counts,
)
from placement.adapters.vllm import EplbMapsPolicy, EplbPolicy
from placement.eplb import EplbError, inverse
from placement.layout import ExpertLayout
from placement.scoring import layer_balancedness, rank_load

# vLLM's AbstractEplbPolicy.rebalance_experts: a classmethod of these arguments, in this order.
VLLM_ARGUMENTS = {
    "weight": inspect.Parameter.empty,
    "num_replicas": inspect.Parameter.empty,
    "num_groups": inspect.Parameter.empty,
    "num_nodes": inspect.Parameter.empty,
    "num_ranks": inspect.Parameter.empty,
    "old_global_expert_indices": None,
}


def skewed(seed: int, *shape: int) -> torch.Tensor:
    rng = np.random.default_rng(seed)
    return torch.from_numpy(np.rint(rng.gamma(0.6, 100.0, shape)) + 1).float()


def balance(physical: torch.Tensor, weight: torch.Tensor, ranks: int) -> float:
    worst = []
    for row, load in zip(physical.numpy(), weight.double().numpy(), strict=True):
        layout = ExpertLayout(row.reshape(ranks, -1).astype(np.int32), 1, len(load))
        worst.append(float(layer_balancedness(rank_load(layout, load[None], "equal"))[0]))
    return min(worst)


def trivial(layers: int, experts: int, replicas: int) -> torch.Tensor:
    """The map that vLLM and SGLang start with: experts in order, then again from 0."""
    return (torch.arange(replicas) % experts).repeat(layers, 1)


def location_problems(text: str, *, num_physical: int, num_experts: int) -> list[str]:
    """What is wrong with the text of an init-expert-location file, by our schema of it."""
    found = json.loads(text)
    if set(found) != {"physical_to_logical_map"}:
        return [f"keys {sorted(found)}"]
    wrong = []
    for layer, row in enumerate(found["physical_to_logical_map"]):
        if len(row) != num_physical:
            wrong.append(f"layer {layer}: {len(row)} slots")
        if any(type(expert) is not int for expert in row):
            wrong.append(f"layer {layer}: not all int")
        if set(row) != set(range(num_experts)):
            wrong.append(f"layer {layer}: experts {sorted(set(row))}")
    return wrong


class TestVllm:
    @pytest.mark.parametrize("policy", [EplbPolicy, EplbMapsPolicy])
    def test_the_signature_is_vllms(self, policy: type[EplbPolicy]) -> None:
        assert inspect.ismethod(policy.rebalance_experts)
        parameters = inspect.signature(policy.rebalance_experts).parameters
        assert {name: p.default for name, p in parameters.items()} == VLLM_ARGUMENTS

    def test_the_map_is_an_int64_host_tensor_with_every_expert(self) -> None:
        found = EplbPolicy.rebalance_experts(skewed(0, 3, 16), 20, 1, 1, 4, trivial(3, 16, 20))
        assert isinstance(found, torch.Tensor)
        assert found.dtype == torch.int64
        assert found.device == torch.device("cpu")
        assert found.shape == (3, 20)
        assert all(set(row) == set(range(16)) for row in found.tolist())

    def test_older_versions_get_three_maps_that_agree(self) -> None:
        weight = skewed(0, 2, 16)
        alone = EplbPolicy.rebalance_experts(weight, 20, 1, 1, 4)
        physical, logical, count = EplbMapsPolicy.rebalance_experts(weight, 20, 1, 1, 4)
        assert torch.equal(alone, physical)
        expected = inverse(physical.numpy(), 16)
        assert np.array_equal(logical.numpy(), expected[0])
        assert np.array_equal(count.numpy(), expected[1])

    def test_it_improves_the_split_that_vllm_runs(self) -> None:
        live, weight = trivial(2, 16, 20), skewed(1, 2, 16)
        found = EplbPolicy.rebalance_experts(weight, 20, 1, 1, 4, live)
        assert balance(found, weight, 4) > balance(live, weight, 4)
        again = EplbPolicy.rebalance_experts(weight, 20, 1, 1, 4, found)
        assert torch.equal(again, found)

    def test_it_plans_for_equal_shares_not_for_levelling(self) -> None:
        # Levelled both ranks have 8; in equal shares they have 11 and 5, and one write makes it 10.
        live = torch.tensor([[0, 1, 0, 2]])
        found = EplbPolicy.rebalance_experts(torch.tensor([[10.0, 6, 0]]), 4, 1, 1, 2, live)
        assert found.tolist() == [[2, 1, 0, 2]]

    def test_a_subclass_bounds_the_writes(self) -> None:
        class Gentle(EplbPolicy):
            max_moves = 2

        live, weight = trivial(2, 16, 20), skewed(1, 2, 16)
        found = Gentle.rebalance_experts(weight, 20, 1, 1, 4, live)
        assert (found != live).sum(dim=1).max() <= 2

    def test_another_number_of_slots_starts_from_nothing(self) -> None:
        weight = skewed(2, 2, 16)
        fresh = EplbPolicy.rebalance_experts(weight, 20, 1, 1, 4)
        wider = EplbPolicy.rebalance_experts(weight, 20, 1, 1, 4, trivial(2, 16, 24))
        assert torch.equal(fresh, wider)

    def test_slots_of_new_ranks_are_filled(self) -> None:
        live = torch.full((1, 24), -1)
        live[:, :20] = trivial(1, 16, 20)
        found = EplbPolicy.rebalance_experts(skewed(3, 1, 16), 24, 1, 1, 6, live)
        assert found.min() >= 0

    def test_steps_of_load_are_a_history(self) -> None:
        steps = torch.zeros((8, 1, 5))
        steps[:, 0] = torch.tensor([90.0, 1, 1, 1, 1])
        steps[:, 0] = steps[:, 0].flip(-1)
        _, _, count = EplbMapsPolicy.rebalance_experts(steps, 6, 1, 1, 2)
        assert count.tolist() == [[1, 1, 1, 1, 2]]

    def test_groups_stay_on_nodes(self) -> None:
        found = EplbPolicy.rebalance_experts(skewed(4, 1, 16), 24, 4, 2, 4)
        groups = [set((row // 4).tolist()) for row in found.reshape(2, 12)]
        assert not groups[0] & groups[1]

    def test_a_refusal_is_typed(self) -> None:
        with pytest.raises(EplbError, match="num_replicas: 18 replicas do not divide"):
            EplbPolicy.rebalance_experts(skewed(0, 1, 16), 18, 1, 1, 4)


class TestSglangLocation:
    def test_the_text_fits_the_schema(self) -> None:
        text = location_json(trivial(2, 4, 6))
        assert location_problems(text, num_physical=6, num_experts=4) == []

    def test_the_schema_sees_faults(self) -> None:
        assert location_problems('{"a": 1}', num_physical=1, num_experts=1) == ["keys ['a']"]
        bad = '{"physical_to_logical_map": [[0, 1.0], [0, 0], [0, 1, 0]]}'
        assert len(location_problems(bad, num_physical=2, num_experts=2)) == 3

    def test_what_is_written_is_read_back(self) -> None:
        physical = trivial(2, 4, 6)
        for form in (
            location_json(physical),
            location_json(physical).encode(),
            location_mapping(physical),
            {"physical_to_logical_map": physical},
        ):
            found = read_location(form)
            assert list(found) == ["physical_to_logical_map"]
            assert np.array_equal(found["physical_to_logical_map"], physical.numpy())

    def test_counts_in_the_file_are_read(self) -> None:
        found = read_location('{"logical_count": [[1, 2], [3, 4]]}')
        assert found["logical_count"].tolist() == [[[1, 2], [3, 4]]]

    def test_a_plan_from_counts_fits_the_schema(self) -> None:
        counts = skewed(0, 5, 2, 8).int()
        for load in (counts, counts.sum(dim=0)):
            text = plan_init_location(load, num_replicas=12, num_groups=1, num_nodes=1, num_gpus=4)
            assert location_problems(text, num_physical=12, num_experts=8) == []

    @pytest.mark.parametrize(
        ("location", "words"),
        [
            ("[1]", "location: is not a JSON object"),
            ("{", "location: is not a JSON object"),
            ("{}", "has neither physical_to_logical_map nor logical_count"),
            (
                {"physical_to_logical_map": [[0]], "logical_count": [[1]]},
                "has keys that SGLang would refuse: logical_count",
            ),
            ({"physical_to_logical_map": [0, 1]}, r"must have shape \[layers, physical\]"),
            ({"physical_to_logical_map": [[0, 2]]}, "from 0 on without a gap, got 0 to 2"),
            ({"physical_to_logical_map": [[0, -1]]}, "without a gap, got -1 to 0"),
            (
                {"physical_to_logical_map": [[0, 1], [0, 0]]},
                r"physical_to_logical_map\[1\]: has no replica of expert 1",
            ),
            ({"physical_to_logical_map": [[0.5]]}, "must hold integers"),
            ({"logical_count": [[-1]]}, r"counts must lie in \[0, .*got -1"),
            ({"logical_count": [1]}, r"must be counts of shape .*got \[1\]"),
        ],
    )
    def test_a_refusal_says_what_is_wrong(self, location: object, words: str) -> None:
        with pytest.raises(EplbError, match=words):
            read_location(location)


class TestSglangDumps:
    def test_passes_of_stat_dumps_follow_one_another(self) -> None:
        first = {"rank": 0, "logical_count": torch.tensor([[[1, 2]], [[3, 4]], [[0, 0]]])}
        second = {"rank": 0, "logical_count": torch.tensor([[[5, 6]]])}
        assert logical_counts([first, second]).tolist() == [[[1, 2]], [[3, 4]], [[5, 6]]]

    def test_a_dump_without_load_is_one_empty_pass(self) -> None:
        counts = logical_counts([{"logical_count": np.zeros((4, 1, 2), dtype=np.int32)}])
        assert counts.tolist() == [[[0, 0]]]

    def test_records_of_ranks_are_added_by_pass(self) -> None:
        def dump(rank: int, *passes: tuple[int, list[int]]) -> dict[str, object]:
            return {
                "records": [
                    {
                        "forward_pass_id": number,
                        "rank": rank,
                        "gatherer_key": "primary",
                        "global_physical_count": torch.tensor([physical]),
                    }
                    for number, physical in passes
                ],
                "last_physical_to_logical_map": torch.tensor([[0, 1, 0]]),
            }

        dumps = [dump(0, (8, [1, 2, 3]), (7, [0, 1, 0])), dump(1, (7, [5, 0, 5]))]
        assert logical_counts(dumps).tolist() == [[[10, 1]], [[4, 2]]]
        assert logical_counts(dumps, num_experts=3).tolist() == [[[10, 1, 0]], [[4, 2, 0]]]

    def test_counts_alone_keep_the_passes_without_load(self) -> None:
        dump = {"logical_count": torch.tensor([[[1, 2]], [[0, 0]]])}
        assert recorded_counts([dump]).tolist() == [[[1, 2]], [[0, 0]]]
        assert logical_counts([dump]).tolist() == [[[1, 2]]]

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
    def test_approximate_counts_are_rounded(self, dtype: torch.dtype) -> None:
        dump = {"logical_count": torch.tensor([[[1.4, 2.6]]], dtype=dtype)}
        assert logical_counts([dump]).tolist() == [[[1, 3]]]

    def test_a_tensor_that_repeats_one_number_is_refused_before_it_is_unfolded(self) -> None:
        many = torch.ones(1).expand(1 << 20, 1 << 10, 1)
        for dump in (
            {"logical_count": many},
            {"records": [], "last_physical_to_logical_map": many.int()},
        ):
            with pytest.raises(TooLarge, match="is more than 134217728 numbers"):
                logical_counts([dump])

    def test_a_recording_has_its_limits(self, monkeypatch: pytest.MonkeyPatch) -> None:
        record = {"forward_pass_id": 1, "global_physical_count": [[0, 1]]}
        dump = {"records": [record, record], "last_physical_to_logical_map": [[0, 1]]}
        with monkeypatch.context() as patch:
            patch.setattr(sglang, "RECORDS_MAX", 1)
            with pytest.raises(TooLarge, match=r"dumps\[0\].records: has 2 entries, at most 1"):
                logical_counts([dump])
        with monkeypatch.context() as patch:
            patch.setattr(sglang, "DUMPS_MAX", 1)
            with pytest.raises(TooLarge, match="dumps: has 2 entries, at most 1"):
                logical_counts([dump, dump])
        monkeypatch.setattr(counts, "CELLS_MAX", 2)
        assert logical_counts([dump]).tolist() == [[[0, 2]]]
        later = {**dump, "records": [record, {**record, "forward_pass_id": 2}]}
        with pytest.raises(TooLarge, match=r"records\[1\]: 2 steps x 1 layers x 2 experts"):
            logical_counts([later])
        stat = {"logical_count": [[[1, 2]]]}
        with pytest.raises(TooLarge, match="dumps: 2 steps x 1 layers x 2 experts"):
            logical_counts([stat, stat])

    def test_ranks_of_models_of_unlike_size_are_not_added(self) -> None:
        first = {"records": [], "last_physical_to_logical_map": [[0, 1, 0]]}
        other = {"records": [], "last_physical_to_logical_map": [[0, 1, 2]]}
        with pytest.raises(EplbError, match=r"dumps\[1\].*\(1, 3\) and 3 experts, .* and 2"):
            logical_counts([first, other])

    @pytest.mark.parametrize(
        ("dumps", "words"),
        [
            ([], "dumps: is empty"),
            ([{"records": []}], r"dumps\[0\]: records need last_physical_to_logical_map beside"),
            ([{"logical_count": [[[np.nan]]]}], r"logical_count\[0, 0, 0\]: .* got nan"),
            ([{"logical_count": [[["a"]]]}], r"counts must be numbers"),
            ([{"logical_count": [[[1 << 50, 1]]]}], r"add up to 1.13e\+15 pairs"),
            ([{"logical_count": np.zeros((1, 2000, 1))}], r"2000 layers; 1 to 1024 are read"),
            ([{"logical_count": np.zeros((0, 1, 1))}], r"no step is recorded"),
            ([{"rank": 0}], "must all hold logical_count, or all hold records"),
            (
                [{"logical_count": [[[1, 2]]]}, {"logical_count": [[[1]]]}],
                r"dumps\[1\].logical_count: counts \[1, 1\] layers and experts, the first",
            ),
            (
                [{"records": [], "last_physical_to_logical_map": [[0]]}],
                "dumps: hold no record",
            ),
            (
                [
                    {"records": [], "last_physical_to_logical_map": [[0]]},
                    {"records": [], "last_physical_to_logical_map": [[0, 1]]},
                ],
                r"dumps\[1\].last_physical_to_logical_map: has shape \(1, 2\)",
            ),
            (
                [
                    {
                        "records": [{"forward_pass_id": 0, "global_physical_count": [[1, 2]]}],
                        "last_physical_to_logical_map": [[0, 1, 0]],
                    }
                ],
                r"global_physical_count: has shape \(1, 2\), its map \(1, 3\)",
            ),
        ],
    )
    def test_a_refusal_says_what_is_wrong(self, dumps: list[dict], words: str) -> None:
        with pytest.raises(EplbError, match=words):
            logical_counts(dumps)


class TestWhatOthersHandIn:
    """Arguments of every kind: a typed error that names the argument, never anything else."""

    @pytest.mark.parametrize(
        "live",
        [
            torch.tensor(3),
            torch.zeros(1, 12, dtype=torch.bfloat16),
            torch.zeros(1, 12, dtype=torch.int64, device="meta"),
            torch.full((1, 12), 99),
        ],
    )
    @pytest.mark.parametrize("policy", [EplbPolicy, EplbMapsPolicy])
    def test_a_live_map_that_is_none_is_named_as_vllm_names_it(
        self, policy: type[EplbPolicy], live: torch.Tensor
    ) -> None:
        with pytest.raises(EplbError, match=r"^old_global_expert_indices"):
            policy.rebalance_experts(torch.ones(1, 8), 12, 1, 1, 4, live)

    def test_num_ranks_is_named_as_vllm_names_it(self) -> None:
        with pytest.raises(EplbError, match=r"^num_ranks: must be an integer"):
            EplbPolicy.rebalance_experts(torch.ones(1, 8), 12, 1, 1, None)  # type: ignore[arg-type]

    def test_steps_whose_sum_no_float_holds_are_planned(self) -> None:
        steps = np.full((3, 1, 8), 1.7e308)
        found = EplbPolicy.rebalance_experts(torch.from_numpy(steps), 12, 1, 1, 4)
        assert found.shape == (1, 12)
        text = plan_init_location(steps, num_replicas=12, num_groups=1, num_nodes=1, num_gpus=4)
        assert read_location(text)["physical_to_logical_map"].shape == (1, 12)

    @pytest.mark.parametrize("far", [2, 1 << 40, 1 << 62])
    def test_an_id_beyond_the_slots_of_a_layer_is_refused(self, far: int) -> None:
        with pytest.raises(EplbError, match=f"got 0 to {far} in layers of 2 slots"):
            location_mapping([[0, far]])

    @pytest.mark.parametrize("location", [None, 5, [], '{"a":' * 5000, "null", {1: 2}, {}, b"\xff"])
    def test_what_is_no_location_is_refused(self, location: object) -> None:
        with pytest.raises(EplbError, match=r"^location: "):
            read_location(location)  # type: ignore[arg-type]

    @pytest.mark.parametrize("dumps", [None, 7, "x", {}, [None], [[1]], torch.ones(2), []])
    def test_what_is_no_list_of_dumps_is_refused(self, dumps: object) -> None:
        with pytest.raises(EplbError, match=r"^dumps"):
            logical_counts(dumps)  # type: ignore[arg-type]

    @pytest.mark.parametrize(
        ("records", "words"),
        [
            (None, r"records: must be a list"),
            ([None], r"records\[0\]: must be a mapping"),
            ([{}], r"records\[0\].forward_pass_id"),
            ([{"forward_pass_id": "x"}], r"records\[0\].forward_pass_id"),
            ([{"forward_pass_id": [1, 2]}], r"forward_pass_id: must be one integer"),
            ([{"forward_pass_id": 1}], r"global_physical_count"),
            (
                [{"forward_pass_id": 1, "global_physical_count": [[[0, 1]], [[5, 5]]]}],
                r"global_physical_count: has shape \(2, 1, 2\), its map \(1, 2\)",
            ),
            (
                [{"forward_pass_id": 1, "global_physical_count": [[1 << 62, 1 << 62]]}],
                r"\[0, 0, 0\]: counts must lie in \[0, 1125899906842624\]",
            ),
        ],
    )
    def test_records_of_other_forms_are_refused(self, records: object, words: str) -> None:
        dump = {"records": records, "last_physical_to_logical_map": [[0, 1]]}
        with pytest.raises(EplbError, match=words):
            logical_counts([dump])

    @pytest.mark.parametrize("num_experts", ["3", 1.5, 0, 1 << 40, [2]])
    def test_num_experts_is_a_size(self, num_experts: object) -> None:
        record = {"forward_pass_id": 1, "global_physical_count": [[0, 1]]}
        dump = {"records": [record], "last_physical_to_logical_map": [[0, 1]]}
        with pytest.raises(EplbError, match=r"^num_experts: "):
            logical_counts([dump], num_experts=num_experts)  # type: ignore[arg-type]


class TestCounts:
    """What every reader of recorded load keeps to."""

    def test_replicas_are_added_up_by_layer(self) -> None:
        physical = np.array([[[5, 2, 1], [1, 1, 1]]])
        mapping = np.array([[0, 1, 0], [1, 1, 1]])
        assert counts.to_logical("map", physical, mapping).tolist() == [[[6, 2], [0, 3]]]
        assert counts.to_logical("map", physical, mapping, 3).shape == (1, 2, 3)

    @pytest.mark.parametrize(
        ("mapping", "words"),
        [
            (np.array([[0, 1]]), r"must be integers \[layers, physical\] = \[1, 3\], got int64"),
            (np.array([[0.0, 1, 2]]), r"got float64 \[1, 3\]"),
            (np.array([[0, -1, 2]]), r"^map\[0, 1\]: experts must be >= 0, got -1"),
            (np.array([[0, 1, 20_000]]), r"20001 experts; 1 to 16384 are read"),
            (np.array([[0, 1, 3]]), r"names expert 3, but 3 physical experts hold at most"),
        ],
    )
    def test_a_map_that_is_none_is_refused(self, mapping: np.ndarray, words: str) -> None:
        with pytest.raises(EplbError, match=words):
            counts.to_logical("map", np.ones((1, 1, 3), dtype=np.int64), mapping)

    @pytest.mark.parametrize("value", [-1, np.nan, np.inf, 2.0**63, (1 << 50) + 1])
    def test_a_count_that_cannot_be_is_refused_with_its_place(self, value: float) -> None:
        with pytest.raises(EplbError, match=r"^load\[0, 2\]: counts must lie in"):
            counts.whole_counts("load", np.array([[0, 1, value]]))
