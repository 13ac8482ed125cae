"""Documents of the page: arrays, scales, refusals. No socket, no clock."""

import base64
from typing import Any

import numpy as np
import pytest

from moe_serve.dashboard import frames
from moe_serve.errors import InvalidArgument
from moe_serve.rpc import placement_pb2 as pb

PHASES, LAYERS, EXPERTS, RANKS = 2, 2, 3, 2


def load(**changed: Any) -> pb.GetLoadResponse:
    demand = np.arange(PHASES * LAYERS * EXPERTS, dtype="<i8")
    fields: dict[str, Any] = {
        "window": 7,
        "start_s": 10.0,
        "end_s": 12.0,
        "demand": demand.tobytes(),
        "executed": (demand + 1).tobytes(),
        "rank_pairs": np.array([[5, 6], [7, 8]], dtype="<i8").tobytes(),
        "rank_busy": np.array([[0.5, 0.25], [1.0, 0.0]], dtype="<f8").tobytes(),
        "num_phases": PHASES,
        "num_layers": LAYERS,
        "num_experts": EXPERTS,
        "num_ranks": RANKS,
        "balancedness": 0.5,
        "imbalance": 1.0,
        "layer_imbalance": [0.25, 1.5],
    }
    return pb.GetLoadResponse(**(fields | changed))


def placement() -> pb.GetPlacementResponse:
    slots = [
        [(0, 0, 0, "LISTED"), (1, 0, 1, "LISTED"), (2, 1, 2, "COPYING"), (3, -1, -1, "")],
        [(0, 0, 0, "LISTED"), (2, 1, 2, "LISTED")],
    ]
    ranks = [
        pb.Rank(
            rank=rank,
            num_slots=4 - rank,
            state="up",
            address="10.0.0.1:7000",
            slots=[pb.Slot(index=i, layer=n, expert=e, state=s) for i, n, e, s in rows],
        )
        for rank, rows in enumerate(slots)
    ]
    return pb.GetPlacementResponse(
        model="<script>alert(1)</script>",
        num_layers=LAYERS,
        num_experts=EXPERTS,
        term=3,
        epoch=9,
        ranks=ranks,
        missing=[3],
    )


def numbers(text: str, dtype: str, shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    return np.frombuffer(base64.b64decode(text), dtype=dtype).reshape(shape)


def test_a_frame_carries_demand_replicas_and_sums() -> None:
    frame = frames.load_frame(load(), placement(), seq=4, wall_s=1000.0)
    demand = numbers(frame["load"]["data"], "<u2", (PHASES, LAYERS, EXPERTS))
    assert frame["load"]["scale"] == 1.0
    assert demand.reshape(-1).tolist() == list(range(12))
    assert numbers(frame["replicas"], "u1", (LAYERS, EXPERTS)).tolist() == [[2, 1, 0], [0, 0, 1]]
    assert frame["demand_pairs"] == [15, 51]
    assert frame["executed_pairs"] == [21, 57]
    assert frame["busy_s"] == [0.75, 1.0]
    assert (frame["seq"], frame["window"], frame["term"], frame["epoch"]) == (4, 7, 3, 9)
    assert numbers(frame["rank_pairs"]["data"], "<u2", (RANKS, LAYERS)).tolist() == [[5, 6], [7, 8]]


def test_replicas_are_unknown_before_the_first_placement() -> None:
    frame = frames.load_frame(load(), None, seq=1, wall_s=0.0)
    assert frame["replicas"] is None


def test_replicas_of_another_model_are_not_shown() -> None:
    other = placement()
    other.num_experts = EXPERTS + 1
    assert frames.load_frame(load(), other, seq=1, wall_s=0.0)["replicas"] is None


def test_large_counts_share_a_scale_and_small_ones_do_not_vanish() -> None:
    packed = frames.pack_counts(np.array([0, 1, 70_000, 35_000], dtype=np.int64))
    units = numbers(packed["data"], "<u2", (4,))
    assert packed["scale"] == pytest.approx(70_000 / 65_535)
    assert units[0] == 0
    assert units[1] == 1
    assert (units * packed["scale"]).tolist() == pytest.approx([0, 1, 70_000, 35_000], abs=0.6)


def test_the_smallest_count_survives_the_largest_scale() -> None:
    units = numbers(frames.pack_counts(np.array([3, 10**12], dtype=np.int64))["data"], "<u2", (2,))
    assert units.tolist() == [1, 65_535]


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"demand": b"\0" * 7}, "demand"),
        ({"executed": b""}, "executed"),
        ({"rank_pairs": b"\0" * 8}, "rank_pairs"),
        ({"rank_busy": b"\0" * 8}, "rank_busy"),
        ({"demand": np.full(12, -1, dtype="<i8").tobytes()}, "demand"),
        ({"num_layers": 2**31 - 1, "num_experts": 2**31 - 1}, "demand"),
        ({"num_phases": 0, "num_layers": 2**31 - 1, "num_experts": 2**31 - 1}, "demand"),
        ({"demand": b"", "num_phases": 0, "num_layers": 2**31 - 1}, "demand"),
        ({"num_layers": -2}, "demand"),
        ({"num_layers": -2, "num_experts": -3}, "demand"),
    ],
)
def test_arrays_that_do_not_fit_are_refused_by_name(changed: dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidArgument, match=named):
        frames.load_frame(load(**changed), placement(), seq=1, wall_s=0.0)


def test_slots_tell_empty_from_absent_and_keep_states() -> None:
    slots = frames.placement_document(placement(), seq=1, wall_s=0.0)["slots"]
    pair = numbers(slots["pair"], "<i4", (RANKS, 4))
    state = numbers(slots["state"], "u1", (RANKS, 4))
    assert slots["width"] == 4
    assert pair.tolist() == [[0, 1, 5, -1], [0, -1, 5, -2]]
    assert [[slots["states"][n] for n in row] for row in state.tolist()] == [
        ["LISTED", "LISTED", "COPYING", ""],
        ["LISTED", "", "LISTED", ""],
    ]


def test_a_slot_with_what_the_model_does_not_have_is_empty() -> None:
    strange = placement()
    for layer, expert in ((2**31 - 1, 2**31 - 1), (LAYERS, 0), (0, EXPERTS), (0, -1), (-1, 0)):
        slot = strange.ranks[0].slots[0]
        slot.layer, slot.expert = layer, expert
        document = frames.placement_document(strange, seq=1, wall_s=0.0)
        pair = numbers(document["slots"]["pair"], "<i4", (RANKS, 4))
        assert pair.tolist() == [[-1, 1, 5, -1], [0, -1, 5, -2]], (layer, expert)
        counts = numbers(document["replicas"], "u1", (LAYERS * EXPERTS,))
        assert counts.tolist() == [1, 1, 0, 0, 0, 1], (layer, expert)


def test_a_placement_names_what_is_missing_and_no_address() -> None:
    document = frames.placement_document(placement(), seq=1, wall_s=0.0)
    assert document["missing"] == [3]
    assert "address" not in document["ranks"][0]
    assert "10.0.0.1" not in str(document)


def test_an_absurd_placement_is_refused() -> None:
    for layers, experts in ((2**20, 2**20), (0, 2**31 - 1), (2**31 - 1, 0), (-1, 2)):
        huge = pb.GetPlacementResponse(num_layers=layers, num_experts=experts)
        with pytest.raises(InvalidArgument, match="cells"):
            frames.placement_document(huge, seq=1, wall_s=0.0)
    wide = pb.GetPlacementResponse(
        num_layers=1, num_experts=1, ranks=[pb.Rank(num_slots=2**31 - 1)] * 4
    )
    with pytest.raises(InvalidArgument, match="slots"):
        frames.placement_document(wide, seq=1, wall_s=0.0)


def test_an_empty_placement_has_a_document() -> None:
    document = frames.placement_document(pb.GetPlacementResponse(), seq=1, wall_s=0.0)
    assert document["slots"]["width"] == 0
    assert document["replicas"] == ""
