"""Each cause alone, every two of them, none; and none by noise, whatever the scale of seconds."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_serve.explain import Evidence, explain
from moe_serve.explain.cause import Kind
from moe_serve.explain.words import next_step, sentence
from moe_serve.stage_counts import StageCounts
from tests.explain_world import EXPERTS, LAYERS, RANKS, World

PLANTED: dict[str, dict[str, Any]] = {
    "hot_expert": {"hot": {(0, 3): 8.0, (1, 2): 8.0}},
    "slow_rank": {"slow": {3: 3.0}},
    "copy": {"copies": {6: [(0, 2)], 7: [(0, 2)]}, "copying": 3.0},
    "overload": {"queue_s": 20e-3, "waiting": 40},
    "cold_start": {"cold": {5: [3], 6: [3], 7: [3]}, "cold_other_s": 20e-3},
}
"""Cause -> how a world has it, each the only one. Memory comes with what it slows."""


def kinds(evidence: Evidence) -> list[str]:
    found = explain(evidence)
    assert found.verdict == ("slow" if found.causes else "nothing_slow")
    shares = [cause.share for cause in found.causes]
    assert shares == sorted(shares, reverse=True)
    assert all(0.2 <= share <= 1.0 for share in shares)
    for cause in found.causes:
        assert sentence(cause)
        assert next_step(cause)
    return sorted(cause.kind.value for cause in found.causes)


def test_nothing_planted_is_nothing_slow() -> None:
    assert kinds(World().evidence()) == []


def test_requests_that_took_no_time_are_not_slow() -> None:
    evidence = World(copies={7: [(0, 2)]}, cold={5: [3]}).evidence()

    def timeless(stages: StageCounts) -> StageCounts:
        names = ("seconds", "late_s", "wire_s", "wait_s", "compute_s")
        return replace(stages, **{name: 0.0 * getattr(stages, name) for name in names})

    slices = tuple(replace(one, stages=timeless(one.stages)) for one in evidence.slices)
    assert kinds(replace(evidence, slices=slices)) == []


def test_no_request_is_idle() -> None:
    found = explain(World(calls=0, open_requests=0).evidence())
    assert (found.verdict, found.causes) == ("idle", ())


@pytest.mark.parametrize("cause", ["hot_expert", "slow_rank", "copy", "overload", "cold_start"])
def test_each_cause_alone_is_named_alone(cause: str) -> None:
    assert kinds(World(**PLANTED[cause]).evidence()) == [cause]


@pytest.mark.parametrize(
    "two", list(combinations(["hot_expert", "slow_rank", "copy", "overload", "cold_start"], 2))
)
def test_two_causes_are_both_named(two: tuple[str, str]) -> None:
    planted = PLANTED[two[0]] | PLANTED[two[1]]
    assert kinds(World(**planted).evidence()) == sorted(two)


# ------------------------------------------------------------------------------- where and what


def only(world: World) -> Any:
    (cause,) = explain(world.evidence()).causes
    return cause


def test_a_hot_expert_is_named_with_its_place_and_replicas() -> None:
    cause = only(World(hot={(1, 6): 9.0}))
    assert (cause.kind, cause.layer, cause.expert, cause.rank) == (Kind.HOT_EXPERT, 1, 6, 3)
    assert cause.evidence["replicas"] == 1.0
    assert cause.evidence["times_even_share"] > 2.0
    assert "expert 6 of layer 1 is hot" in sentence(cause)


def test_an_expert_on_two_full_ranks_is_hot_still() -> None:
    world = World(hot={(0, 6): 16.0, (1, 6): 16.0}, replicas={6: (2, 3)})
    # Two ranks come last in turn, so each comes little later than the last but one.
    assert kinds(world.evidence()) == ["hot_expert"]


def test_load_that_no_single_expert_makes_uneven_is_imbalance() -> None:
    world = World(weights=[1.0] * (EXPERTS - 2) + [4.0, 4.0])
    cause = only(world)
    assert (cause.kind, cause.rank, cause.expert) == (Kind.IMBALANCE, 3, -1)


def test_a_hot_expert_that_costs_nothing_is_not_named() -> None:
    """Counts are skewed, clocks are not: a batch costs the same whatever is in it."""
    skewed, even = World(hot={(0, 3): 8.0, (1, 3): 8.0}).evidence(), World().evidence()
    slices = tuple(
        replace(one, stages=other.stages)
        for one, other in zip(skewed.slices, even.slices, strict=True)
    )
    assert kinds(replace(skewed, slices=slices)) == []


def test_a_slow_rank_is_named_by_number() -> None:
    cause = only(World(slow={1: 4.0}))
    assert (cause.kind, cause.rank) == (Kind.SLOW_RANK, 1)
    assert 3.0 < cause.evidence["times_slower"] < 5.0
    found = explain(World(slow={1: 4.0}).evidence())
    assert found.ranks[1].slowness > 3.0
    assert found.ranks[0].slowness < 1.2


def test_a_whole_machine_that_is_slow_is_no_slow_rank() -> None:
    assert kinds(World(machine=50.0).evidence()) == []


def test_a_rank_of_few_sub_calls_is_not_judged() -> None:
    assert kinds(World(calls=2, slices=4, slow={2: 5.0}).evidence()) == []


def test_a_rank_with_less_to_do_is_not_slow_for_what_each_batch_costs() -> None:
    """Little load makes a pair dearer; a hot rank's large batches make it cheaper."""
    world = World(weights=[3.0] * 6 + [0.25, 0.25])
    assert "slow_rank" not in kinds(world.evidence())


def test_a_rank_that_reads_more_experts_has_more_to_do_and_is_not_slow() -> None:
    """Memory-bound: five experts of four pairs cost five readings, one of twenty pairs one."""
    world = World(
        weights=[5.0] * 3 + [1.0] * 5,
        replicas={expert: (min(expert, 3),) for expert in range(EXPERTS)},
        read_s=0.02,
        slow={3: 5.0},
    )
    assert kinds(world.evidence()) == ["imbalance"]


def test_a_copy_while_everything_gets_slower_is_not_named() -> None:
    before, after = World(), World(machine=2.5, copies={6: [(0, 2)], 7: [(0, 2)]})
    slices = (*before.evidence().slices[:6], *after.evidence().slices[6:])
    assert kinds(replace(before.evidence(), slices=slices)) == []


def test_a_slow_rank_with_a_little_more_to_do_is_only_slow() -> None:
    assert kinds(World(slow={3: 3.0}, hot={(0, 6): 1.4, (1, 6): 1.4}).evidence()) == ["slow_rank"]


def test_few_pairs_scatter_and_are_no_skew() -> None:
    evidence = World(slow={3: 3.0}).evidence()
    few = np.array([[2, 2], [2, 2], [2, 2], [6, 6]])
    drawn = np.array([[1, 1, 1, 1, 1, 1, 3, 3]] * LAYERS)
    slices = [replace(s, rank_pairs=few * 0, expert_pairs=drawn * 0) for s in evidence.slices[1:]]
    slices.insert(0, replace(evidence.slices[0], rank_pairs=few, expert_pairs=drawn))
    assert kinds(replace(evidence, slices=tuple(slices))) == ["slow_rank"]


def test_a_slow_rank_that_copies_all_the_time_is_a_copy() -> None:
    copies = {n: [(-1, 2)] for n in range(8)}
    assert kinds(World(copies=copies, copying=3.0).evidence()) == ["copy"]


def test_a_rank_slow_with_and_without_a_copy_is_slow() -> None:
    copies = {7: [(-1, 2)]}
    assert kinds(World(copies=copies, slow={2: 3.0}).evidence()) == ["slow_rank"]


def test_a_copy_that_slows_nobody_is_not_named() -> None:
    assert kinds(World(copies={6: [(0, 2)], 7: [(0, 2)]}).evidence()) == []


def test_a_copy_that_was_over_long_ago_is_weighed_in_the_whole_span() -> None:
    over = World(copies={0: [(0, 2)]}, copying=3.0)
    assert kinds(over.evidence()) == []
    assert kinds(replace(over, copies={7: [(0, 2)]}).evidence()) == ["copy"]


def test_copies_into_a_cold_rank_are_its_start() -> None:
    world = World(
        copies={5: [(-1, 3)], 6: [(-1, 3)], 7: [(-1, 3)]},
        copying=3.0,
        cold={5: [3], 6: [3], 7: [3]},
    )
    assert kinds(world.evidence()) == ["cold_start"]


def test_experts_without_a_replica_that_requests_wait_for_are_a_cold_start() -> None:
    world = World(cold={7: [3]}, missing_now=4, open_requests=400)
    cause = only(world)
    assert cause.kind is Kind.COLD_START
    assert "4 experts have no replica" in sentence(cause)


def test_what_others_hold_for_a_cold_rank_is_no_imbalance() -> None:
    empty = World(replicas={6: (0, 1), 7: (1, 2)})
    assert kinds(empty.evidence()) == ["imbalance"], "a rank that holds nothing for no reason"
    cold = replace(empty, cold={5: [3], 6: [3], 7: [3]})
    assert kinds(cold.evidence()) == []


def test_a_rank_that_does_not_answer_while_requests_wait_is_named() -> None:
    stuck = replace(World().evidence(), silent=frozenset({2}), open_requests=400)
    (cause,) = explain(stuck).causes
    assert (cause.kind, cause.rank) == (Kind.COLD_START, 2)
    assert "rank 2 does not answer" in sentence(cause)
    flowing = replace(stuck, open_requests=1)
    assert kinds(flowing) == [], "as many are open as always"


def test_a_hot_expert_while_all_ranks_are_young_is_only_hot() -> None:
    young = {n: list(range(RANKS)) for n in range(8)}
    hot = {(0, 1): 8.0, (1, 1): 8.0}
    assert "cold_start" not in kinds(World(hot=hot, cold=young).evidence())


def test_a_cold_rank_that_nobody_needs_is_not_named() -> None:
    assert kinds(World(cold={7: [3]}).evidence()) == []


def test_failed_requests_while_a_rank_is_away_are_a_cold_start() -> None:
    assert kinds(World(cold={7: [3]}, failed=100).evidence()) == ["cold_start"]


def test_requests_that_fail_as_often_while_no_rank_is_cold_are_no_cold_start() -> None:
    def failing(evidence: Evidence, each: int, **changes: Any) -> Evidence:
        slices = tuple(replace(s, failed=each, **changes) for s in evidence.slices)
        return replace(evidence, slices=slices)

    cold = World(cold={6: [3], 7: [3]}, open_requests=0).evidence()
    assert kinds(failing(cold, 60)) == []
    assert kinds(replace(failing(cold, 60), silent=frozenset({3}))) == ["cold_start"]
    assert kinds(failing(cold, 60, missing=1)) == ["cold_start"], "some have no replica"
    worse = replace(cold, slices=(*cold.slices[:6], *failing(cold, 90).slices[6:]))
    (cause,) = explain(worse).causes
    assert cause.evidence["requests_failed"] == 180.0
    always = World(cold={n: [3] for n in range(8)}).evidence()
    assert kinds(failing(always, 60)) == [], "nothing to compare with"


def test_the_rest_of_requests_counts_beside_what_it_is_without_a_cold_rank() -> None:
    young = World(cold={n: [3] for n in range(8)}, cold_other_s=20e-3)
    assert kinds(young.evidence()) == [], "a router that is always behind is not known to be else"
    assert kinds(replace(young, cold={n: [3] for n in range(1, 8)}).evidence()) == ["cold_start"]


def test_the_cold_rank_that_costs_most_is_named_and_rather_one_that_still_is() -> None:
    cold = {5: [1, 2, 3], 6: [1, 2, 3], 7: [1, 2, 3]}
    both = World(cold=cold, cold_other_s=20e-3, slow={2: 1.5})
    assert only(both).rank == 1, "none of them takes longer than others would"
    young = frozenset({1, 2})
    times = World(slow={2: 4.0}, cold={n: list(young) for n in range(8)})
    assert only(times).rank == 2
    over = times.evidence()
    newest = replace(over.slices[-1], cold=frozenset({1}))
    found = explain(replace(over, slices=(*over.slices[:-1], newest)))
    assert [c.rank for c in found.causes if c.kind is Kind.COLD_START] == [1]


def test_ranks_that_do_not_tell_all_of_their_waiting_are_not_faster_for_it() -> None:
    """Shards of a release before say nothing of a part of it, which is then on the way there."""

    def of_before(world: World, *ranks: int) -> Evidence:
        made = world.evidence()
        slices = []
        for one in made.slices:
            wait_s, wire_s = one.stages.wait_s.copy(), one.stages.wire_s.copy()
            wire_s[list(ranks)] += wait_s[list(ranks)]
            wait_s[list(ranks)] = 0.0
            slices.append(replace(one, stages=replace(one.stages, wait_s=wait_s, wire_s=wire_s)))
        return replace(made, slices=tuple(slices))

    young = World(wait_share=3.0, cold={n: [3] for n in range(8)})
    assert kinds(young.evidence()) == []
    assert kinds(of_before(young, 0, 1, 2)) == [], "rank 3 tells of it, and takes as long"
    slow = replace(young, slow={3: 4.0})
    assert kinds(of_before(slow, 0, 1, 2)) == kinds(slow.evidence()) == ["cold_start"]
    pressed = World(wait_share=3.0, memory_errors={3: 9})
    assert kinds(of_before(pressed, 0, 1, 2)) == []
    copied = World(wait_share=3.0, copies={n: [(-1, 3)] for n in range(8)})
    assert kinds(of_before(copied, 0, 1, 2)) == []


def test_the_only_rank_of_its_profile_is_told_from_its_profile() -> None:
    made = World(slow={1: 4.0}).evidence()
    other = replace(made.ranks[1], profile=msgspec.structs.replace(made.ranks[1].profile, name="o"))
    ranks = (made.ranks[0], other, *made.ranks[2:])
    (cause,) = explain(replace(made, ranks=ranks)).causes
    assert (cause.kind, cause.rank, cause.evidence["ranks_alike"]) == (Kind.SLOW_RANK, 1, 1.0)
    assert "as its profile says" in sentence(cause)
    assert "others of its profile" in sentence(only(World(slow={1: 4.0})))


def test_refused_requests_are_overload() -> None:
    assert kinds(World(refused=400).evidence()) == ["overload"]


def test_a_wait_at_every_busy_rank_is_overload_and_at_idle_ones_is_none() -> None:
    assert kinds(World(wait_share=1.0, busy=0.9).evidence()) == ["overload"]
    assert kinds(World(wait_share=1.0, busy=0.3).evidence()) == []


def test_skew_that_no_slot_can_take_is_memory_too() -> None:
    full = World(hot={(0, 3): 8.0, (1, 3): 8.0}, spare_slots=0)
    assert kinds(full.evidence()) == ["hot_expert", "memory"]
    refused = replace(full, spare_slots=8, wanted_memory=("rank 1 would end with 0 empty slots",))
    assert kinds(refused.evidence()) == ["hot_expert"], "there are slots, whatever one was refused"
    assert kinds(World(spare_slots=0).evidence()) == []


def test_a_rank_that_lacks_memory_for_batches_and_comes_last_for_it_is_memory() -> None:
    world = World(slow={1: 3.0}, memory_errors={1: 9})
    assert "memory" in kinds(world.evidence())
    assert kinds(World(memory_errors={1: 9}).evidence()) == []


def test_skew_before_the_newest_placement_does_not_count() -> None:
    hot, even = World(hot={(0, 3): 8.0, (1, 3): 8.0}), World()
    slices = (*hot.evidence().slices[:4], *even.evidence().slices[4:])
    mixed = replace(even.evidence(), slices=slices)
    assert kinds(replace(mixed, layout_since_s=slices[4].start_s)) == []


# ------------------------------------------------------------------------------- properties

noises = st.lists(st.floats(0.8, 1.2), min_size=RANKS, max_size=RANKS)


@given(machine=st.floats(1.0, 1.5), noise=noises, seed=st.integers(0, 99), wait=st.floats(0, 0.3))
def test_noise_is_no_cause(machine: float, noise: list[float], seed: int, wait: float) -> None:
    world = World(
        machine=machine,
        noise=noise,
        seed=seed,
        wait_share=wait,
        slices=4,
        calls=60,
        pairs=8,
        chance=True,
    )
    assert kinds(world.evidence()) == []


@given(
    scale=st.sampled_from([1e-4, 1e-2, 1.0, 1e3]),
    cause=st.sampled_from([None, "hot_expert", "slow_rank", "copy", "overload", "cold_start"]),
)
def test_only_ratios_count(scale: float, cause: str | None) -> None:
    planted = {} if cause is None else PLANTED[cause]
    world = World(scale=scale, **planted)
    assert kinds(world.evidence()) == ([] if cause is None else [cause])


@given(seed=st.integers(0, 2**31), num_slices=st.integers(1, 4))
def test_whatever_was_measured_the_answer_is_sound(seed: int, num_slices: int) -> None:
    """Counts that fit nothing, ranks of any state: shares are shares, and words are found."""
    rng = np.random.default_rng(seed)
    evidence = World(slices=num_slices, calls=20).evidence()

    def drawn(array: Any, most: float) -> Any:
        return (rng.random(array.shape) * most * rng.integers(0, 2, array.shape)).astype(
            array.dtype
        )

    slices = tuple(
        replace(
            one,
            stages=replace(
                one.stages, **{n: drawn(getattr(one.stages, n), 99) for n in one.stages.__slots__}
            ),
            rank_pairs=drawn(one.rank_pairs, 999),
            expert_pairs=drawn(one.expert_pairs, 999),
            busy_s=drawn(one.busy_s, 2),
            batches=drawn(one.batches, 50),
            copies=tuple((int(rng.integers(-1, 9)), int(rng.integers(0, 9))) for _ in range(2)),
            cold=frozenset(rng.integers(0, 9, 2).tolist()),
            missing=int(rng.integers(0, 2)),
            failed=int(rng.integers(0, 9)),
            refused=int(rng.integers(0, 9)),
        )
        for one in evidence.slices
    )
    ranks = tuple(
        replace(
            one,
            serving=bool(rng.integers(0, 2)),
            usable=bool(rng.integers(0, 2)),
            memory_errors=int(rng.integers(0, 2)),
        )
        for one in evidence.ranks
    )
    kinds(
        replace(
            evidence,
            slices=slices,
            ranks=ranks,
            hosts=rng.random(evidence.hosts.shape) < 0.3,
            open_requests=int(rng.integers(0, 99)),
            silent=frozenset(rng.integers(0, 4, 1).tolist()),
            spare_slots=int(rng.integers(-3, 3)),
        )
    )
