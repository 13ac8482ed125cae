"""Stories of the engine as text, compared line by line. `pytest tests/golden --rewrite` writes them
anew."""

from pathlib import Path

import pytest

from placement.config import RebalanceConfig
from placement.messages import events as ev
from placement.messages.effects import CopyExpert
from tests.builders import make_spec, make_topology
from tests.engine_driver import EngineDriver
from tests.golden.transcript import transcript

FOLDER = Path(__file__).parent / "stories"


class TellingDriver(EngineDriver):
    """Keeps every event with its effects."""

    def __init__(self, *args, **kwargs):
        self.story = []
        super().__init__(*args, **kwargs)
        step = self.engine.step

        def telling(event):
            effects = step(event)
            self.story.append((event, effects))
            return effects

        self.engine.step = telling


def small(slots=3, num_ranks=2, **fields):
    config = RebalanceConfig(cooldown_s=0.0, first_policy="incremental", floor=1, **fields)
    return TellingDriver(
        make_spec(), make_topology([slots] * num_ranks, ranks_per_node=1), config, routers=["r0"]
    )


def hot_expert_replicated():
    driver = small(slots=4)
    driver.close_window({0: 5000.0})
    driver.close_window({0: 5000.0})
    return driver


def experts_migrated():
    driver = small(slots=3)
    driver.close_window({driver.keys()[0][0]: 5000.0, driver.keys()[0][1]: 5000.0})
    return driver


def rank_lost_in_the_middle_of_a_copy():
    driver = small(slots=6, num_ranks=3)
    driver.hold.add(CopyExpert)
    driver.close_window({0: 5000.0})
    driver.lose(driver.held[0].rank)
    driver.let_go()
    return driver


def budget_lowered():
    driver = small(slots=5)
    driver.close_window({0: 900.0, 1: 900.0, 2: 900.0, 3: 50.0})
    driver.feed(ev.BudgetAsked(at_s=0.0, request_id=1, rank=0, budget_bytes=3000))
    driver.feed(ev.BudgetAsked(at_s=0.0, request_id=2, rank=0, budget_bytes=1000))
    return driver


def operator_goes_back():
    """Automatic plans are paused, a plan to the placement before the hot expert is asked for and
    applied."""
    driver = small(slots=4)
    before = tuple(map(tuple, driver.keys()))
    driver.close_window({0: 5000.0})
    driver.feed(ev.PauseAsked(at_s=0.0, request_id=1, reason="back to where we were"))
    driver.feed(ev.PlanAsked(at_s=0.0, request_id=2, target=before))
    plan_id = driver.answers[2].plan_id
    driver.feed(ev.ApplyAsked(at_s=0.0, request_id=3, plan_id=plan_id))
    return driver


STORIES = [
    hot_expert_replicated,
    experts_migrated,
    rank_lost_in_the_middle_of_a_copy,
    budget_lowered,
    operator_goes_back,
]


@pytest.mark.parametrize("story", STORIES, ids=lambda s: s.__name__)
def test_story(story, rewrite):
    text = transcript(story().story)
    path = FOLDER / f"{story.__name__}.txt"
    if rewrite:
        FOLDER.mkdir(exist_ok=True)
        path.write_text(text)
    assert text == path.read_text(), f"the story changed; see the diff, then --rewrite {path.name}"
