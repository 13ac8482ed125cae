"""The checkers can fail: for each promise, facts that break it, and facts that come close."""

import pytest

from placement.messages import history as h
from placement.messages.history import Recorder, from_lines, to_line
from placement.sim.checks import (
    Coverage,
    ExactlyOnce,
    Fence,
    InvariantBroken,
    Isolation,
    JournalFirst,
    LoadOnce,
    Memory,
    Progress,
    ReleaseLast,
    TableOrder,
    Termination,
    check_facts,
    check_replay,
)
from placement.sim.world import World

BOSS = "controller/1"
FULL = ((0, 0, 0, 1), (1, 1, 0, 1))
LIVES = ((0, 7), (1, 7))


class Story(Recorder):
    """Facts, told shortly."""

    def tell(self, kind_of, who=BOSS, at_s=0.0, /, **fields):
        self.note(kind_of, who, at_s, **fields)
        return self

    def table(self, epoch, listed=FULL, *, term=1, at_s=0.0, who=BOSS):
        return self.tell(
            h.TablePublished,
            who,
            at_s,
            term=term,
            epoch=epoch,
            num_keys=2,
            listed=tuple(listed),
            lives=LIVES,
        )

    def proved(self, listed=FULL, **fields):
        for key, rank, slot, tag in listed:
            given = {
                "rank": rank,
                "slot": slot,
                "slot_tag": tag,
                "key": key,
                "version": "v1",
                "held_key": key,
                "held_version": "v1",
                "intact": True,
            }
            self.tell(h.SlotProved, f"rank{rank}/7", **(given | fields))
        return self

    def freed(self, *, rank=0, slot=0, tag=1, readers=0, at_s=0.0):
        return self.tell(
            h.SlotFreed,
            f"rank{rank}/7",
            at_s,
            rank=rank,
            slot=slot,
            slot_tag=tag,
            readers=readers,
        )

    def began(self, who=BOSS, place="controller", *, term=1, at_s=0.0):
        return self.tell(h.Began, who, at_s, term=term, place=place)

    def told(self, applied, quiesced, *, at_s=0.0, router="router0", term=1, heard=True):
        self.tell(
            h.RouterTold,
            f"{router}/1",
            at_s,
            term=term,
            router=router,
            applied=applied,
            quiesced=quiesced,
        )
        return self.tell(h.RouterHeard, BOSS, at_s, term=1, life=f"{router}/1") if heard else self

    def release(self, at_s):
        return self.sent("ReleaseSlot", at_s=at_s)

    def sent(self, command, *, step_id=9, at_s=0.0, who=BOSS):
        return self.tell(
            h.CommandSent,
            who,
            at_s,
            term=1,
            command=command,
            step_id=step_id,
            rank=0,
            incarnation=7,
            slot=0,
            slot_tag=1,
        )

    def written(self, before, after, *, kind="add", step_id=9, at_s=0.0, who=BOSS):
        return self.tell(
            h.StateWritten,
            who,
            at_s,
            plan_id="p",
            step_id=step_id,
            kind=kind,
            rank=0,
            slot=0,
            slot_tag=1,
            key=0,
            before=before,
            after=after,
        )

    def plan(self, *, wait_s=1.0, at_s=0.0):
        return self.tell(h.PlanStarted, BOSS, at_s, plan_id="p", cause="auto", drain_wait_s=wait_s)

    def served(self, *, key=0, held_key=0, row=(0,), k=(0,), sub_id=5, request=1, **fields):
        count = len(row)
        given = {
            "rank": 0,
            "sub_id": sub_id,
            "request": request,
            "cause": 0,
            "row": row,
            "k": k,
            "slot": (0,) * count,
            "slot_tag": (1,) * count,
            "key": (key,) * count,
            "held_key": (held_key,) * count,
            "held_version": "v1",
            "intact": True,
        }
        return self.tell(h.RowsServed, "rank0/7", **(given | fields))

    def opened(self, *, pairs=(0, 1), request=1, deadline_at_s=1.0, at_s=0.0, **fields):
        given = {
            "request": request,
            "deadline_at_s": deadline_at_s,
            "pairs": pairs,
            "keys": (0,) * len(pairs),
            "top_k": 2,
            "counts": True,
            "sound": True,
        }
        return self.tell(h.RequestOpened, "router0/1", at_s, **(given | fields))

    def ended(self, outcome="ok", *, request=1, at_s=0.0, **fields):
        given = {"request": request, "outcome": outcome, "detail": ""}
        return self.tell(h.RequestEnded, "router0/1", at_s, **(given | fields))

    def installed(self, epoch, *, term=1):
        return self.tell(h.TableInstalled, "router0/1", term=term, epoch=epoch)

    def window(self, pairs, *, term=1, at_s=0.0, who=BOSS):
        demand = ((0, pairs),)
        return self.tell(h.WindowFolded, who, at_s, term=term, index=0, demand=demand, executed=0)

    def memory(self, resident, reserved, held, budget):
        return self.tell(
            h.MemoryUsed,
            "rank0/7",
            rank=0,
            resident_bytes=resident,
            reserved_bytes=reserved,
            held_bytes=held,
            budget_bytes=budget,
        )

    def fault(self, at_s):
        return self.tell(h.FaultBegan, "nemesis", at_s, kind="loss", target="")

    def mended(self, at_s):
        return self.tell(h.FaultEnded, "nemesis", at_s, kind="loss", target="")

    def holds(self, permits):
        return self.tell(
            h.RouterHolds,
            "router0/1",
            permits=permits,
            rows=0,
            waiting=0,
            calls=0,
            sub_calls=0,
        )


def story():
    return Story()


def release_last(silence_s=5.0):
    return ReleaseLast(silence_s=silence_s, drain_wait_s=1.0)


NO_TABLE = {"applied": 0, "quiesced": 0, "term": -1}
"""What a router tells before it has its first table."""


def unlisted(*, told=None, **fields):
    """Key 0 leaves the table at 1 s, by a plan whose removals wait 1 s; a router told this."""
    tale = story().began().plan().table(1).table(2, FULL[1:], at_s=1.0)
    told = fields or dict(zip(("applied", "quiesced"), told, strict=True))
    return tale.written("planned", "unlisted", kind="remove").told(**told, at_s=1.0)


BROKEN = [
    # I1
    (TableOrder, story().table(2).table(2), "I1.*epoch 2 after 2"),
    (TableOrder, story().table(2).installed(2).installed(1), "I1.*nobody published"),
    (TableOrder, story().table(1).table(2).installed(2).installed(1), "I1.*went from"),
    (
        TableOrder,
        story().table(5).installed(5).began(term=2).table(5, term=2),
        "I1.*epoch 5 after 5",
    ),
    # I2
    (Coverage, story().began().table(1), "I2.*does not hold it"),
    (Coverage, story().proved(intact=False), "I2.*intact: False"),
    (Coverage, story().proved(held_key=9), "I2.*holds key 9"),
    (Coverage, story().proved().freed().table(1), "I2.*does not hold it"),
    (Coverage, story().proved().table(1, FULL[:1]), "I2: the first table lists 1 of 2"),
    (Coverage, story().proved().table(1).table(2, FULL[1:]), "I2: key 0 left"),
    (
        Coverage,
        story().proved().proved(((0, 0, 1, 2),)).table(1, [*FULL, (0, 0, 1, 2)]),
        "I2.*twice on a rank",
    ),
    # I3
    (
        Fence,
        story()
        .tell(h.CommandTaken, "rank0/7", term=2, command="ReserveSlot", step_id=1)
        .tell(h.CommandTaken, "rank0/7", term=1, command="ReserveSlot", step_id=1),
        "I3.*of term 1 after term 2",
    ),
    (Fence, story().served(), "I3.*computed key 0"),
    (Fence, story().proved().freed().served(), "I3.*computed key 0"),
    (Fence, story().proved().served(held_key=1), "I3.*in memory key 1"),
    (Fence, story().proved().served(intact=False), "I3.*damaged"),
    # I4, I5, I13
    (ExactlyOnce, story().ended(), "I4.*never began"),
    (ExactlyOnce, story().opened().served(k=(0,)).ended(added=((5, (0,)),)), "I4.*lost pairs"),
    (
        ExactlyOnce,
        story()
        .opened()
        .served(row=(0, 0), k=(0, 1))
        .served(row=(0,), k=(0,), sub_id=6)
        .ended(added=((5, (0,)), (6, (0,)))),
        "I4.*too often",
    ),
    (ExactlyOnce, story().opened().ended(added=((5, (0,)),)), "I4.*no shard computed"),
    (
        ExactlyOnce,
        story().opened().served().ended("unavailable", added=((5, (0,)),)),
        "I4.*yet returns a sum",
    ),
    (
        ExactlyOnce,
        story()
        .opened(pairs=(0, 2))
        .served()
        .served(row=(1,), sub_id=6, held_version="v2")
        .ended(added=((5, (0,)), (6, (1,)))),
        "I5.*mixes versions",
    ),
    (
        ExactlyOnce,
        story().opened(pairs=(0,)).served().ended(added=((5, (0,)),), wrong_rows=1),
        "I13.*1 wrong rows",
    ),
    # I6
    (Memory, story().memory(9, 2, 9, 10), "I6.*11 bytes in its books"),
    (Memory, story().memory(1, 0, 11, 10), "I6.*holds 11"),
    (Memory, story().memory(1, 1, 3, 10), "I6.*its books say 2"),
    (Memory, story().freed().freed(), "I6.*freed twice"),
    # I7
    (release_last, story().table(1).freed(), "I7.*listed"),
    (release_last, story().freed(readers=1), "I7.*while 1 read it"),
    (
        release_last,
        unlisted(told=(1, 1)).release(at_s=2.9),
        "I7.*1.900 s after epoch 2.*router0",
    ),
    (
        release_last,
        unlisted(told=(2, 1)).release(at_s=1.9),
        "I7.*0.900 s after epoch 2",
    ),
    (release_last, story().table(1).release(at_s=0.0), "I7.*listed"),
    (
        lambda: release_last(silence_s=0.5),
        unlisted(told=(1, 1)).told(2, 1, at_s=1.4).release(at_s=1.6),
        "I7.*0.600 s after epoch 2.*router0",
    ),
    (
        release_last,
        unlisted(**NO_TABLE).installed(1).release(at_s=1.1),
        "I7.*0.100 s after epoch 2.*router0",
    ),
    # another controller's epochs say nothing of this one's tables
    (
        release_last,
        unlisted(told=(1, 1)).told(9, 9, term=0, at_s=1.0).release(at_s=1.1),
        "I7.*0.100 s after epoch 2",
    ),
    (
        release_last,
        unlisted(told=(1, 1)).tell(h.WaitsShortened, BOSS, 1.5, wait_s=0.2).release(at_s=1.6),
        "I7.*0.600 s after epoch 2",
    ),
    # I8
    (JournalFirst, story().sent("ReserveSlot"), "I8: ReserveSlot.*before reserved"),
    (
        JournalFirst,
        story().written("planned", "reserved").sent("CopyExpert"),
        "I8: CopyExpert.*before copying",
    ),
    (
        JournalFirst,
        story().written("planned", "reserved").written("copying", "verified"),
        "I8: step 9 goes on from copying, but was left reserved",
    ),
    (
        JournalFirst,
        story().written("planned", "reserved").tell(h.Recovered, "controller/2", journal=True),
        "I8: step 9 was reserved.*nothing of it",
    ),
    (
        JournalFirst,
        story().written("planned", "reserved").table(1),
        "I8: epoch 1 lists rank 0 slot 0, whose step 9 is reserved",
    ),
    # I9
    (LoadOnce, story().window(1), "I9.*to 1 pairs, at most 0"),
    (
        LoadOnce,
        story().opened(counts=False).tell(h.RequestBegun, "router0/1", request=1).window(2),
        "I9.*at most 0",
    ),
    (
        LoadOnce,
        story().opened().tell(h.RequestBegun, "router0/1", request=1).window(1),
        "I9: 2 pairs of key 0 were accepted, windows say 1",
    ),
    # I10
    (Termination, story().opened().ended(at_s=1.06), "I10.*its deadline was 1.000"),
    (Termination, story().opened().ended().ended(), "I10.*without life"),
    (Termination, story().opened(), "I10: requests never ended"),
    (Termination, story().holds(1), "I10.*at rest holds"),
    # I11
    (Isolation, story().opened(sound=False).served(), "I11.*bad request 1"),
    (Isolation, story().opened(sound=False).ended("ok"), "I11: request 1, bad: True"),
    (Isolation, story().opened().ended("invalid_argument"), "I11: request 1, bad: False"),
    (Isolation, story().began().began(), "I11.*began twice"),
    (Isolation, story().tell(h.Died, "rank0/7", cause="a bad request"), "I11.*a bad request"),
    # I12
    (
        lambda: Progress(window_s=1.0),
        story().began().plan().window(0, at_s=1.0).window(0, at_s=2.0).window(0, at_s=3.0),
        "I12: plan p .* has not moved for 3.000 s",
    ),
    (
        lambda: Progress(window_s=1.0),
        story().began().window(0, at_s=2.5),
        "I12.*closed no window for 2.5",
    ),
]

FINE = [
    (TableOrder, story().table(1).table(2).installed(1).installed(2)),
    (TableOrder, story().table(5).began(term=2).table(6, term=2).installed(5)),
    (
        TableOrder,
        story()
        .table(5)
        .installed(5)
        .tell(h.Died, "router0/1", cause="fault")
        .began(term=2)
        .table(4, term=2),
    ),
    (
        TableOrder,
        story().began(term=2).table(5).table(4, term=2).installed(5).installed(4, term=2),
    ),
    # a table of a controller that was replaced counts for nothing
    (Coverage, story().began(term=2).table(1, term=1)),
    (
        Coverage,
        story().proved().table(1).tell(h.Died, "rank0/7", cause="fault").table(2, FULL[1:]),
    ),
    (
        Coverage,
        story().proved().table(1).tell(h.RankGivenUp, rank=0, incarnation=7).table(2, FULL[1:]),
    ),
    (Coverage, story().proved().table(1).freed().table(2, FULL[1:])),
    (Fence, story().proved().served()),
    (
        ExactlyOnce,
        story().opened().served(row=(0, 0), k=(0, 1)).served(sub_id=6).ended(added=((5, (0,)),)),
    ),
    (ExactlyOnce, story().opened().served().ended("unavailable")),
    (Memory, story().memory(8, 2, 10, 10).freed()),
    (release_last, unlisted(told=(1, 1)).release(at_s=3.0).freed(at_s=3.0)),
    (release_last, unlisted(told=(2, 2)).release(at_s=1.1).freed(at_s=1.1)),
    (lambda: release_last(silence_s=0.5), unlisted(told=(1, 1)).release(at_s=1.6)),
    # it tells what it uses, but its words are lost: the controller hears nothing and waits no more
    (
        lambda: release_last(silence_s=0.5),
        unlisted(told=(1, 1)).told(2, 1, at_s=1.5, heard=False).release(at_s=1.6),
    ),
    (release_last, unlisted(told=(1, 1)).installed(2).release(at_s=2.1)),
    # a router that has no table yet uses nothing, also once it has one without the replica
    (release_last, unlisted(**NO_TABLE).release(at_s=1.1)),
    (release_last, unlisted(**NO_TABLE).installed(2).release(at_s=1.1)),
    (
        release_last,
        unlisted(told=(1, 1)).tell(h.WaitsShortened, BOSS, 1.5, wait_s=0.2).release(at_s=1.7),
    ),
    (
        release_last,
        unlisted(told=(1, 1)).tell(h.Died, "router0/1", cause="fault").release(at_s=1.1),
    ),
    # one that was replaced is refused by the shard
    (
        release_last,
        story().began(term=2).table(1, term=2).release(at_s=0.0).table(2, term=1),
    ),
    (JournalFirst, story().written("planned", "reserved").sent("ReserveSlot")),
    (JournalFirst, story().sent("SetRankSlots").table(1)),
    (
        JournalFirst,
        story()
        .written("planned", "reserved")
        .tell(h.Recovered, "controller/2", journal=True, open_steps=((9, "reserved"),))
        .tell(h.Recovered, "controller/3", journal=False),
    ),
    (
        JournalFirst,
        story()
        .written("verified", "listed")
        .table(1)
        .tell(h.Recovered, "controller/2", journal=True),
    ),
    (LoadOnce, story().opened().tell(h.RequestBegun, "router0/1", request=1).window(2)),
    (LoadOnce, story().began(term=2).window(9, term=1)),
    (
        LoadOnce,
        story()
        .opened()
        .tell(h.RequestBegun, "router0/1", request=1)
        .tell(h.DemandUnsure, lost=((0, 2),), twice=((0, 1),))
        .window(3),
    ),
    (Termination, story().opened().ended(at_s=1.04).holds(0)),
    (Termination, story().opened().tell(h.Died, "router0/1", cause="fault")),
    (
        Termination,
        story()
        .opened()
        .tell(h.Paused, "router0/1", 0.5)
        .tell(h.Resumed, "router0/1", 3.0)
        .ended(at_s=3.01),
    ),
    (Isolation, story().began().tell(h.Died, BOSS, cause="fenced").opened(sound=False)),
    (
        lambda: Progress(window_s=1.0),
        story()
        .began()
        .plan()
        .window(0, at_s=2.0)
        .tell(h.StallReported, BOSS, 2.0, why="plan_running")
        .window(0, at_s=4.0)
        .tell(h.PlanEnded, BOSS, 4.0, plan_id="p", outcome="ended", why="")
        .window(0, at_s=6.0),
    ),
    (
        lambda: Progress(window_s=1.0),
        story().began().plan().fault(0.5).window(0, at_s=9.0).mended(9.5).window(0, at_s=10.0),
    ),
    # another controller's plans and windows count for nothing
    (
        lambda: Progress(window_s=1.0),
        story()
        .began("controller/2")
        .plan()
        .written("planned", "reserved")
        .tell(h.PlanEnded, plan_id="p", outcome="ended", why="")
        .window(0, at_s=9.0),
    ),
]


@pytest.mark.parametrize(("make", "tale", "broken"), BROKEN)
def test_a_broken_promise_is_seen(make, tale, broken):
    with pytest.raises(InvariantBroken, match=broken):
        check_facts(tale.facts, [make()])


@pytest.mark.parametrize(("make", "tale"), FINE)
def test_a_kept_promise_is_let_pass(make, tale):
    check_facts(tale.facts, [make()])


def test_facts_that_end_in_the_middle_are_not_judged_by_their_end():
    check_facts(story().opened().facts, [Termination()], at_rest=False)


def test_the_replay_checker_sees_another_effect():
    world = World(1, faults=0)
    world.stage.clock.run_until(3.0)
    (controller,) = world.fleet.controllers
    inputs = list(controller.inputs)
    check_replay(controller.started_from, inputs)
    event, effects = inputs[0]
    inputs[0] = event, type(effects)()
    with pytest.raises(InvariantBroken, match="I8: event 0"):
        check_replay(controller.started_from, inputs)


def test_facts_become_lines_of_json_and_come_back_in_order():
    tale = story().proved().table(1).served().opened(at_s=-1.0)
    lines = [to_line(fact) for fact in tale.facts]
    assert all(b"\n" not in line for line in lines)
    assert b'"event":"TablePublished"' in lines[2]
    back = from_lines([*reversed(lines), b"\n"])
    assert back == sorted(tale.facts, key=lambda fact: (fact.at_s, fact.who, fact.seq))
    check_facts(back, [ExactlyOnce(), Memory()], at_rest=False)
