"""Sessions and guesses by a clock that the test turns."""

import pytest

from moe_serve.dashboard import sessions
from moe_serve.dashboard.sessions import Guesses, Sessions, same

TOKEN = "admin-" + "a" * 20


class Clock:
    """Seconds that stand still until told."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def test_a_session_is_found_by_its_id_only(clock: Clock) -> None:
    live = Sessions(clock)
    made = live.begin(TOKEN)
    assert live.find(made.session_id) is made
    for wrong in ("", "x", made.session_id[:-1], made.session_id + "x", made.csrf, "ü", "\udcff"):
        assert live.find(wrong) is None


def test_ids_and_csrf_tokens_are_new_each_time(clock: Clock) -> None:
    live = Sessions(clock)
    made = [live.begin(TOKEN) for _ in range(8)]
    texts = {text for session in made for text in (session.session_id, session.csrf)}
    assert len(texts) == 16
    assert min(map(len, texts)) >= 43, "32 bytes"


def test_a_session_shows_no_secret(clock: Clock) -> None:
    made = Sessions(clock).begin(TOKEN)
    for secret in (TOKEN, made.csrf, made.session_id):
        assert secret not in repr(made)


@pytest.mark.parametrize("idle_s", [sessions.IDLE_S, sessions.LIFE_S])
def test_a_session_that_nobody_uses_ends(clock: Clock, idle_s: float) -> None:
    live = Sessions(clock)
    made = live.begin(TOKEN)
    clock.now_s += idle_s
    assert live.find(made.session_id) is None
    assert live.count() == 0, "its token is forgotten too"


def test_use_keeps_a_session_and_not_for_ever(clock: Clock) -> None:
    live = Sessions(clock)
    made, lived_s = live.begin(TOKEN), 0.0
    while lived_s < sessions.LIFE_S:
        assert live.find(made.session_id) is made
        clock.now_s += sessions.IDLE_S / 2
        lived_s += sessions.IDLE_S / 2
    assert live.find(made.session_id) is None


def test_one_session_too_many_ends_the_one_unused_longest(clock: Clock) -> None:
    live = Sessions(clock)
    made = []
    for _ in range(sessions.SESSIONS_MAX):
        clock.now_s += 1
        made.append(live.begin(TOKEN))
    clock.now_s += 1
    assert live.find(made[0].session_id) is made[0]
    live.begin(TOKEN)
    assert live.count() == sessions.SESSIONS_MAX
    assert live.find(made[1].session_id) is None
    assert live.find(made[0].session_id) is made[0]


def test_an_ended_session_is_gone(clock: Clock) -> None:
    live = Sessions(clock)
    made, other = live.begin(TOKEN), live.begin(TOKEN)
    live.end(made)
    live.end(made)
    assert live.find(made.session_id) is None
    assert live.find(other.session_id) is other


def test_guesses_wait_and_right_ones_are_forgiven(clock: Clock) -> None:
    guesses = Guesses(clock)
    for _ in range(sessions.FAILURES_MAX - 1):
        guesses.begin()
        clock.now_s += 1
    begun = guesses.begin()
    assert guesses.wait_s() == sessions.FAILURES_S - (sessions.FAILURES_MAX - 1)
    guesses.forgive(begun)
    assert guesses.wait_s() == 0.0
    guesses.begin()
    assert guesses.wait_s() > 0
    clock.now_s += guesses.wait_s()
    assert guesses.wait_s() == 0.0
    guesses.forgive(begun)


def test_same_is_the_same() -> None:
    assert same("abc", "abc")
    for other in ("", "abd", "abcd", "ab", "äbc"):
        assert not same("abc", other)
