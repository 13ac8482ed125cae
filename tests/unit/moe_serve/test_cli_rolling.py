"""A rolling replacement over a service in memory: its order, what it waits for, where it stops."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from moe_serve.cli.commands.fleet import add_once
from moe_serve.cli.exits import CannotReach
from moe_serve.cli.rolling import READY_S, REFUSED_S, Clock, PartGroup, Roll
from moe_serve.errors import FailedPrecondition, Unavailable
from moe_serve.rpc import placement_pb2 as pb
from tests.fakes.admin import FakeAdmin

AWAY_S = 2.0
"""How long a part of the service in memory is away."""


@dataclass
class FakeService(FakeAdmin):
    """Parts that come back a while after they were asked to go. `refuses`: ranks whose new shard
    will not start. `holds`: listed experts of every rank."""

    now_s: float = 0.0
    ranks: list[pb.Rank] = field(default_factory=list)
    routers: list[pb.Router] = field(default_factory=list)
    term: int = 3
    back_s: dict[str, float] = field(default_factory=dict)
    away: list[tuple[float, tuple[str, ...]]] = field(default_factory=list)
    refuses: set[int] = field(default_factory=set)
    deaf_until_s: float = -1.0
    state: str = "steady"
    problems: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        slots = [pb.Slot(index=i, layer=0, expert=i, state="LISTED") for i in range(2)]
        self.ranks = [
            pb.Rank(rank=n, state="up", incarnation=10 + n, slots=slots) for n in range(3)
        ]
        self.routers = [
            pb.Router(router=f"router-{n}", state="up", incarnation=20 + n, applied_epoch=7)
            for n in range(2)
        ]

    def clock(self) -> Clock:
        return Clock(lambda: self.now_s, self.sleep)

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        gone = tuple(sorted(name for name, at_s in self.back_s.items() if at_s > self.now_s))
        self.away.append((self.now_s, gone))

    def is_away(self, name: str) -> bool:
        return self.back_s.get(name, -1.0) > self.now_s

    def placement(self) -> pb.GetPlacementResponse:
        if self.now_s < self.deaf_until_s:
            raise CannotReach("nobody answers")
        problems = list(self.problems)
        ranks = []
        for rank in self.ranks:
            shown = pb.Rank()
            shown.CopyFrom(rank)
            if self.is_away(f"rank {rank.rank}"):
                shown.state, shown.incarnation = "lost", rank.incarnation - 100
                del shown.slots[:]
                if rank.rank in self.refuses:
                    problems.append(f"rank {rank.rank} does not start: its self-check failed")
            ranks.append(shown)
        routers = []
        for router in self.routers:
            shown_router = pb.Router()
            shown_router.CopyFrom(router)
            if self.is_away(router.router):
                shown_router.state, shown_router.incarnation = "lost", 0
            routers.append(shown_router)
        return pb.GetPlacementResponse(
            ranks=ranks, routers=routers, term=self.term, state=self.state, problems=problems
        )

    def replace_rank(
        self, rank: int, incarnation: int, accept_lower_floor: bool
    ) -> pb.ReplaceRankResponse:
        answer = super().replace_rank(rank, incarnation, accept_lower_floor)
        away_s = 1e9 if rank in self.refuses else AWAY_S
        self.back_s[f"rank {rank}"] = self.now_s + away_s
        self.ranks[rank].incarnation += 100
        return answer

    def replace_router(
        self, router: str, incarnation: int, accept_gap: bool
    ) -> pb.ReplaceRouterResponse:
        answer = super().replace_router(router, incarnation, accept_gap)
        self.back_s[router] = self.now_s + AWAY_S
        found = next(r for r in self.routers if r.router == router)
        found.incarnation += 100
        return answer

    def restart_controller(self, term: int) -> pb.RestartControllerResponse:
        answer = super().restart_controller(term)
        self.term += 1
        self.deaf_until_s = self.now_s + AWAY_S
        return answer


def roll_of(service: FakeService, lines: list[str], **fields: bool) -> Roll:
    return Roll(service, lines.append, wait_s=60.0, clock=service.clock(), **fields)


def test_every_part_is_replaced_once_in_order_and_never_two_at_a_time() -> None:
    service, lines = FakeService(), list[str]()
    roll = roll_of(service, lines)
    roll.run()
    names = ["rank 0", "rank 1", "rank 2", "router-0", "router-1", "controller"]
    assert roll.replaced == names
    assert service.asked == [
        ("replace_rank", 0, 10, False),
        ("replace_rank", 1, 11, False),
        ("replace_rank", 2, 12, False),
        ("replace_router", "router-0", 20, False),
        ("replace_router", "router-1", 21, False),
        ("restart_controller", 3),
    ]
    assert max(len(gone) for _, gone in service.away) == 1
    assert "replacing rank 0 (1 of 6)" in lines


def test_front_ends_get_the_time_to_find_a_router_again_before_the_next_one_goes() -> None:
    service = FakeService()
    roll_of(service, []).run([PartGroup.ROUTERS])
    gone = {name: [t for t, away in service.away if name in away] for name in service.back_s}
    assert gone["router-1"][0] >= service.back_s["router-0"] + READY_S


def test_what_is_accepted_is_handed_on_and_only_some_parts_may_be_asked_for() -> None:
    service = FakeService()
    roll = roll_of(service, [], accept_lower_floor=True, accept_gap=True)
    roll.run([PartGroup.ROUTERS, PartGroup.RANKS])
    assert ("replace_rank", 1, 11, True) in service.asked
    assert ("replace_router", "router-1", 21, True) in service.asked
    assert not [asked for asked in service.asked if asked[0] == "restart_controller"]


def test_a_removed_rank_has_nothing_to_replace() -> None:
    service = FakeService()
    service.ranks[1].state = "removed"
    roll = roll_of(service, [])
    roll.run([PartGroup.RANKS])
    assert roll.replaced == ["rank 0", "rank 2"]


def test_a_rank_that_somebody_removes_meanwhile_has_nothing_to_replace() -> None:
    class Leaving(FakeService):
        """Rank 1 leaves before its turn, rank 2 while its new shard is awaited."""

        def placement(self) -> pb.GetPlacementResponse:
            if ("replace_rank", 0, 10, False) in self.asked:
                self.ranks[1].state = "removed"
            seen = super().placement()
            if self.is_away("rank 2"):
                seen.ranks[2].state = "removed"
            return seen

    service, lines = Leaving(), list[str]()
    roll = roll_of(service, lines)
    roll.run([PartGroup.RANKS])
    assert roll.replaced == ["rank 0"]
    assert [line for line in lines if "was removed meanwhile" in line] == [
        f"rank {n} was removed meanwhile; there is nothing to replace" for n in (1, 2)
    ]
    assert not any(asked[1] == 1 for asked in service.asked)


def test_a_rank_that_is_lost_when_its_turn_comes_is_waited_for_first() -> None:
    class Dies(FakeService):
        def replace_rank(
            self, rank: int, incarnation: int, accept_lower_floor: bool
        ) -> pb.ReplaceRankResponse:
            if rank == 0:
                self.back_s["rank 1"] = self.now_s + 2 * AWAY_S
                self.ranks[1].incarnation += 100
            elif self.is_away(f"rank {rank}"):
                raise FailedPrecondition(f"rank {rank} is lost; wait until it has joined")
            return super().replace_rank(rank, incarnation, accept_lower_floor)

    service = Dies()
    roll = roll_of(service, [])
    roll.run([PartGroup.RANKS])
    assert roll.replaced == ["rank 0", "rank 1", "rank 2"]


def test_a_rank_is_added_once_however_often_the_answer_is_lost() -> None:
    class Lossy(FakeService):
        losses = 3

        def add_rank(
            self, group: int, node: str, again: int | None, key: str = ""
        ) -> pb.AddRankResponse:
            answer = super().add_rank(group, node, again, key)
            if self.losses:
                self.losses -= 1
                raise CannotReach("the controller does not answer")
            return answer

    service = Lossy()
    assert add_once(service, 1, "b", None, clock=service.clock()).rank == 2
    asked = [a for a in service.asked if a[0] == "add_rank"]
    assert len(asked) == 4
    assert len(set(asked)) == 1
    assert len(str(asked[0][4])) == 32
    service.losses = 1 << 30
    with pytest.raises(CannotReach, match="ask again with --key mine"):
        add_once(service, 1, "b", None, "mine", clock=service.clock())
    assert service.asked[-1] == ("add_rank", 1, "b", None, "mine")
    with pytest.raises(CannotReach, match="nobody answers"):
        add_once(FakeService(deaf_until_s=1e9), 0, "", None)


def test_a_shard_that_does_not_start_stops_the_roll_and_the_rest_is_untouched() -> None:
    service = FakeService(refuses={1})
    roll = roll_of(service, [])
    with pytest.raises(FailedPrecondition) as stopped:
        roll.run()
    words = stopped.value.message
    assert "the roll stopped at rank 1: rank 1 does not start: its self-check failed" in words
    assert "Replaced so far: rank 0; untouched: rank 2, router-0, router-1, controller" in words
    assert len(service.asked) == 2
    assert service.now_s < 3 * REFUSED_S


def test_a_rank_that_never_comes_back_ends_the_wait() -> None:
    service = FakeService(refuses={0})
    roll = Roll(service, [].append, wait_s=3.0, clock=service.clock())
    with pytest.raises(FailedPrecondition, match="not within 3 s: rank 0 has a new shard"):
        roll.run([PartGroup.RANKS])


def test_a_refusal_stops_before_anything_is_ended() -> None:
    class Full(FakeService):
        def replace_rank(
            self, rank: int, incarnation: int, accept_lower_floor: bool
        ) -> pb.ReplaceRankResponse:
            raise FailedPrecondition("the other ranks lack 4 slots")

    service = Full()
    with pytest.raises(FailedPrecondition, match="stopped at rank 0: the other ranks lack 4"):
        roll_of(service, []).run()
    assert service.back_s == {}


def test_nothing_is_begun_while_something_is_wrong() -> None:
    service = FakeService(problems=["rank 2 is lost; a new shard is being created"])
    with pytest.raises(FailedPrecondition, match="nothing is replaced while something is wrong"):
        roll_of(service, []).run()
    assert service.asked == []


def test_a_problem_of_the_past_may_be_accepted_and_a_missing_expert_may_not() -> None:
    class Lacking(FakeService):
        def placement(self) -> pb.GetPlacementResponse:
            seen = super().placement()
            seen.missing.append(3)
            return seen

    problem = "the journal's last record was torn and was dropped"
    service = FakeService(problems=[problem])
    roll = roll_of(service, [], accept_problems=True)
    roll.run([PartGroup.CONTROLLER])
    assert roll.replaced == ["controller"]
    lacking = Lacking()
    with pytest.raises(FailedPrecondition, match="while 1 experts are missing; wait until"):
        roll_of(lacking, [], accept_problems=True).run()
    assert lacking.asked == []


def test_a_controller_that_is_away_for_a_moment_is_asked_again() -> None:
    class Flaky(FakeService):
        refusals = 3

        def replace_router(
            self, router: str, incarnation: int, accept_gap: bool
        ) -> pb.ReplaceRouterResponse:
            if self.refusals:
                self.refusals -= 1
                raise Unavailable("the controller is starting; ask again")
            return super().replace_router(router, incarnation, accept_gap)

    service = Flaky()
    roll = roll_of(service, [])
    roll.run([PartGroup.ROUTERS])
    assert roll.replaced == ["router-0", "router-1"]


def test_a_service_that_does_not_answer_at_all_is_told_at_once() -> None:
    service = FakeService(deaf_until_s=1e9)
    with pytest.raises(CannotReach):
        roll_of(service, []).run()
    assert service.now_s == 0.0


def test_a_share_that_went_elsewhere_is_not_waited_for_for_ever() -> None:
    class Poorer(FakeService):
        def placement(self) -> pb.GetPlacementResponse:
            seen = super().placement()
            for rank in seen.ranks:
                if rank.incarnation > 100:
                    del rank.slots[1:]
            return seen

    service, lines = Poorer(), list[str]()
    roll_of(service, lines).run([PartGroup.RANKS])
    assert "rank 0 is back and holds 1 experts; it held 2" in lines
