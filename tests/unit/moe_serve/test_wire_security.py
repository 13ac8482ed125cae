"""Keys do not show in text, and only admitted keys are let in."""

import pytest
from zmq.utils import z85

from moe_serve.wire.security import CurveKeys, ServerSecurity, zap_answer


def request(mechanism: bytes, key: bytes) -> list[bytes]:
    return [b"1.0", b"id", b"moe_serve", b"127.0.0.1", b"", mechanism, key]


def test_a_secret_never_shows() -> None:
    keys = CurveKeys.generate()
    security = ServerSecurity(keys, frozenset({keys.public}))
    for text in (repr(keys), str(keys), f"{keys}", repr(security), repr([keys])):
        assert keys.secret not in text
    assert keys.public in repr(keys)


def test_only_admitted_curve_keys_get_200() -> None:
    known, other = CurveKeys.generate(), CurveKeys.generate()
    admitted = frozenset({known.public})
    assert zap_answer(request(b"CURVE", z85.decode(known.public)), admitted)[2] == b"200"
    for asked in (
        request(b"CURVE", z85.decode(other.public)),
        request(b"CURVE", b"short"),
        request(b"NULL", z85.decode(known.public)),
        request(b"PLAIN", b"x"),
    ):
        answer = zap_answer(asked, admitted)
        assert answer[:3] == [b"1.0", b"id", b"400"]
    assert zap_answer([b"2.0", b"id"], admitted)[2] == b"500"
    assert zap_answer([], admitted)[2] == b"500"


def test_a_key_of_the_wrong_length_is_refused_without_showing_it() -> None:
    with pytest.raises(ValueError, match="secret: must have 40") as caught:
        CurveKeys(CurveKeys.generate().public, "hunter2-secret")
    assert "hunter2" not in str(caught.value)
