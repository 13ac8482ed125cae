"""The planner as one function on any call: a valid map, or a refusal that names the argument."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from placement.eplb import EplbError, inverse, rebalance_experts
from placement.eplb.arguments import check
from placement.eplb.plan import plan
from placement.layout import ExpertLayout
from placement.scoring import rank_load

EXAMPLES = settings(max_examples=60, derandomize=True, database=None, deadline=None)
SPLITS = st.sampled_from(["level", "equal"])
LOADS = st.sampled_from(["gamma", "zero", "one hot", "ties", "huge"])


def make_load(kind: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    load = rng.gamma(0.5, 50.0, shape)
    if kind == "zero":
        return np.zeros(shape)
    if kind == "one hot":
        return np.where(np.arange(shape[-1]) == seed % shape[-1], 7.0, 0.0) * np.ones(shape)
    if kind == "ties":
        return np.floor(load / 40.0)
    return load * 2.0**900 if kind == "huge" else load


@st.composite
def grids(draw):
    """(experts, counts) of a call that is not refused."""
    nodes = draw(st.integers(1, 3))
    gpus = nodes * draw(st.integers(1, 4))
    groups = nodes * draw(st.integers(1, 2)) if draw(st.booleans()) else draw(st.integers(1, 5))
    experts = groups * draw(st.integers(1, 4))
    least = -(-experts // gpus)
    slots = draw(st.integers(least, least + 3))
    return experts, (gpus * slots, groups, nodes, gpus)


def assert_valid(physical: np.ndarray, experts: int, counts: tuple[int, int, int, int]) -> None:
    replicas, groups, nodes, gpus = counts
    assert physical.shape[1] == replicas
    rows = physical.reshape(len(physical), gpus, -1)
    for layer in rows:
        assert set(layer.ravel().tolist()) == set(range(experts))
        if groups % nodes != 0:
            nodes = 1
        for node in np.split(layer, nodes):
            own = np.unique(node)
            for gpu in node:
                # no expert twice on a gpu, unless it has every expert of its node
                assert len(set(gpu.tolist())) == min(len(gpu), len(own))
        if nodes > 1:
            held = [np.unique(np.unique(n) // (experts // groups)) for n in np.split(layer, nodes)]
            assert sorted(np.concatenate(held).tolist()) == list(range(groups))
            assert {len(h) for h in held} == {groups // nodes}


def hottest(row: np.ndarray, load: np.ndarray, gpus: int, split: str) -> float:
    layout = ExpertLayout(row.reshape(gpus, -1).astype(np.int32), 1, len(load))
    return float(rank_load(layout, load[None], split).max())


@EXAMPLES
@given(grid=grids(), kind=LOADS, seed=st.integers(0, 99), split=SPLITS)
def test_a_plan_from_nothing_is_valid(grid, kind, seed, split) -> None:
    experts, counts = grid
    load = make_load(kind, (2, experts), seed)
    physical = plan(check(load, counts, None, None, None), split)
    assert_valid(physical, experts, counts)
    assert np.array_equal(physical, plan(check(load, counts, None, None, None), split))


@EXAMPLES
@given(
    grid=grids(),
    kind=LOADS,
    seed=st.integers(0, 99),
    split=SPLITS,
    moves=st.sampled_from([None, 0, 1, 2, 5]),
)
def test_from_current_it_is_valid_within_its_writes_never_worse_and_then_still(
    grid, kind, seed, split, moves
) -> None:
    experts, counts = grid
    before = plan(
        check(make_load("gamma", (1, experts), seed + 1), counts, None, None, None), split
    )
    load = make_load(kind, (1, experts), seed)
    after = plan(check(load, counts, before, None, moves), split)
    assert_valid(after, experts, counts)
    if moves is not None:
        assert int((after != before).sum()) <= moves
    shares = load[0] / max(load.max(), 1.0)
    assert (
        hottest(after[0], shares, counts[3], split)
        <= hottest(before[0], shares, counts[3], split) + 1e-6 * shares.sum()
    )
    if moves is None:
        assert np.array_equal(plan(check(load, counts, after, None, None), split), after)


@EXAMPLES
@given(grid=grids(), seed=st.integers(0, 99), intervals=st.integers(1, 12))
def test_tensors_and_arrays_get_the_same_answer(grid, seed, intervals) -> None:
    experts, counts = grid
    load = np.rint(make_load("gamma", (1, experts), seed))
    history = np.rint(make_load("gamma", (intervals, 1, experts), seed))
    arrays = rebalance_experts(load, *counts, history=history)
    tensors = rebalance_experts(torch.from_numpy(load), *counts, history=torch.from_numpy(history))
    for array, tensor in zip(arrays, tensors, strict=True):
        assert np.array_equal(array, tensor.numpy())
    assert_valid(arrays[0], experts, counts)
    for ours, expected in zip(arrays[1:], inverse(arrays[0], experts), strict=True):
        assert np.array_equal(ours, expected)


@EXAMPLES
@given(
    experts=st.integers(1, 12),
    counts=st.tuples(*[st.integers(-1, 12)] * 4),
    bad=st.sampled_from([0.0, -1.0, float("nan"), float("inf")]),
)
def test_any_other_call_is_refused_by_name_or_valid(experts, counts, bad) -> None:
    load = np.ones((1, experts))
    load[0, -1] = bad
    replicas, groups, nodes, gpus = counts
    fits = min(counts) >= 1 and replicas >= experts and replicas % gpus == 0 and bad == 0.0
    if fits and groups % nodes == 0 and nodes > 1:
        fits = experts % groups == 0 and gpus % nodes == 0
    if fits:
        assert_valid(rebalance_experts(load, *counts)[0], experts, counts)
        return
    with pytest.raises(EplbError, match=r"^(weight\[|num_(replicas|groups|nodes|gpus): )"):
        rebalance_experts(load, *counts)


@pytest.mark.parametrize("split", ["level", "equal"])
def test_relabelling_experts_relabels_the_plan(split: str) -> None:
    rng = np.random.default_rng(3)
    load = rng.gamma(0.5, 50.0, (1, 24)) + rng.random((1, 24))
    new_name = rng.permutation(24)
    renamed = np.empty_like(load)
    renamed[0, new_name] = load[0]
    plain = plan(check(load, (32, 1, 1, 4), None, None, None), split)
    other = plan(check(renamed, (32, 1, 1, 4), None, None, None), split)
    rows = [sorted(new_name[gpu].tolist()) for gpu in plain.reshape(4, 8)]
    assert sorted(rows) == sorted(sorted(gpu) for gpu in other.reshape(4, 8).tolist())
