"""Tensors, bitmaps, errors and tokens of the public API."""

from pathlib import Path

import grpc
import numpy as np
import pytest
from google.rpc import error_details_pb2, status_pb2

from moe_serve import errors
from moe_serve.errors import FieldViolation, InvalidArgument, ResourceExhausted, StartRefused
from moe_serve.ports import DType
from moe_serve.rpc import codec, dispatch_pb2, placement_pb2
from moe_serve.rpc.auth import Role, TokenFile, bearer_metadata, method_roles
from moe_serve.rpc.options import (
    RpcLimits,
    channel_credentials,
    channel_options,
    is_loopback,
    server_credentials,
    server_options,
)
from moe_serve.rpc.status import (
    DETAILS_KEY,
    VIOLATIONS_MAX,
    from_item_error,
    from_rpc_error,
    from_status,
    to_item_error,
    to_status,
)

# ------------------------------------------------------------------------------- codec


def test_element_types_have_the_numbers_of_the_ports() -> None:
    assert (DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16) == (codec.FP32, codec.BF16, codec.FP16)
    for data_type in codec.HIDDEN_TYPES:
        assert codec.numpy_type(data_type) == DType(data_type).numpy


@pytest.mark.parametrize("data_type", [codec.FP32, codec.BF16, codec.FP16, codec.INT32])
@pytest.mark.parametrize("shape", [(3, 4), (0, 4), (3, 0)])
def test_a_tensor_survives_the_way(data_type: int, shape: tuple[int, int]) -> None:
    array = np.arange(12)[: shape[0] * shape[1]].reshape(shape).astype(codec.numpy_type(data_type))
    message = codec.tensor(array, data_type)
    back = codec.tensor_array("t", message, (data_type,))
    assert back.dtype == array.dtype
    assert not back.flags.writeable
    np.testing.assert_array_equal(back, array)


def test_values_are_never_cast() -> None:
    with pytest.raises(InvalidArgument, match="float64"):
        codec.tensor(np.zeros((1, 1)), codec.FP32)
    with pytest.raises(InvalidArgument, match="unknown"):
        codec.numpy_type(12)


def test_a_shape_that_does_not_fit_its_bytes_is_named() -> None:
    message = dispatch_pb2.Tensor(data_type=codec.FP32, shape=[2**40, 2**40], raw=b"1234")
    with pytest.raises(InvalidArgument) as refused:
        codec.tensor_array("hidden_states", message, codec.HIDDEN_TYPES)
    assert [v.field for v in refused.value.violations] == ["hidden_states.raw"]


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 64, 65])
def test_bitmaps_survive_the_way_and_bit_i_is_row_i(size: int) -> None:
    mask = np.random.default_rng(size).random(size) < 0.5
    packed = codec.pack_bits(mask)
    assert len(packed) == codec.bitmap_bytes(size)
    for i in range(size):
        assert bool(packed[i // 8] >> (i % 8) & 1) == mask[i]
    np.testing.assert_array_equal(codec.unpack_bits(packed, (size,)), mask)
    assert codec.pack_bits(None) == b""


def test_small_rows_and_wide_routing_have_limits_of_their_own() -> None:
    def rows(top_k: int) -> int:
        return codec.max_rows(top_k=top_k, hidden_size=2, max_message_bytes=1 << 40)

    assert rows(8) == codec.ROWS_MAX
    assert rows(64) == codec.PAIRS_MAX // 64


@pytest.mark.parametrize("top_k", [1, 3, 8])
@pytest.mark.parametrize("limit", [5_000, 65_536, 1_000_003])
def test_max_rows_is_the_greatest_that_fits(top_k: int, limit: int) -> None:
    rows = codec.max_rows(top_k=top_k, hidden_size=64, max_message_bytes=limit)

    def size(count: int) -> int:
        arrays = codec.ForwardArrays(
            model="m" * 64,
            layer=1,
            phase=1,
            data_type=codec.FP32,
            hidden=np.zeros((count, 64), np.float32),
            topk_ids=np.zeros((count, top_k), np.int32),
            topk_weights=np.zeros((count, top_k), np.float32),
            request_id="r" * 128,
            row_valid=np.ones(count, np.bool_),
            pair_valid=np.ones((count, top_k), np.bool_),
        )
        return codec.forward_request(arrays).ByteSize()

    assert size(rows) <= limit < size(rows + 1) + codec.REQUEST_NAMES_BYTES
    bound = codec.request_bytes(rows=rows, top_k=top_k, hidden_size=64, element_bytes=4)
    assert size(rows) <= bound <= limit
    assert codec.max_rows(top_k=top_k, hidden_size=64, max_message_bytes=10) == 0


# ------------------------------------------------------------------------------- status

VIOLATIONS = (FieldViolation("layer", "must be in [0, 4), got 9"),)
ALL_ERRORS = [
    errors.MoeServeError("inside"),
    errors.InvalidArgument("bad", violations=VIOLATIONS),
    errors.ResourceExhausted("full", violations=VIOLATIONS, retry_after_s=0.25),
    errors.FailedPrecondition("paused"),
    errors.NotFound("nothing"),
    errors.Unavailable("gone"),
    errors.DeadlineExceeded("late"),
    errors.Unauthenticated("who"),
    errors.PermissionDenied("no"),
    errors.StaleTerm("old", term=7),
    errors.WireLost("wire"),
]


@pytest.mark.parametrize("error", ALL_ERRORS, ids=lambda e: type(e).__name__)
def test_every_error_comes_back_as_itself(error: errors.MoeServeError) -> None:
    status = status_pb2.Status.FromString(to_status(error).SerializeToString())
    back = from_status(status)
    assert type(back) is type(error)
    assert error.message in back.message
    assert back.violations == error.violations
    if isinstance(back, errors.StaleTerm):
        assert back.term == 7
    if isinstance(back, ResourceExhausted):
        assert back.retry_after_s == 0.25


def test_details_are_those_other_languages_read() -> None:
    status = to_status(ALL_ERRORS[2])
    kinds = {detail.TypeName() for detail in status.details}
    assert kinds == {"google.rpc.ErrorInfo", "google.rpc.BadRequest", "google.rpc.RetryInfo"}
    retry = error_details_pb2.RetryInfo()
    assert any(d.Unpack(retry) for d in status.details if d.Is(retry.DESCRIPTOR))
    assert retry.retry_delay.ToTimedelta().total_seconds() == 0.25


def test_no_error_outgrows_the_metadata_limit() -> None:
    many = tuple(FieldViolation("f" * 1000, "d" * 10_000) for _ in range(1000))
    status = to_status(InvalidArgument("m" * 100_000, violations=many))
    assert status.ByteSize() < RpcLimits().max_metadata_bytes * 2
    assert len(from_status(status).violations) == VIOLATIONS_MAX


def test_item_errors_carry_the_same() -> None:
    for error in ALL_ERRORS:
        back = from_item_error(to_item_error(error))
        assert back.violations == error.violations
        assert error.message in back.message
    assert isinstance(from_item_error(to_item_error(ALL_ERRORS[1])), InvalidArgument)


class FailedCall(grpc.RpcError):
    def __init__(
        self, code: grpc.StatusCode, details: str | None, trailing: tuple[tuple[str, bytes], ...]
    ) -> None:
        self._all = (code, details, trailing)

    def code(self) -> grpc.StatusCode:
        return self._all[0]

    def details(self) -> str | None:
        return self._all[1]

    def trailing_metadata(self) -> tuple[tuple[str, bytes], ...]:
        return self._all[2]


def test_failures_that_grpc_found_itself_are_typed_by_code() -> None:
    unavailable = FailedCall(grpc.StatusCode.UNAVAILABLE, "connection refused", ())
    assert isinstance(from_rpc_error(unavailable), errors.Unavailable)
    too_large = FailedCall(grpc.StatusCode.RESOURCE_EXHAUSTED, "larger than max", ())
    assert isinstance(from_rpc_error(too_large), ResourceExhausted)
    odd = from_rpc_error(FailedCall(grpc.StatusCode.DATA_LOSS, None, ()))
    assert type(odd) is errors.MoeServeError
    # Details of another code are not believed.
    foreign = to_status(InvalidArgument("x")).SerializeToString()
    mixed = FailedCall(grpc.StatusCode.UNAVAILABLE, "y", ((DETAILS_KEY, foreign),))
    assert isinstance(from_rpc_error(mixed), errors.Unavailable)
    assert "UNKNOWN" in from_rpc_error(grpc.RpcError()).message


# ------------------------------------------------------------------------------- tokens

GOOD = "dispatch " + "d" * 16 + "\n# two admins while they rotate\nadmin " + "a" * 16
GOOD += "\nadmin " + "b" * 16 + " # new\n"


def write(folder: Path, text: str, mode: int = 0o600) -> Path:
    path = folder / "tokens"
    path.write_text(text)
    path.chmod(mode)
    return path


def test_roles_of_tokens(tmp_path: Path) -> None:
    tokens = TokenFile(write(tmp_path, GOOD))
    assert tokens.roles(f"Bearer {'d' * 16}") == {Role.DISPATCH}
    for token in ("a" * 16, "b" * 16):
        assert tokens.roles(bearer_metadata(token)[0][1]) == {Role.ADMIN, Role.READ}
    assert tokens.token(Role.ADMIN) == "a" * 16
    with pytest.raises(StartRefused, match="read TOKEN"):
        tokens.token(Role.READ)
    for header in (None, "", "Bearer", "Bearer ", "Basic " + "d" * 16, "Bearer " + "d" * 15):
        with pytest.raises(errors.Unauthenticated):
            tokens.roles(header)


@pytest.mark.parametrize(
    ("text", "mode", "says"),
    [
        ("", 0o600, "empty"),
        ("# nothing\n", 0o600, "empty"),
        (GOOD, 0o604, "open to others"),
        (GOOD, 0o640, ""),
        (GOOD, 0o620, "open to others"),
        ("dispatch short\n", 0o600, "line 1: a token has 16"),
        ("root " + "d" * 16, 0o600, "line 1: must be"),
        ("d" * 16, 0o600, "line 1: must be"),
        ("\n".join("read " + c * 16 for c in "abc"), 0o600, "line 3: at most 2"),
        ("x" * 20_000, 0o600, "larger than"),
    ],
)
def test_a_token_file_that_is_not_safe_is_no_start(
    tmp_path: Path, text: str, mode: int, says: str
) -> None:
    path = write(tmp_path, text, mode)
    if not says:
        TokenFile(path)
        return
    with pytest.raises(StartRefused, match=says) as refused:
        TokenFile(path)
    assert "d" * 16 not in refused.value.message


def test_a_missing_or_odd_token_file_is_no_start(tmp_path: Path) -> None:
    with pytest.raises(StartRefused, match="missing"):
        TokenFile(tmp_path / "none")
    with pytest.raises(StartRefused, match="cannot be read"):
        TokenFile(tmp_path)


def test_a_rotation_is_seen_and_a_broken_one_keeps_the_old_tokens(tmp_path: Path) -> None:
    tokens = TokenFile(write(tmp_path, GOOD))
    write(tmp_path, "dispatch " + "n" * 16 + "\n")
    assert tokens.roles(f"Bearer {'n' * 16}") == {Role.DISPATCH}
    with pytest.raises(errors.Unauthenticated):
        tokens.roles(f"Bearer {'d' * 16}")
    path = write(tmp_path, "")
    assert tokens.roles(f"Bearer {'n' * 16}") == {Role.DISPATCH}
    assert "empty" in tokens.fault
    path.unlink()
    assert tokens.roles(f"Bearer {'n' * 16}") == {Role.DISPATCH}
    assert "cannot be read" in tokens.fault
    write(tmp_path, GOOD)
    assert tokens.roles(f"Bearer {'d' * 16}") == {Role.DISPATCH}
    assert tokens.fault == ""


def test_every_method_has_a_role_and_an_unknown_one_is_the_admins() -> None:
    roles = method_roles()
    count = sum(
        len(service.methods)
        for file in (dispatch_pb2, placement_pb2)
        for service in file.DESCRIPTOR.services_by_name.values()
    )
    assert len(roles) == count
    admin = {name.rpartition("/")[2] for name, role in roles.items() if role is Role.ADMIN}
    assert {"ApplyPlan", "DrainRank", "SetBudget", "Pause", "ComputePlan"} <= admin
    for read in ("WatchEvents", "Explain", "ExplainPlan"):
        assert roles[f"/moe_serve.rpc.v1.PlacementService/{read}"] is Role.READ
    assert roles["/moe_serve.rpc.v1.DispatchService/GetModelSpec"] is Role.DISPATCH


# ------------------------------------------------------------------------------- options


def test_limits_are_set_on_both_ends() -> None:
    server, client = dict(server_options(RpcLimits())), dict(channel_options())
    for end in (server, client):
        assert end["grpc.max_receive_message_length"] >= RpcLimits().max_message_bytes
        assert end["grpc.max_send_message_length"] >= RpcLimits().max_message_bytes
    assert server["grpc.so_reuseport"] == 0
    assert server["grpc.max_metadata_size"] == server["grpc.absolute_max_metadata_size"] == 8192
    assert client["grpc.keepalive_time_ms"] >= 1000 * RpcLimits().ping_interval_min_s


@pytest.mark.parametrize(
    ("host", "inside"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("[::1]", True),
        ("localhost", True),
        ("0.0.0.0", False),  # noqa: S104 - nothing is bound here
        ("10.1.2.3", False),
        ("node7", False),
        ("", False),
    ],
)
def test_what_counts_as_loopback(host: str, inside: bool) -> None:
    assert is_loopback(host) is inside


def test_tls_files_that_cannot_be_used_are_no_start(tmp_path: Path) -> None:
    empty = tmp_path / "empty.pem"
    empty.touch()
    with pytest.raises(StartRefused, match=r"TLS key file none\.pem"):
        server_credentials(empty, tmp_path / "none.pem")
    with pytest.raises(StartRefused, match="is empty"):
        channel_credentials(empty)
    assert channel_credentials(None) is not None
