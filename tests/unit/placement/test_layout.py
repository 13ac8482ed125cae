"""The slot matrix: what it refuses, what is derived from it, which rules it can break."""

import numpy as np
import pytest

from placement.layout import ABSENT, EMPTY, ExpertLayout, LayoutError, SlotChange, SlotId
from tests.builders import make_layout, make_topology

E = EMPTY


@pytest.mark.parametrize(
    ("slots", "num_layers", "num_experts", "said"),
    [
        (np.zeros(3), 1, 4, "1 dimensions, want 2"),
        (np.zeros((1, 1)), 0, 4, "num_layers 0 and num_experts 4 must be >= 1"),
        (np.array([[4]]), 1, 4, r"slots must lie in \[-2, 4\), got 4..4"),
        (np.array([[-3]]), 1, 4, "got -3..-3"),
    ],
)
def test_what_is_no_layout_is_refused(slots, num_layers, num_experts, said):
    with pytest.raises(LayoutError, match=said):
        ExpertLayout(slots, num_layers, num_experts)


def test_long_lists_of_problems_are_cut_in_the_text_and_whole_in_the_error():
    error = LayoutError([f"problem {n}" for n in range(9)])
    assert str(error).endswith("problem 7 ...")
    assert len(error.problems) == 9


def test_a_layout_shares_nothing_with_its_source_and_cannot_be_written():
    source = np.array([[0, 1, E]], dtype=np.int32)
    layout = ExpertLayout(source, 1, 2)
    source[0, 0] = 1
    assert layout.ranks_of(0, 0) == (0,)
    with pytest.raises(ValueError, match="read-only"):
        layout.slots[0, 0] = 1


def test_places_of_an_expert_by_rank_and_slot():
    layout = make_layout([[E, 5, 2], [5, E, E], [3, 2]], num_layers=2)
    assert layout.slots_of(1, 1) == (SlotId(0, 1), SlotId(1, 0))
    assert layout.ranks_of(0, 2) == (0, 2)
    assert layout.empty_slots(1) == (1, 2)
    assert layout.slots[2].tolist() == [3, 2, ABSENT]
    expert, rank = layout.layer_slots(1)
    assert (expert.tolist(), rank.tolist()) == ([1, 1], [0, 1])
    assert make_layout([[], []]).slots_of(0, 0) == ()


def test_the_uniform_view_exists_only_where_every_rank_gives_a_layer_as_many_slots():
    layout = make_layout([[0, 4, 1, 5, E], [6, 7, 2, 3, E], [E] * 5], num_layers=2)
    assert layout.physical_to_logical(2).tolist() == [[0, 1, 2, 3], [0, 1, 2, 3]]
    with pytest.raises(LayoutError, match="not uniform: 0 to 2 filled slots"):
        layout.physical_to_logical()


def test_a_diff_names_each_slot_that_is_written_or_emptied():
    before, after = make_layout([[0, 1, E], [2, 3, E]]), make_layout([[0, E, E], [2, 3, 1]])
    assert before.diff(after) == (
        SlotChange(SlotId(0, 1), 1, E),
        SlotChange(SlotId(1, 2), E, 1),
    )
    assert before.diff(before) == ()
    with pytest.raises(LayoutError, match="cannot diff"):
        before.diff(make_layout([[0, 1, 2, 3]]))


GOOD = [[0, 1, E], [2, 3, E]]


@pytest.mark.parametrize(
    ("rows", "rules", "said"),
    [
        ([[0, 1, 2, 3]], {}, "layout has shape (1, 4), topology wants (2, 3)"),
        ([[0, 1, ABSENT], [2, 3, E]], {}, "rank 0: slots do not match the 3"),
        ([[0, 1, 2], [2, 3, E]], {"staging_slots": 1}, "rank 0: 0 empty slots, staging needs 1"),
        ([[0, 1, 1], [2, 3, E]], {}, "layer 0 expert 1: 2 replicas on rank 0"),
        ([[0, 1, E], [2, E, E]], {}, "layer 0 expert 3: replicas in 0 failure domains, the floor"),
        (GOOD, {"floor": 2}, "layer 0 expert 0: replicas in 1 failure domains, the floor is 2"),
    ],
)
def test_each_broken_rule_is_a_sentence(rows, rules, said):
    topology = make_topology([3, 3], ranks_per_node=1)
    with pytest.raises(LayoutError) as error:
        make_layout(rows).validate(topology, **rules)
    assert any(problem.startswith(said) for problem in error.value.problems)


def test_what_breaks_no_rule_is_valid():
    topology = make_topology([3, 3], ranks_per_node=1)
    make_layout(GOOD).validate(topology, staging_slots=1)
    make_layout([[0, E, E], [E, E, E]]).validate(topology, partial=True)
    lost = make_topology([3, 3], ranks_per_node=1, alive=[True, False])
    # The floor asks for as many domains as are alive.
    make_layout([[0, 1, 2], [ABSENT] * 3], num_experts=3).validate(lost, floor=2)
