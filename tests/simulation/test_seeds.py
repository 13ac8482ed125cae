"""Seeded services under every fault, with every promise checked: what CI holds the product to.

A failure prints its seed and the command that replays it.
"""

import os
import sys

import pytest

from placement.messages.codec import encode
from placement.sim import runner
from placement.sim.checks import InvariantBroken, Memory
from placement.sim.coverage import REFUSALS, Coverage, all_pairs
from placement.sim.faults import FaultKind
from placement.sim.nemesis import PAIRS, aims_of
from placement.sim.runner import HEAL_S, replay_command, run
from placement.sim.world import FAULTS, World
from tests.simulation.campaign import COMPLETE_FROM, EVENTS_A_SEED, campaign

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def summary(request, first_seed):
    seeds = request.config.getoption("--seeds")
    # Coverage is measured in this process alone.
    jobs = 1 if "coverage" in sys.modules else len(os.sched_getaffinity(0))
    return campaign(range(first_seed, first_seed + seeds), jobs)


def test_every_seed_keeps_every_promise(summary):
    assert not summary.broken, "\n".join(summary.broken)


def test_every_fault_met_every_state_of_a_step_and_every_refusal_was_given(summary):
    if len(summary.outcomes) < COMPLETE_FROM:
        pytest.skip(f"complete from {COMPLETE_FROM} seeds on")
    assert summary.met.missing() == ([], [])


def test_every_seed_is_busy_and_heals(summary):
    assert min(o.events for o in summary.outcomes) >= EVENTS_A_SEED
    assert max(o.healed_s for o in summary.outcomes) <= HEAL_S
    assert sum(o.contributions for o in summary.outcomes) > 1000 * len(summary.outcomes)


def test_a_seed_is_the_same_world_every_time():
    facts = []
    for _ in range(2):
        world = World(3)
        world.stage.clock.run_until(6.0)
        facts.append(encode([str(fact) for fact in world.stage.recorder.facts]))
    assert facts[0] == facts[1]


def test_seeds_in_a_row_aim_at_every_pair():
    aims = {aim for seed in range(200) for aim in aims_of(seed, FAULTS)}
    assert aims == set(PAIRS)
    assert len(PAIRS) == len(list(all_pairs()))


def test_what_was_never_met_is_named():
    met = Coverage()
    pairs, refusals = met.missing()
    assert (len(pairs), refusals) == (len(PAIRS), list(REFUSALS))
    met.met("add.copying", FaultKind.LOSS)
    met.refused("step.digest")
    pairs, refusals = met.missing()
    assert "add.copying x loss" not in pairs
    assert "step.digest" not in refusals
    with pytest.raises(AssertionError, match="no known refusal"):
        met.refused("step.whatever")


@pytest.mark.parametrize(
    ("error", "said"),
    [(InvariantBroken("I6: on purpose"), "I6: on purpose"), (KeyError("k"), r"KeyError\('k'\)")],
    ids=["broken_promise", "any_error"],
)
def test_a_failure_names_its_seed_and_how_to_replay_it(monkeypatch, error, said):
    def broken(self, fact):
        raise error

    monkeypatch.setattr(Memory, "_used", broken)
    with pytest.raises(InvariantBroken, match=rf"^{said} \[seed 1; replay: make sim"):
        run(1)
    assert replay_command(7) == "make sim SEEDS=1 FIRST_SEED=7"


def test_a_service_that_does_not_heal_is_a_failure(monkeypatch):
    # All else heals within HEAL_S: then a balance that no layout has is what is named.
    monkeypatch.setattr(runner, "BALANCE_SLACK", -1.0)
    with pytest.raises(InvariantBroken, match=r"I12: not healed 60 s after .* can be reached"):
        run(1)
