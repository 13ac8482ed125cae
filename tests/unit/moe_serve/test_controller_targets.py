"""A planner that fails again and again is among the problems, and no longer once it answers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from moe_serve.controller.targets import NO_REASON, REASON_CHARS_MAX, Targets
from moe_serve.controller.views import placement_view
from placement.config import RebalanceConfig
from placement.messages.effects import ComputeTarget
from placement.messages.records import DecisionRecord
from tests.engine_driver import two_ranks
from tests.fakes.controller import controller, make_cluster, make_settings, until

CONFIG = RebalanceConfig(window_s=2.0, retry_s=5.0, target_timeout_s=30.0)
SPOKEN_OF_S = 2 * 37.0


def failed(at_s: float, cause: str = "auto", reason: str = "no answer in 30.0 s") -> DecisionRecord:
    return said("target_failed", "refused", at_s=at_s, detail=f"{cause}: {reason}")


def said(rule: str, outcome: str, at_s: float = 70.0, **more: object) -> DecisionRecord:
    fields = {"at_s": at_s, "seq": 1, "rule": rule, "outcome": outcome, **more}
    return DecisionRecord(**fields)  # type: ignore[arg-type]


def targets(*records: DecisionRecord) -> Targets:
    made = Targets()
    made.decided(records, CONFIG)
    return made


def test_the_second_failure_in_a_row_is_a_problem_with_its_reason_and_a_next_step() -> None:
    made = targets(failed(30.0))
    assert made.problems(31.0, CONFIG) == []
    made.decided([failed(64.0)], CONFIG)
    (text,) = made.problems(70.0, CONFIG)
    assert text == (
        "no target placement could be computed for 40 s (auto, 2 times in a row): no answer in "
        "30.0 s; placement stays as it is. Give the controller's node more CPU, or raise "
        "rebalance.target_timeout_s"
    )
    other = targets(failed(1.0, "drain", "3 slots are short"), failed(6.0, "drain", "2 are short"))
    (text,) = other.problems(7.0, CONFIG)
    assert "for 6 s (drain, 2 times in a row): 2 are short; placement" in text
    assert "moe-serve events" in text


@pytest.mark.parametrize(
    "answer",
    [
        said("regret_reached", "started", plan_id="p", numbers={"threshold_s": 0.1}),
        said("nothing_better", "kept", numbers={"threshold_s": 0.0}),
        said("paused", "kept", numbers={"threshold_s": 0.0}),
    ],
    ids=lambda record: record.rule,
)
def test_an_answer_ends_the_row(answer: DecisionRecord) -> None:
    made = targets(failed(30.0), failed(64.0), answer)
    assert made.problems(71.0, CONFIG) == []
    made.decided([failed(90.0)], CONFIG)
    assert made.problems(91.0, CONFIG) == [], "they are no longer in a row"


@pytest.mark.parametrize(
    "record",
    [
        said("nothing_better", "kept", numbers={"layers_resting": 1.0}),
        said("in_balance", "kept"),
        said("target_outstanding", "kept"),
        said("target_stale", "kept"),
        said("repair", "started", plan_id="p"),
        said("replicate", "started", plan_id="p", move_id=1),
        said("asked", "started", plan_id="p"),
    ],
    ids=lambda record: record.rule,
)
def test_what_answers_no_target_of_the_cause_ends_nothing(record: DecisionRecord) -> None:
    made = targets(failed(30.0), record, failed(64.0), record)
    assert len(made.problems(70.0, CONFIG)) == 1


def test_causes_are_counted_apart() -> None:
    made = targets(failed(30.0), failed(31.0, "drain"))
    assert made.problems(32.0, CONFIG) == []
    made.decided([failed(64.0), failed(66.0, "drain"), said("drain", "kept")], CONFIG)
    (text,) = made.problems(70.0, CONFIG)
    assert "(auto, " in text


def test_what_an_operator_asked_for_was_answered_to_them() -> None:
    assert targets(failed(1.0, "asked"), failed(2.0, "asked")).problems(3.0, CONFIG) == []


def test_what_is_no_longer_tried_is_not_spoken_of_and_begins_anew() -> None:
    made = targets(failed(30.0), failed(64.0))
    over_s = 64.0 + SPOKEN_OF_S
    assert made.problems(over_s, CONFIG)
    assert made.problems(over_s + 0.1, CONFIG) == []
    made.decided([failed(over_s + 0.1)], CONFIG)
    assert made.problems(over_s + 1.0, CONFIG) == []


@pytest.mark.parametrize(
    ("reason", "said"),
    [
        ("", NO_REASON),
        (" \n", NO_REASON),
        ("ValueError: a\nb\x1b[31m\u202ec", "ValueError: a b [31m c"),
        ("x" * REASON_CHARS_MAX, "x" * REASON_CHARS_MAX),
        ("x" * 5000, "x" * REASON_CHARS_MAX + "..."),
    ],
)
def test_a_reason_is_part_of_one_sentence_whatever_it_is(reason: str, said: str) -> None:
    (text,) = targets(failed(1.0, reason=reason), failed(6.0, reason=reason)).problems(7.0, CONFIG)
    assert f"(auto, 2 times in a row): {said}; placement stays as it is. " in text
    assert ("Mend what the reason names" in text) == (said != NO_REASON)
    assert text.isprintable()


def test_no_failure_is_spoken_of_as_of_the_time_to_come() -> None:
    (text,) = targets(failed(10.0), failed(5.0)).problems(4.0, CONFIG)
    assert "computed for 0 s (" in text


def test_the_records_of_an_engine_whose_planner_answers_again() -> None:
    driver, made = two_ranks(slots=6), Targets()
    driver.hold.add(ComputeTarget)
    told = len(driver.records)
    for _ in range(2):
        driver.close_window({0: 5000.0})
        assert driver.engine.state.outstanding is not None
        driver.wait(driver.config.target_timeout_s)
    made.decided(driver.records[told:], driver.config)
    (text,) = made.problems(driver.now_s, driver.config)
    assert "(auto, 2 times in a row): no answer in 30.0 s" in text
    told = len(driver.records)
    driver.hold.clear()
    driver.close_window({0: 5000.0})
    made.decided(driver.records[told:], driver.config)
    assert made.problems(driver.now_s, driver.config) == []


@pytest.mark.asyncio
async def test_a_controller_whose_planner_fails_names_it_among_its_problems(
    tmp_path: Path,
) -> None:
    settings = make_settings(tmp_path)
    config = msgspec.structs.replace(settings.config, policy="nonsense", retry_s=0.05)
    async with controller(replace(settings, config=config), make_cluster()) as rig:

        def said() -> list[str]:
            problems = placement_view(rig.service.sight()).problems
            return [text for text in problems if text.startswith("no target placement")]

        await until(lambda: bool(said()))
        assert "(initial, " in said()[0]
        assert "policy 'nonsense' is not one of" in said()[0]
