"""Would placement help this traffic? The verdict, and that no plan is judged on what it saw."""

from collections.abc import Callable

import msgspec
import numpy as np
import pytest

from placement.config import RebalanceConfig
from placement.load import LoadWindow
from placement.replay import Screening, count_windows, screen
from placement.replay.screening import BLOCKS, JUDGED_MIN, _judge
from placement.topology import DeviceProfile, MoeSpec, RankSpec, Topology

EXPERTS, RANKS, PAIRS = 16, 4, 3200
SPEC = MoeSpec(
    model="m",
    weights_version="v1",
    num_layers=1,
    num_experts=EXPERTS,
    top_k=1,
    hidden_size=128,
    intermediate_size=64,
    expert_bytes=98_304,
    slot_bytes=98_304,
)
DEVICE = DeviceProfile(name="d", flops_per_s=2e8, memory_bytes_per_s=2e9, copy_bytes_per_s=4e6)
TOPOLOGY = Topology(
    ranks=tuple(
        RankSpec(rank=r, node=f"n{r}", failure_domain=f"n{r}", num_slots=5, profile="d")
        for r in range(RANKS)
    ),
    profiles=(DEVICE,),
)
CONFIG = RebalanceConfig(cooldown_s=1.0)


def _windows(hot: Callable[[int], list[int]], number: int, pairs: int = PAIRS) -> list[LoadWindow]:
    """Windows in each of which the hot experts get four times as much as others."""
    counts = np.full((number, 1, EXPERTS), pairs / EXPERTS)
    for at in range(number):
        counts[at, 0, hot(at)] *= 4
    return count_windows(
        counts.astype(np.int64), SPEC, window_tokens=1, window_s=2.0, sub_windows=1
    )


def _of(windows: list[LoadWindow], **options: float) -> Screening:
    return screen(windows, SPEC, TOPOLOGY, CONFIG, **options)


# One slot is for staging: the static layout has one replica of each, 0 to 3 on rank 0.
STEADY = [0, 1, 2, 3]


def test_a_lasting_skew_is_worth_a_trial() -> None:
    found = _of(_windows(lambda _: STEADY, 24))
    assert found.verdict == "recommend_trial"
    never, plan, engine, foresight = found.layouts
    assert (never.name, engine.name, foresight.name) == ("never moves", "engine", "foresight")
    assert never.gain == 0.0
    assert engine.gain > 0.3
    assert plan.gain > 0.3
    assert engine.balancedness <= found.bound
    assert foresight.gain >= engine.gain - 1e-9
    assert (found.first_windows, found.judged_windows, found.better, found.worse) == (12, 12, 12, 0)
    assert found.saved_s > found.copy_s
    assert len(found.block_gains) == BLOCKS
    assert "on windows no plan had seen" in found.reasons[0]


def test_writes_are_counted_on_the_side_where_they_were_made() -> None:
    _, plan, engine, _ = _of(_windows(lambda _: STEADY, 24)).layouts
    assert plan.slot_writes > 0
    assert plan.copy_bytes == plan.slot_writes * SPEC.expert_bytes
    assert engine.slot_writes == engine.copy_bytes == 0


def test_a_frozen_plan_does_not_follow_what_comes_later_and_the_engine_does() -> None:
    found = _of(_windows(lambda at: STEADY if at < 16 else [8, 9, 10, 11], 32))
    _, plan, engine, _ = found.layouts
    assert engine.gain > plan.gain + 0.05
    assert engine.slot_writes > 0


def test_even_load_leaves_nothing_to_win() -> None:
    found = _of(_windows(lambda _: [], 24))
    assert found.verdict == "not_recommended_now"
    assert "the load is even as it is" in found.reasons[0]


def test_what_is_hot_only_in_the_first_part_is_not_judged() -> None:
    found = _of(_windows(lambda at: STEADY if at < 12 else [], 24))
    assert found.verdict == "not_recommended_now"
    assert found.layouts[0].balancedness == 1.0


def test_heat_that_a_plan_cannot_follow_is_no_reason() -> None:
    """Each window others are hot: whoever knows it beforehand gains, nobody else does."""

    def hot(at: int) -> list[int]:
        return np.random.default_rng(at).choice(EXPERTS, 4, replace=False).tolist()

    found = _of(_windows(hot, 48))
    assert found.layouts[3].gain > 0.1
    assert found.verdict == "not_recommended_now"
    assert "changes faster than a plan can follow" in found.reasons[0]


@pytest.mark.parametrize("number", [0, 1, 2 * JUDGED_MIN - 2])
def test_too_few_windows_tell_nothing(number: int) -> None:
    found = _of(_windows(lambda _: STEADY, number))
    assert found.verdict == "insufficient_evidence"
    assert "windows to judge on" in " ".join(found.reasons)
    assert _of(_windows(lambda _: STEADY, 2 * JUDGED_MIN)).verdict == "recommend_trial"


def test_a_first_part_without_a_window_makes_no_plan() -> None:
    found = _of(_windows(lambda _: STEADY, 10), first_share=0.05)
    assert (found.first_windows, found.judged_windows) == (0, 10)
    assert "no window is left to make a plan from; record longer" in found.reasons


def test_thin_counts_are_noise() -> None:
    found = _of(_windows(lambda _: STEADY, 16, pairs=EXPERTS))
    assert found.verdict == "insufficient_evidence"
    assert "pairs an expert" in found.reasons[0]


def test_a_higher_bar_is_another_verdict() -> None:
    windows = _windows(lambda _: STEADY, 24)
    gain = _of(windows).layouts[2].gain
    assert _of(windows, worth=gain / 2).verdict == "recommend_trial"
    assert _of(windows, worth=(1 + gain) / 2).verdict == "not_recommended_now"


def _with(found: Screening, **changes: object) -> str:
    return _judge(msgspec.structs.replace(found, **changes))[0]


def test_the_rules_of_the_verdict_one_by_one() -> None:
    fine = _of(_windows(lambda _: STEADY, 24))
    assert _with(fine) == "recommend_trial"
    assert _with(fine, copy_s=fine.saved_s) == "not_recommended_now"
    assert _with(fine, block_gains=(0.01, 0.04, 0.02, 0.03)) == "not_recommended_now"
    assert _with(fine, block_gains=(0.5, 0.5, 0.5, -0.01)) == "insufficient_evidence"
    assert _with(fine, block_gains=(0.5, 0.5, 0.5, 0.0)) == "insufficient_evidence"
    for gain, verdict in ((0.04, "insufficient_evidence"), (0.0, "not_recommended_now")):
        weak = tuple(
            msgspec.structs.replace(one, gain=gain) if one.name == "engine" else one
            for one in fine.layouts
        )
        assert _with(fine, layouts=weak) == verdict


@pytest.mark.parametrize(
    "options", [{"first_share": 0.0}, {"first_share": 1.0}, {"worth": 0.0}, {"worth": 1.0}]
)
def test_shares_outside_of_0_to_1_are_refused(options: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="must lie in"):
        _of([], **options)


def test_the_same_windows_give_the_same_screening() -> None:
    windows = _windows(lambda at: [at % EXPERTS], 24)
    assert msgspec.to_builtins(_of(windows)) == msgspec.to_builtins(_of(windows))
