"""Placements as other engines' maps, and back: the same placement, or a refusal, never another."""

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import assume, given

from placement.adapters.counts import LAYERS_MAX, TooLarge
from placement.adapters.maps import NAMED_MAX, physical_map, rows_of
from placement.adapters.own import placement_json, read_placement
from placement.adapters.sglang import location_json, read_location
from placement.adapters.trtllm import load_balancer_yaml, read_load_balancer
from placement.adapters.vllm import expert_map_json, read_expert_map
from placement.eplb import EplbError


@st.composite
def uniform(draw):
    """(rows, layers, experts): keys by rank in the order of their slots, as many of every layer."""
    num_ranks, layers = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    own = draw(st.integers(1, 4))
    experts = draw(st.integers(own, num_ranks * own))
    rows = [[] for _ in range(num_ranks)]
    for layer in range(layers):
        # Each expert somewhere, no rank with an expert twice: deal them round, then fill up.
        deal = draw(st.permutations(range(experts)))
        hands = [list(deal[rank::num_ranks]) for rank in range(num_ranks)]
        assume(all(len(hand) <= own for hand in hands))
        for rank, hand in enumerate(hands):
            others = draw(st.permutations([e for e in range(experts) if e not in hand]))
            hand.extend(others[: own - len(hand)])
            rows[rank].extend(layer * experts + expert for expert in draw(st.permutations(hand)))
    for rank, row in enumerate(rows):
        rows[rank] = list(draw(st.permutations(row)))  # slots are a pool that layers share
    return rows, layers, experts


@given(uniform())
def test_what_is_written_for_an_engine_is_read_as_the_same_placement(case):
    rows, layers, experts = case
    found = physical_map(rows, num_layers=layers, num_experts=experts)
    ids = list(range(2, 2 + layers))
    trtllm = read_load_balancer(_yaml(load_balancer_yaml(found, layer_ids=ids)))
    assert list(trtllm) == ids
    for back in (
        found,
        read_location(location_json(found))["physical_to_logical_map"],
        read_expert_map(_json(expert_map_json(found)), num_layers=layers),
        list(trtllm.values()),
    ):
        again = rows_of(back, num_ranks=len(rows), num_experts=experts)
        assert again.rows == tuple(tuple(sorted(row)) for row in rows)
        assert again.twice == 0


@given(uniform())
def test_each_slot_says_the_expert_of_its_rank(case):
    """The same read slot by slot, by another way than the one back."""
    rows, layers, experts = case
    found = physical_map(rows, num_layers=layers, num_experts=experts)
    own = found.shape[1] // len(rows)
    for layer in range(layers):
        for slot, expert in enumerate(found[layer].tolist()):
            assert layer * experts + expert in rows[slot // own]


@given(st.lists(st.sets(st.integers(0, 5)), min_size=1, max_size=4))
def test_our_own_form_says_any_placement(rows):
    text = placement_json(
        enumerate(rows), model="m", weights_version="v", num_layers=2, num_experts=3
    )
    found = read_placement(text)
    assert [(row.rank, row.keys(3)) for row in found.ranks] == [
        (rank, tuple(sorted(row))) for rank, row in enumerate(rows)
    ]


def _json(text):
    import msgspec

    return msgspec.json.decode(text)


def _yaml(text):
    import yaml

    return yaml.safe_load(text)


# -- refusals ------------------------------------------------------------------------------------


def refused(rows, layers=1, experts=4, ranks=None):
    with pytest.raises(EplbError) as error:
        physical_map(rows, num_layers=layers, num_experts=experts, ranks=ranks)
    return str(error.value)


def test_ranks_and_layers_that_differ_are_named():
    said = refused([[0, 1], [2, 3, 0], [1, 2]], ranks=[0, 2, 5])
    assert "rank 2 has 3 of layer 0, most have 2;" in said
    assert "set rebalance.uniform: true in the service file" in said
    assert "export with --format moe-serve" in said


def test_not_all_of_many_are_named():
    rows = [[0, 1, *(range(2, 2 + n))] for n in range(NAMED_MAX + 3)]
    said = refused(rows, experts=20)
    assert said.count("most have") == NAMED_MAX
    assert f"and so on: 1 layers and {NAMED_MAX + 2} ranks differ" in said


def test_layers_of_different_widths_are_uneven_too():
    """Two slots of layer 0 on each rank, one of layer 1: the engine has one number of slots."""
    said = refused([[0, 1, 4], [2, 3, 5]], 2, 4)
    assert "rank 0 has 2 of layer 0, most have 1; rank 1 has 2 of layer 0, most have 1" in said


def test_an_expert_without_a_replica_is_named():
    assert "no replica of layer 1 expert 0; wait" in refused([[0, 1, 3, 3]], 2, 2)
    assert "layer 0 expert 1 and 2 more of that layer" in refused([[0], [0]], 1, 4)


@pytest.mark.parametrize(("rows", "words"), [([], "no rank"), ([[], []], "no rank holds anything")])
def test_nothing_is_no_map(rows, words):
    assert words in refused(rows)


def test_a_map_of_absurd_size_is_refused_before_anything_is_made_of_it():
    wide = np.broadcast_to(np.int64(0), (1 << 14, 1 << 14))
    with pytest.raises(TooLarge):
        rows_of(wide, num_ranks=2, num_experts=1)
    with pytest.raises(EplbError, match="layers; 1 to"):
        rows_of(np.zeros((LAYERS_MAX + 1, 2), np.int64), num_ranks=2, num_experts=1)


def test_a_map_of_one_row_is_none_for_all_layers():
    with pytest.raises(EplbError, match=r"must be \[layers, slots\]"):
        rows_of([0, 1], num_ranks=2, num_experts=2)


@pytest.mark.parametrize("ids", [[0], [1, 1], [2, 1]])
def test_layer_numbers_that_do_not_fit_are_refused(ids):
    with pytest.raises(EplbError, match="2 ascending numbers"):
        load_balancer_yaml([[0, 1], [1, 0]], layer_ids=ids)


def test_a_map_of_no_layers_is_no_file():
    with pytest.raises(EplbError, match=r"must be \[layers, slots\]"):
        load_balancer_yaml(np.zeros((0, 2), np.int64), layer_ids=[])
