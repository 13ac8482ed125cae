"""The soak's own parts, without a service: the schedule, the slopes and the verdict find what they
are for."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from moe_serve.errors import MoeServeError
from moe_serve.router.checks import check_forward
from tests.builders import make_spec
from tests.marker_checkpoint import LAYERS, TOP_K
from tests.soak.acts import CUTS, POINTS, Deed
from tests.soak.bursts import REFUSED, SPOILS, good_request
from tests.soak.dice import (
    COPY_FAULTS,
    LOSABLE_NODES,
    NODE_RANKS,
    RANKS,
    SPARED_RANK,
    SPARED_ROUTER,
    Kind,
    draw_schedule,
)
from tests.soak.load import LATE, UNTYPED, WRONG, Failure
from tests.soak.rig import EXPERTS, HIDDEN
from tests.soak.slopes import (
    COUNTS_LIFE_S,
    RSS_LIFE_S,
    Life,
    Reading,
    beside_one_step,
    gain_of,
    growth_of,
    slope_of,
)
from tests.soak.verdict import judge_failures, table_of_faults, table_of_growth

HOUR = 240
"""Faults of an hour."""


def test_a_seed_is_one_schedule() -> None:
    assert draw_schedule(3, HOUR) == draw_schedule(3, HOUR)
    assert draw_schedule(3, HOUR)[:20] == draw_schedule(3, 20)
    assert draw_schedule(3, HOUR) != draw_schedule(4, HOUR)


@pytest.mark.parametrize("seed", range(5))
def test_a_schedule_holds_every_kind_and_spares_who_is_to_live(seed: int) -> None:
    acts = draw_schedule(seed, HOUR)
    assert {act.kind for act in acts[: len(Kind)]} == set(Kind)
    for act in acts:
        assert act.rank != act.other
        assert max(act.rank, act.other) < RANKS
        assert act.kind is not Kind.KILL_SHARD or act.rank != SPARED_RANK
        assert act.kind is not Kind.KILL_ROUTER or act.router != SPARED_ROUTER
        assert SPARED_RANK not in NODE_RANKS[act.node]
        assert act.variant < len(CUTS)
    assert {act.node for act in acts} == set(LOSABLE_NODES)
    assert {act.rank for act in acts} == set(range(RANKS))


def test_every_fault_of_a_shard_has_a_point() -> None:
    computing = {Kind.NO_MEMORY_TO_COMPUTE, Kind.SLOW_COMPUTE, Kind.HUNG_COMPUTE}
    assert set(POINTS) == COPY_FAULTS | computing


# ------------------------------------------------------------------------------------- slopes


def life(
    seconds: float,
    *,
    mb_per_move: float = 0.0,
    fds_per_s: float = 0.0,
    moves_per_s: float = 0.5,
    warm_mb: float = 0.0,
    seed: int = 0,
) -> Life:
    """A life of readings each 5 s, with noise of several MB and counts that jump with the load."""
    rng = np.random.default_rng(seed)
    made = Life("rank 0", 77)
    for at_s in np.arange(0.0, seconds + 5.0, 5.0):
        moves = int(moves_per_s * at_s)
        filling = warm_mb * min(1.0, at_s / 100.0)
        rss = 200 + filling + mb_per_move * moves + rng.normal(0.0, 3.0)
        fds = 40 + int(rng.integers(0, 12)) + int(fds_per_s * at_s)
        counts = {"fds": float(fds), "threads": 20.0}
        made.readings.append(Reading(1000.0 + at_s, moves, int(rss * 1e6), counts))
    return made


@pytest.mark.parametrize("seed", range(10))
def test_a_steady_life_leaks_nothing(seed: int) -> None:
    growth = growth_of(life(1800.0, warm_mb=80.0, seed=seed))
    assert growth.judged == ("fds", "threads", "rss")
    assert growth.leaks == ()


@pytest.mark.parametrize("seed", range(10))
def test_a_planted_leak_of_memory_is_found(seed: int) -> None:
    growth = growth_of(life(1800.0, mb_per_move=0.05, seed=seed))
    (leak,) = growth.leaks
    assert "rank 0" in leak
    assert "a 100 moves" in leak
    assert growth.rss is not None
    assert growth.rss.least <= 5.0 <= growth.rss.most


def test_a_planted_leak_of_descriptors_is_found() -> None:
    (leak,) = growth_of(life(300.0, fds_per_s=0.05)).leaks
    assert "fds grew by" in leak


def test_peers_that_come_and_go_are_no_leak() -> None:
    """One was away at first, or one more is there for a while at the end."""
    assert gain_of([20.0] * 4 + [30.0] * 26) == 0.0
    assert gain_of([30.0] * 20 + [40.0] * 8 + [30.0] * 2) == 0.0
    assert gain_of([30.0] * 10 + [33.0] * 20) == 3.0


@pytest.mark.parametrize("at", range(1, 60))
def test_what_is_made_late_but_once_is_no_leak(at: int) -> None:
    late = life(600.0)
    for one in late.readings[-at:]:
        one.counts["threads"] += 5.0
    assert growth_of(late).leaks == ()


@pytest.mark.parametrize("seed", range(20))
def test_what_is_made_again_and_again_is_a_leak(seed: int) -> None:
    """Wherever its steps fall, as long as they lie apart and between the thirds compared."""
    rng, again = np.random.default_rng(seed), life(600.0)
    first, second = int(rng.integers(65, 70)), int(rng.integers(80, 88))
    for n, one in enumerate(again.readings):
        one.counts["threads"] += 3.0 * ((n > first) + (n > second))
    (leak,) = growth_of(again).leaks
    assert "threads grew by 6" in leak


@pytest.mark.parametrize("steps", [3, 4, 6])
def test_a_leak_is_found_wherever_its_steps_fall(steps: int) -> None:
    """Of those that the gain alone shows, nearly all; some lie so close that they look like one."""
    rng, shown, found = np.random.default_rng(steps), 0, 0
    for _ in range(300):
        at = rng.integers(0, 90, steps)
        values = [20.0 + 3.0 * int((at < n).sum()) for n in range(90)]
        if gain_of(values) > 2.0:
            shown += 1
            found += beside_one_step(values) >= 2.0
    assert shown > 100
    assert found >= 0.9 * shown


def test_a_short_life_is_not_judged() -> None:
    growth = growth_of(life(COUNTS_LIFE_S - 10.0, fds_per_s=1.0, mb_per_move=1.0))
    assert growth.judged == growth.leaks == ()
    growth = growth_of(life(RSS_LIFE_S - 10.0, mb_per_move=1.0))
    assert "rss" not in growth.judged
    assert growth_of(Life("router-0", 5)).leaks == ()


def test_memory_without_moves_has_no_slope() -> None:
    growth = growth_of(life(1800.0, moves_per_s=0.0))
    assert growth.rss is None
    assert growth.rss_per_h is not None
    assert "rss" not in growth.judged


def test_a_slope_of_a_line_is_exact() -> None:
    x = [float(n) for n in range(100)]
    slope = slope_of(x, [3.0 * one + 1.0 for one in x])
    assert slope is not None
    assert slope.value == pytest.approx(3.0)
    assert slope.least == pytest.approx(3.0)
    assert slope_of([1.0] * 100, x) is None
    assert slope_of(x[:10], x[:10]) is None


# ------------------------------------------------------------------------------------- input


def test_every_bad_input_is_refused_and_a_good_one_is_not() -> None:
    spec = make_spec(num_layers=LAYERS, num_experts=EXPERTS, top_k=TOP_K)
    spec = msgspec.structs.replace(spec, hidden_size=HIDDEN)
    rng = np.random.default_rng(0)
    for _ in range(20):
        check_forward(good_request(rng), spec, 1 << 20)
        for spoil in SPOILS:
            request = good_request(rng)
            spoil(request, rng)
            with pytest.raises(MoeServeError) as refused:
                check_forward(request, spec, 1 << 20)
            assert refused.value.code in REFUSED


# ------------------------------------------------------------------------------------- verdict


def deed(kind: Kind, began_s: float, lasted_s: float, healed_s: float) -> Deed:
    act = next(act for act in draw_schedule(0, HOUR) if act.kind is kind)
    return Deed(act, began_s, began_s + lasted_s, healed_s)


def failure(at_s: float, code: str) -> Failure:
    return Failure(at_s, at_s + 1.0, code, "router", "why")


def test_a_fault_excuses_what_it_may_cause_while_it_is_active() -> None:
    deeds = [deed(Kind.NO_MEMORY_TO_COMPUTE, 100.0, 5.0, 3.0)]
    excused, guilty = judge_failures(
        [failure(at_s, "RESOURCE_EXHAUSTED") for at_s in (98.5, 99.5, 107.0, 108.5)], deeds
    )
    assert [one.failure.began_s for one in excused] == [99.5, 107.0]
    assert len(guilty) == 2
    assert all("no fault" in line for line in guilty)


def test_a_fault_excuses_nothing_else() -> None:
    codes = ("DEADLINE_EXCEEDED", "UNAVAILABLE", "RESOURCE_EXHAUSTED", WRONG, LATE, UNTYPED)
    for kind in Kind:
        deeds = [deed(kind, 100.0, 5.0, 3.0)]
        excused, guilty = judge_failures([failure(102.0, code) for code in codes], deeds)
        assert {one.failure.code for one in excused} == set(codes) & deeds[0].act.may_fail
        assert len(excused) + len(guilty) == len(codes)
        assert {WRONG, LATE, UNTYPED}.isdisjoint(deeds[0].act.may_fail)
    killed = [deed(Kind.KILL_SHARD, 100.0, 5.0, 3.0)]
    assert len(judge_failures([failure(102.0, "UNAVAILABLE")], killed)[1]) == 1


def test_the_tables_name_everything() -> None:
    deeds = [deed(kind, 100.0 * n, 5.0, float(n)) for n, kind in enumerate(Kind)]
    deeds[0].violations.append("it did not heal")
    excused, _ = judge_failures([failure(100.0 * n, "UNAVAILABLE") for n in range(30)], deeds)
    table = table_of_faults(deeds, excused)
    assert all(kind.value in table for kind in Kind)
    growths = [growth_of(life(1800.0)), growth_of(life(30.0))]
    shown = table_of_growth(growths, COUNTS_LIFE_S)
    assert shown.count("rank 0") == 1
