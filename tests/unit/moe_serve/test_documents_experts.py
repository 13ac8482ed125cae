"""Figures by expert: one expert's place in its layer, all of them as CSV."""

from typing import Any

import numpy as np
import pytest

from moe_serve.documents.experts import CSV_COLUMNS, csv_parts, expert_document, ranks_in_layer
from moe_serve.documents.replicas import holders_of, listed_ranks
from moe_serve.errors import NotFound
from moe_serve.rpc import placement_pb2 as pb
from tests.fakes.admin import make_window


def load(demand: Any) -> pb.GetLoadResponse:
    window = make_window(np.asarray(demand))
    window.window = 1
    return window


def placement() -> pb.GetPlacementResponse:
    slots = [(0, 0, 0, "LISTED"), (1, 0, 1, "COPYING"), (2, -1, -1, "")]
    other = [(0, 0, 1, "LISTED"), (1, 0, 0, "LISTED")]
    return pb.GetPlacementResponse(
        num_layers=1,
        num_experts=3,
        ranks=[
            pb.Rank(
                rank=rank,
                slots=[pb.Slot(index=i, layer=n, expert=e, state=s) for i, n, e, s in row],
            )
            for rank, row in enumerate([slots, other])
        ],
    )


def test_one_expert_has_a_place_in_its_layer() -> None:
    window = load([[[5, 3, 5]], [[1, 3, 1]]])
    holders = holders_of(placement())
    seen = [
        expert_document(window, holders, {0: "a", 1: "b"}, layer=0, expert=expert)
        for expert in range(3)
    ]
    assert [one["rank_in_layer"] for one in seen] == [1, 2, 3], "equals: the lower id first"
    assert [one["share"] for one in seen] == [1 / 3] * 3
    assert seen[0]["by_phase"] == {"prefill": 5, "decode": 1}
    assert seen[0]["replicas"] == [
        {"rank": 0, "slot": 0, "state": "LISTED", "node": "a"},
        {"rank": 1, "slot": 1, "state": "LISTED", "node": "b"},
    ]
    assert [one["state"] for one in seen[1]["replicas"]] == ["COPYING", "LISTED"]
    assert seen[2]["replicas"] == []


@pytest.mark.parametrize(("layer", "expert", "field"), [(1, 0, "layer"), (0, 3, "expert")])
def test_an_expert_that_is_not_there_is_refused_by_name(
    layer: int, expert: int, field: str
) -> None:
    with pytest.raises(NotFound, match=f"layer {layer} expert {expert}") as refused:
        expert_document(load([[[5, 3, 5]]]), {}, {}, layer=layer, expert=expert)
    assert refused.value.violations[0].field == field


def test_a_layer_without_load_has_no_share() -> None:
    seen = expert_document(load([[[0, 0]]]), {}, {}, layer=0, expert=1)
    assert (seen["share"], seen["rank_in_layer"]) == (0.0, 2)


def test_csv_counts_listed_replicas_only() -> None:
    ranks = listed_ranks(holders_of(placement()))
    assert ranks == {(0, 0): (0, 1), (0, 1): (1,)}
    text = "".join(csv_parts(np.array([[4, 6, 0]]), ranks))
    assert text.split("\r\n") == [
        CSV_COLUMNS,
        "0,0,4,0.40000000,2,2,0 1",
        "0,1,6,0.60000000,1,1,1",
        "0,2,0,0.00000000,3,0,",
        "",
    ]


def test_csv_of_one_layer_has_its_rows_alone() -> None:
    pairs = np.array([[4, 6], [1, 0], [2, 2]])
    head, *rows = "".join(csv_parts(pairs, {})).split("\r\n")
    one = "".join(csv_parts(pairs, {}, 1)).split("\r\n")
    assert one == [head, *rows[2:4], ""]


def test_the_hottest_of_a_layer_is_the_first_and_the_lower_id_of_equals() -> None:
    assert ranks_in_layer(np.array([[4, 6, 4], [0, 0, 0]])).tolist() == [[2, 1, 3], [1, 2, 3]]
