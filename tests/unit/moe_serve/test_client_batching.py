"""Cutting by rows, element types, and the checks that come before."""

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_serve.client import checks
from moe_serve.client.batching import (
    join_outputs,
    like_input,
    raw_rows,
    rows_per_message,
    split_rows,
)
from moe_serve.client.model_spec import ModelSpec
from moe_serve.errors import InvalidArgument
from moe_serve.rpc import codec, dispatch_pb2
from moe_serve.rpc.options import MAX_MESSAGE_BYTES


def a_spec(**changes: int) -> ModelSpec:
    fields = {"num_layers": 2, "num_experts": 6, "top_k": 3, "hidden_size": 8}
    fields |= {"max_message_bytes": 4096} | changes
    return ModelSpec.from_response(dispatch_pb2.GetModelSpecResponse(**fields))


def arrays(rows: int, k: int = 2, hidden: int = 8, *, masks: bool = True) -> codec.ForwardArrays:
    return codec.ForwardArrays(
        model="m",
        layer=1,
        phase=1,
        data_type=codec.FP32,
        hidden=np.arange(rows * hidden, dtype=np.float32).reshape(rows, hidden),
        topk_ids=np.arange(rows * k, dtype=np.int32).reshape(rows, k),
        topk_weights=np.arange(rows * k, dtype=np.float32).reshape(rows, k),
        request_id="r" * 128,
        row_valid=np.arange(rows) % 2 == 0 if masks else None,
        pair_valid=np.arange(rows * k).reshape(rows, k) % 3 == 0 if masks else None,
    )


@given(
    rows=st.integers(0, 200),
    k=st.integers(1, 5),
    hidden=st.integers(1, 40),
    limit=st.integers(2424, 7024),
)
def test_every_part_fits_the_limit_and_the_parts_are_the_whole(
    rows: int, k: int, hidden: int, limit: int
) -> None:
    spec = a_spec(hidden_size=hidden, max_message_bytes=limit)
    whole = arrays(rows, k, hidden)
    parts = list(split_rows(whole, rows_per_message(spec, codec.FP32, k)))
    assert all(codec.forward_request(part).ByteSize() <= limit for part in parts)
    for name in ("hidden", "topk_ids", "topk_weights", "row_valid", "pair_valid"):
        joined = np.concatenate([getattr(part, name) for part in parts])
        np.testing.assert_array_equal(joined, getattr(whole, name))
    assert {part.request_id for part in parts} == {whole.request_id}


def test_one_row_more_than_fits_makes_a_second_part() -> None:
    limit = rows_per_message(a_spec(), codec.FP32, 2)
    assert [p.hidden.shape[0] for p in split_rows(arrays(limit), limit)] == [limit]
    assert [p.hidden.shape[0] for p in split_rows(arrays(limit + 1), limit)] == [limit, 1]


def test_the_limit_is_used_nearly_to_the_full() -> None:
    limit = rows_per_message(a_spec(max_message_bytes=100_000), codec.FP32, 2)
    size = codec.forward_request(arrays(limit)).ByteSize()
    assert 100_000 - codec.REQUEST_NAMES_BYTES - 100 < size <= 100_000


def test_narrow_types_have_more_rows() -> None:
    assert rows_per_message(a_spec(), codec.BF16, 2) > rows_per_message(a_spec(), codec.FP32, 2)


def test_the_worked_example() -> None:
    spec = a_spec(hidden_size=1024, max_message_bytes=64 << 20)
    assert rows_per_message(spec, codec.FP32, 4) == 16_254


def test_a_service_with_a_greater_limit_than_our_channels_is_met_at_ours() -> None:
    rows = rows_per_message(a_spec(max_message_bytes=1 << 40), codec.FP32, 2)
    assert rows == rows_per_message(a_spec(max_message_bytes=MAX_MESSAGE_BYTES), codec.FP32, 2)


def test_small_rows_are_cut_at_the_most_rows_of_a_request() -> None:
    spec = a_spec(hidden_size=4, max_message_bytes=MAX_MESSAGE_BYTES)
    assert rows_per_message(spec, codec.FP32, 2) == codec.ROWS_MAX


def test_a_limit_below_one_row_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="less than one row of hidden_size 1000"):
        rows_per_message(a_spec(hidden_size=1000), codec.FP32, 2)


def test_parts_without_masks_have_none() -> None:
    parts = list(split_rows(arrays(5, masks=False), 2))
    assert len(parts) == 3
    assert all(part.row_valid is None and part.pair_valid is None for part in parts)


def test_outputs_are_joined_in_order_and_read_only() -> None:
    joined = join_outputs([np.zeros((2, 3)), np.ones((1, 3))])
    assert joined.tolist() == [[0.0] * 3, [0.0] * 3, [1.0] * 3]
    assert not joined.flags.writeable


@pytest.mark.parametrize(
    ("dtype", "kind", "raw"),
    [
        (np.float32, codec.FP32, np.float32),
        (np.float16, codec.FP16, np.float16),
        (ml_dtypes.bfloat16, codec.BF16, np.uint16),
        (np.uint16, codec.BF16, np.uint16),
    ],
)
def test_element_types_travel_as_they_are(dtype: type, kind: int, raw: type) -> None:
    hidden = np.array([[1, 2], [3, 4]]).astype(dtype).T
    got, data_type = raw_rows(hidden)
    assert (data_type, got.dtype) == (kind, np.dtype(raw))
    assert got.flags.c_contiguous
    back = like_input(got, hidden)
    assert back.dtype == hidden.dtype
    assert back.tolist() == hidden.tolist()


@pytest.mark.parametrize("dtype", [np.float64, np.int32, np.dtype(">f4")])
def test_other_types_are_refused_by_name(dtype: type) -> None:
    with pytest.raises(InvalidArgument, match=f"is {np.dtype(dtype)}") as caught:
        raw_rows(np.zeros((1, 2), dtype))
    assert caught.value.violations[0].field == "hidden"


GOOD = {
    "hidden": np.zeros((3, 8), np.float32),
    "ids": np.zeros((3, 2), np.int64),
    "weights": np.zeros((3, 2), np.float32),
    "row_valid": np.ones(3, np.bool_),
    "pair_valid": np.ones((3, 2), np.bool_),
}


def test_shapes_that_agree_pass() -> None:
    checks.check_shapes(**GOOD)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"hidden": np.zeros(8, np.float32)}, "hidden"),
        ({"ids": np.zeros(3, np.int64)}, "topk_ids"),
        ({"ids": np.zeros((4, 2), np.int64)}, "topk_ids"),
        ({"weights": np.zeros((3, 1), np.float32)}, "topk_weights"),
        ({"ids": np.zeros((3, 2), np.float32)}, "topk_ids"),
        ({"weights": np.zeros((3, 2), np.complex64)}, "topk_weights"),
        # 2 of 3 rows are one byte as well: the router could not see it.
        ({"row_valid": np.ones(2, np.bool_)}, "row_valid"),
        ({"row_valid": np.ones(3, np.uint8)}, "row_valid"),
        ({"pair_valid": np.ones((2, 3), np.bool_)}, "pair_valid"),
    ],
)
def test_shapes_that_disagree_name_the_field(change: dict[str, np.ndarray], field: str) -> None:
    with pytest.raises(InvalidArgument) as caught:
        checks.check_shapes(**(GOOD | change))
    assert [v.field for v in caught.value.violations] == [field]


@pytest.mark.parametrize("layer", [-1, 2, 2**40])
def test_layers_outside_are_refused(layer: int) -> None:
    with pytest.raises(InvalidArgument, match=r"layer: must be in \[0, 2\)"):
        checks.check_model_fit(a_spec(), layer, GOOD["hidden"])


def test_rows_of_another_size_are_refused() -> None:
    with pytest.raises(InvalidArgument, match=r"want \[rows, 9\]"):
        checks.check_model_fit(a_spec(hidden_size=9), 0, GOOD["hidden"])


@pytest.mark.parametrize("wide", [2**31, 2**32 + 1, -(2**31) - 1])
def test_ids_do_not_wrap(wide: int) -> None:
    with pytest.raises(InvalidArgument, match="want int32"):
        checks.narrow_ids(np.array([[0, wide]], np.int64))


def test_ids_at_the_edge_of_int32_pass_and_none_at_all() -> None:
    assert checks.narrow_ids(np.array([[-(2**31), 2**31 - 1]])).tolist() == [[-(2**31), 2**31 - 1]]
    assert checks.narrow_ids(np.zeros((0, 2), np.uint64)).shape == (0, 2)


def test_weights_that_do_not_fit_become_infinite_for_the_router_to_refuse() -> None:
    assert checks.narrow_weights(np.array([[1e300, 0.5]])).tolist() == [[np.inf, 0.5]]


def test_request_ids_are_bounded() -> None:
    checks.check_request_id("x" * 128)
    with pytest.raises(InvalidArgument, match="got 129"):
        checks.check_request_id("x" * 129)


def test_timeouts_are_bounded() -> None:
    assert checks.check_timeout(-1.0) == -1.0
    for bad in (float("nan"), float("inf"), 3601.0):
        with pytest.raises(InvalidArgument, match="at most 3600"):
            checks.check_timeout(bad)
