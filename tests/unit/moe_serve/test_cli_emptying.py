"""`drain --wait` and `remove-rank --wait`: how long, and how they end."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
from typer.testing import CliRunner, Result

from moe_serve.cli.app import app
from moe_serve.cli.emptying import Emptying, wait_until_empty
from moe_serve.cli.exits import CannotReach
from moe_serve.cli.options import Reach
from moe_serve.cli.output import Output
from moe_serve.cli.rolling import Clock
from moe_serve.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    MoeServeError,
    Unavailable,
)
from moe_serve.rpc import placement_pb2 as pb
from tests.fakes.admin import FakeAdmin, make_placement

DRAIN = Emptying(0, "rank 0 is being emptied", leaves=False)
REMOVE = Emptying(0, "rank 0 is to leave", leaves=True)

TAKEN_BACK = "rank 0 is not being emptied any more: it was taken back, or the controller began anew"


def _seen(held: int, state: str = "draining", service: str = "moving") -> pb.GetPlacementResponse:
    """Rank 0 holds so many experts of layer 3, in slots 0, 1, 2 ... of eight."""
    placement = make_placement(state=service)
    rank = placement.ranks[0]
    rank.state = state
    del rank.slots[:]
    for index in range(8):
        full = index < held
        layer, expert = (3, index) if full else (-1, -1)
        rank.slots.add(index=index, layer=layer, expert=expert, state="LISTED" if full else "")
    return placement


@dataclass
class _Watched(FakeAdmin):
    """Says one thing after another, the last for ever, on a clock of its own."""

    says: list[pb.GetPlacementResponse | BaseException] = field(default_factory=list)
    now_s: float = 0.0

    def placement(self) -> pb.GetPlacementResponse:
        said = self.says.pop(0) if len(self.says) > 1 else self.says[0]
        if isinstance(said, BaseException):
            raise said
        return said

    def clock(self) -> Clock:
        def sleep(seconds: float) -> None:
            self.now_s += seconds

        return Clock(lambda: self.now_s, sleep)


def _wait(
    what: Emptying, *says: pb.GetPlacementResponse | BaseException, wait_s: float = 10.0
) -> tuple[bool, str, tuple[pb.Slot, ...]]:
    admin = _Watched(says=list(says))
    found = wait_until_empty(admin, what, wait_s, Output(), admin.clock())
    return found.reached, found.text, found.held


def test_a_drain_is_over_when_the_rank_holds_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert _wait(DRAIN, _seen(3), _seen(3), _seen(1), _seen(0)) == (
        True,
        "rank 0 holds nothing",
        (),
    )
    assert capsys.readouterr().err.splitlines() == [
        "rank 0 is being emptied",
        "rank 0: 3 slots left",
        "rank 0: 1 slot left",
        "rank 0: 0 slots left",
    ]


def test_a_removal_is_over_when_the_rank_has_left() -> None:
    found = _wait(REMOVE, _seen(1), _seen(0), _seen(0, "removed"))
    assert found == (True, "rank 0 has left", ())


def test_a_rank_that_dies_meanwhile_is_empty_and_is_said_to_be_lost() -> None:
    assert _wait(DRAIN, _seen(2), _seen(0, "lost"))[:2] == (
        True,
        "rank 0 was lost meanwhile and holds nothing",
    )


@pytest.mark.parametrize("count", [1, 6])
def test_a_rank_that_dies_with_the_last_replicas_is_not_drained_until_they_are_back(
    count: int,
) -> None:
    lost = _seen(0, "lost")
    lost.num_experts, lost.missing[:] = 4, range(3, 3 + count)
    assert _wait(DRAIN, _seen(2), lost, _seen(0, "lost"))[0]
    names = ["layer 0 expert 3", *(f"layer 1 expert {n}" for n in range(5))][:count]
    said = names[0] if count == 1 else f"{', '.join(names[:4])}, 2 more"
    assert _wait(DRAIN, _seen(2), lost, wait_s=2.0)[:2] == (
        False,
        f"rank 0 was lost meanwhile, and after 2 s {count} "
        f"{'expert is' if count == 1 else 'experts are'} without a replica: {said}; see "
        "`moe-serve status`",
    )


def test_what_is_missing_elsewhere_does_not_hold_up_a_drain() -> None:
    empty = _seen(0)
    empty.missing.append(1)
    assert _wait(DRAIN, _seen(2), empty)[0]


def test_a_rank_that_is_taken_back_while_it_is_empty_is_not_drained() -> None:
    assert _wait(DRAIN, _seen(2), _seen(0, "up"))[:2] == (
        False,
        f"{TAKEN_BACK}; 0 slots left",
    )


def _without(service: str = "steady") -> pb.GetPlacementResponse:
    """A controller that does not name rank 0."""
    placement = make_placement(state=service)
    del placement.ranks[0]
    return placement


def test_a_rank_that_the_controller_does_not_name_any_more_has_left_where_it_was_to() -> None:
    assert _wait(REMOVE, _seen(1), _without())[:2] == (True, "rank 0 has left")
    assert _wait(DRAIN, _seen(1), _without())[:2] == (
        False,
        "rank 0 is not there any more: the controller began anew, without it",
    )


@pytest.mark.parametrize("what", [DRAIN, REMOVE], ids=["drain", "remove"])
def test_a_controller_that_starts_does_not_know_its_ranks_yet(
    what: Emptying, capsys: pytest.CaptureFixture[str]
) -> None:
    end = _seen(0, "removed")
    assert _wait(what, _seen(1), _without("starting"), end)[:2] == (True, "rank 0 has left")
    assert _wait(what, _seen(1), _without("starting"), _seen(1, "up"))[0] is False
    capsys.readouterr()
    for unheard in (_without("starting"), _seen(0, "suspect", "starting")):
        assert _wait(what, unheard, wait_s=2.0)[:2] == (
            False,
            "the controller starts and does not know after 2 s what rank 0 holds; see `moe-serve "
            "status`",
        )
    assert capsys.readouterr().err.splitlines() == [what.said] * 2


def test_a_controller_that_starts_does_not_know_yet_what_its_ranks_hold() -> None:
    says = (_seen(2), _seen(0, "lost", "starting"), _seen(2), _seen(0))
    assert _wait(DRAIN, *says)[1] == "rank 0 holds nothing"
    assert _wait(DRAIN, _seen(2), _seen(2, "up", "starting"), _seen(0))[0]


@pytest.mark.parametrize("away", [Unavailable("between two lives"), CannotReach("nobody")])
def test_a_controller_that_is_back_in_time_is_waited_for(away: MoeServeError) -> None:
    assert _wait(DRAIN, _seen(2), away, away, _seen(0))[0]


def test_a_controller_that_stays_away_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(CannotReach, match="nobody"):
        _wait(DRAIN, _seen(2), CannotReach("nobody"))
    assert capsys.readouterr().err.endswith(
        "rank 0 goes on being emptied; `moe-serve undrain 0` takes it back\n"
    )


@pytest.mark.parametrize("what", [DRAIN, REMOVE], ids=["drain", "remove"])
def test_at_the_end_of_the_time_what_is_left_is_named(what: Emptying) -> None:
    reached, text, held = _wait(what, _seen(6), wait_s=2.0)
    assert (reached, len(held)) == (False, 6)
    assert text == (
        "rank 0 has 6 slots left after 2 s: layer 3 expert 0, layer 3 expert 1, layer 3 expert 2, "
        "layer 3 expert 3, 2 more. It goes on being emptied; see `moe-serve status`, `moe-serve "
        "undrain 0` takes it back"
    )


def test_a_rank_that_is_empty_and_does_not_leave_is_said() -> None:
    assert _wait(REMOVE, _seen(0), wait_s=2.0)[:2] == (
        False,
        "rank 0 holds nothing and has not left after 2 s; see `moe-serve status`",
    )


@pytest.mark.parametrize("what", [DRAIN, REMOVE], ids=["drain", "remove"])
def test_a_rank_that_somebody_takes_back_is_not_waited_for(what: Emptying) -> None:
    assert _wait(what, _seen(2), _seen(2, "up"))[:2] == (
        False,
        f"{TAKEN_BACK}; 2 slots left",
    )


# -- the commands --------------------------------------------------------------------------------


def _run(says: Sequence[pb.GetPlacementResponse | BaseException], *args: str) -> Result:
    reach = Reach(connect=lambda _target: _Watched(says=list(says)))
    command = [*args, "--address", "127.0.0.1:4000"]
    return CliRunner().invoke(app, command, obj=reach, catch_exceptions=False)


@pytest.mark.parametrize(
    ("command", "end", "said"),
    [
        ("drain", _seen(0), "rank 0 holds nothing\n"),
        ("remove-rank", _seen(0, "removed"), "rank 0 has left\n"),
    ],
)
def test_the_command_ends_with_the_wait(
    command: str, end: pb.GetPlacementResponse, said: str
) -> None:
    result = _run([end], command, "0", "--wait", "5")
    assert (result.exit_code, result.stdout) == (0, said)
    shown = json.loads(_run([end], command, "0", "--wait", "5", "-o", "json").stdout)
    assert (shown["rank"], shown["state"], shown["left"]) == (0, end.ranks[0].state, [])


@pytest.mark.parametrize("command", ["drain", "remove-rank"])
def test_what_is_left_is_exit_1(command: str) -> None:
    result = _run([_seen(1)], command, "0", "--wait", "0.01", "-o", "json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["left"] == [
        {"slot": 0, "layer": 3, "expert": 0, "state": "LISTED"}
    ]
    last = result.stderr.splitlines()[-1]
    assert last.startswith("error: rank 0 has 1 slot left after 0.01 s: layer 3 expert 0. It goes")


@pytest.mark.parametrize("command", ["drain", "remove-rank"])
def test_ctrl_c_ends_the_wait_and_not_the_drain(command: str) -> None:
    result = _run([_seen(2), KeyboardInterrupt()], command, "0", "--wait", "30")
    assert (result.exit_code, result.stdout) == (130, "")
    assert result.stderr.splitlines()[1:] == [
        "rank 0: 2 slots left",
        "rank 0 goes on being emptied; `moe-serve undrain 0` takes it back",
    ]


class _Unheard(FakeAdmin):
    """A controller whose answer to the request does not come."""

    error: BaseException = KeyboardInterrupt()

    def drain(self, rank: int) -> pb.DrainRankResponse:
        raise self.error

    def remove_rank(self, rank: int, accept_lower_floor: bool) -> pb.RemoveRankResponse:
        raise self.error


@pytest.mark.parametrize("command", ["drain", "remove-rank"])
@pytest.mark.parametrize(
    ("error", "code", "known"),
    [
        (KeyboardInterrupt(), 130, False),
        (CannotReach("nobody"), 3, False),
        (DeadlineExceeded("too late"), 1, False),
        (Unavailable("between two lives"), 3, True),
        (FailedPrecondition("4 slots short"), 1, True),
    ],
)
def test_where_the_answer_to_the_request_does_not_come_it_is_said(
    command: str, error: BaseException, code: int, known: bool
) -> None:
    admin = _Unheard()
    admin.error = error
    reach = Reach(connect=lambda _target: admin)
    args = [command, "0", "--wait", "5", "--address", "127.0.0.1:4000"]
    result = CliRunner().invoke(app, args, obj=reach, catch_exceptions=False)
    said = "whether it was heard is not known: `moe-serve status` says so"
    assert (result.exit_code, said in result.stderr.splitlines()) == (code, not known)


def test_calls_of_the_wait_end_with_it() -> None:
    admin = _Watched(says=[_seen(0)])
    wait_until_empty(admin, DRAIN, 7.0, Output(), admin.clock())
    assert admin.asked_within == [7.0]


@pytest.mark.parametrize("command", ["drain", "remove-rank"])
def test_nobody_who_does_not_ask_waits(command: str) -> None:
    result = _run([AssertionError("was asked")], command, "0", "-o", "json")
    shown = json.loads(result.stdout)
    assert (result.exit_code, shown["state"], shown["left"]) == (0, None, None)
