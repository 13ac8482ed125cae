"""Who is left alone for a while: shards that fail, and stragglers; and how they come back."""

import pytest

from placement.roles.rank_ejection import EjectionRules, Ejections

RULES = EjectionRules(faults=3, eject_s=30.0, eject_max_s=70.0, share=0.1)


def a_judge(
    num_ranks: int = 4, rules: EjectionRules = RULES, slowness: tuple[float, ...] = ()
) -> Ejections:
    judge = Ejections(rules, slowness)
    judge.follow(dict.fromkeys(range(num_ranks), 1))
    return judge


def fail(judge: Ejections, rank: int, times: int, at_s: float) -> None:
    for _ in range(times):
        judge.fault(rank, at_s)


def run(
    judge: Ejections,
    takes_s: dict[int, float],
    *,
    from_s: float = 0.0,
    for_s: float = 5.0,
    work: dict[int, float] | None = None,
) -> None:
    """Ten sub-calls a second of each rank."""
    for tick in range(int(for_s * 10)):
        at_s = from_s + tick / 10
        for rank, took_s in takes_s.items():
            judge.served(rank, took_s, (work or {}).get(rank, 10.0), at_s)


# ------------------------------------------------------------------------------- faults


def test_only_faults_in_a_row_eject() -> None:
    judge = a_judge()
    fail(judge, 1, 2, 0.0)
    judge.served(1, 0.01, 1.0, 0.0)
    fail(judge, 1, 2, 0.0)
    assert judge.out(0.0) == frozenset()
    fail(judge, 1, 1, 0.0)
    assert judge.out(0.0) == {1}
    assert "failures in a row" in judge.why(1)
    assert judge.count == 1


def test_each_time_is_longer_up_to_the_most_and_a_long_good_time_forgets() -> None:
    judge = a_judge()
    fail(judge, 1, 3, 0.0)
    assert judge.out(29.9) == {1}
    assert judge.out(30.0) == frozenset()
    fail(judge, 1, 1, 30.0)
    assert judge.out(89.9) == {1}, "on probation the first fault is one too many; 2 x 30 s"
    fail(judge, 1, 1, 90.0)
    assert judge.out(159.9) == {1}, "3 x 30 s is above 70 s"
    assert judge.out(160.0) == frozenset()
    judge.served(1, 0.01, 1.0, 161.0)
    fail(judge, 1, 3, 240.0)
    assert judge.out(269.9) == {1}
    assert judge.out(270.0) == frozenset()


def test_a_served_call_ends_probation() -> None:
    judge = a_judge()
    fail(judge, 1, 3, 0.0)
    assert judge.out(31.0) == frozenset()
    judge.served(1, 0.01, 1.0, 31.0)
    fail(judge, 1, 2, 31.0)
    assert judge.out(31.0) == frozenset()


@pytest.mark.parametrize(("num_ranks", "most"), [(1, 1), (4, 1), (19, 1), (20, 2), (64, 6)])
def test_a_tenth_of_the_shards_at_most_but_one_always(num_ranks: int, most: int) -> None:
    judge = a_judge(num_ranks)
    for rank in range(num_ranks):
        fail(judge, rank, 5, 0.0)
    assert judge.out(1.0) == frozenset(range(most))
    # Who was spared is ejected by its next fault once there is room.
    if num_ranks > most:
        assert judge.out(30.5) == frozenset()
        fail(judge, most, 1, 30.5)
        assert most in judge.out(30.5)


def test_a_new_life_has_no_past() -> None:
    judge = a_judge()
    fail(judge, 1, 3, 0.0)
    judge.follow({1: 2, 2: 1})
    assert judge.out(1.0) == frozenset()
    fail(judge, 1, 2, 1.0)
    assert judge.out(1.0) == frozenset()


# ------------------------------------------------------------------------------- the way back


def test_trials_bring_a_healed_shard_back_early() -> None:
    judge = a_judge()
    fail(judge, 1, 3, 0.0)
    assert judge.out(2.9, trial=True) == {1}
    for turn, at_s in enumerate((3.0, 6.0, 9.0)):
        assert judge.out(at_s, trial=True) == frozenset()
        assert judge.out(at_s + 0.1, trial=True) == {1}, "one batch a trial"
        judge.served(1, 0.01, 1.0, at_s + 0.2)
        assert judge.out(at_s + 0.3) == ({1} if turn < 2 else frozenset())
    fail(judge, 1, 2, 10.0)
    assert judge.out(10.0) == frozenset(), "it is back in full"


def test_a_failed_trial_starts_the_count_anew() -> None:
    judge = a_judge()
    fail(judge, 1, 3, 0.0)
    for at_s in (3.0, 6.0):
        judge.served(1, 0.01, 1.0, at_s)
    judge.fault(1, 9.0)
    for at_s in (12.0, 15.0):
        judge.served(1, 0.01, 1.0, at_s)
    assert judge.out(16.0) == {1}
    judge.served(1, 0.01, 1.0, 18.0)
    assert judge.out(18.0) == frozenset()


# ------------------------------------------------------------------------------- stragglers


def test_a_straggler_is_ejected_in_seconds_and_comes_back_healed() -> None:
    judge = a_judge()
    run(judge, {0: 0.01, 1: 0.1, 2: 0.012, 3: 0.009}, for_s=3.0)
    assert judge.out(3.0) == {1}
    assert "slower" in judge.why(1)
    # Still slow: no number of answers is good enough.
    run(judge, {0: 0.01, 1: 0.1, 2: 0.012, 3: 0.009}, from_s=3.0, for_s=10.0)
    assert judge.out(13.0) == {1}
    for at_s in (15.0, 18.0, 21.0):
        assert judge.out(at_s, trial=True) == frozenset()
        judge.served(1, 0.011, 10.0, at_s)
    assert judge.out(21.0) == frozenset()


def test_a_straggler_whose_answers_nobody_waited_for_is_found_too() -> None:
    judge = a_judge()
    for tick in range(30):
        for rank in (0, 2, 3):
            judge.served(rank, 0.01, 10.0, tick / 10)
        judge.unanswered(1, 0.2, 10.0, tick / 10)
    assert judge.out(3.0) == {1}
    judge.served(1, 0.01, 10.0, 4.0)
    judge.served(1, 0.01, 10.0, 5.0)
    judge.unanswered(1, 0.2, 10.0, 6.0)
    judge.served(1, 0.01, 10.0, 7.0)
    assert judge.out(7.0) == {1}


@pytest.mark.parametrize(
    "takes_s",
    [
        pytest.param({0: 0.01, 1: 0.04, 2: 0.01, 3: 0.01}, id="four times"),
        pytest.param({0: 0.001, 1: 0.015, 2: 0.001, 3: 0.001}, id="too little to matter"),
        pytest.param({0: 0.5, 1: 0.5, 2: 0.5, 3: 0.5}, id="all alike"),
        pytest.param({1: 0.5}, id="nobody to compare with"),
    ],
)
def test_who_is_not_far_slower_than_the_others_stays(takes_s: dict[int, float]) -> None:
    judge = a_judge()
    run(judge, takes_s)
    assert judge.out(5.0) == frozenset()


def test_of_two_shards_the_slow_one_is_known_by_the_other() -> None:
    judge = a_judge(2)
    run(judge, {0: 0.01, 1: 0.1})
    assert judge.out(5.0) == {1}


def test_of_two_stragglers_the_slower_one_goes() -> None:
    judge = a_judge(6)
    run(judge, {0: 0.01, 1: 0.1, 2: 0.01, 3: 0.01, 4: 0.3, 5: 0.01})
    assert judge.out(5.0) == {4}


def test_more_work_a_call_and_a_device_declared_slow_are_allowed_for() -> None:
    takes_s = {0: 0.01, 1: 0.08, 2: 0.01, 3: 0.01}
    judge = a_judge()
    run(judge, takes_s, work={1: 80.0})
    assert judge.out(5.0) == frozenset()
    judge = a_judge(slowness=(1.0, 8.0, 1.0, 1.0))
    run(judge, takes_s)
    assert judge.out(5.0) == frozenset()
    run(judge, takes_s | {1: 0.8}, from_s=5.0)
    assert judge.out(10.0) == {1}


def test_a_rank_that_was_added_later_may_be_of_the_slowest_device() -> None:
    judge = a_judge(num_ranks=5, slowness=(1.0, 8.0, 1.0, 1.0))
    run(judge, {0: 0.01, 1: 0.08, 2: 0.01, 3: 0.01, 4: 0.08})
    assert judge.out(5.0) == frozenset()
    run(judge, {0: 0.01, 1: 0.08, 2: 0.01, 3: 0.01, 4: 0.8}, from_s=5.0)
    assert judge.out(10.0) == {4}


def test_a_few_slow_answers_among_many_are_no_straggler() -> None:
    judge = a_judge()
    for tick in range(100):
        for rank in range(4):
            slow = rank == 1 and tick % 3 == 0
            judge.served(rank, 0.2 if slow else 0.01, 10.0, tick / 10)
    assert judge.out(10.0) == frozenset()
