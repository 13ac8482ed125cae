"""What a controller notes of its engine: which lives it gave up."""

from placement.engine import EngineFacts
from placement.messages import events as ev
from placement.messages.history import RankGivenUp
from tests.engine_driver import two_ranks

ANY_EVENT = ev.TimerFired(at_s=0.0)


def noted(driver, *acts):
    """(rank, incarnation) of the lives that were given up, act by act."""
    given_up = []

    def note(kind, /, **fields):
        if kind is RankGivenUp:
            given_up.append((fields["rank"], fields["incarnation"]))

    facts = EngineFacts(driver.engine, driver.spec, note)
    for act in acts:
        facts.stepped(ANY_EVENT, act())
    return given_up


def test_the_life_that_went_is_given_up_and_not_the_one_that_came_in_its_place():
    driver = two_ranks(num_ranks=3)
    assert noted(driver, lambda: driver.join(1, 2)) == [(1, 1)]


def test_each_life_is_given_up_once():
    driver = two_ranks(num_ranks=3)
    acts = (lambda: driver.lose(1), lambda: driver.join(1, 2), lambda: driver.lose(1))
    assert noted(driver, *acts) == [(1, 1), (1, 2)]


def test_a_life_that_never_joined_is_named_by_who_saw_it_go():
    driver = two_ranks(num_ranks=3)
    driver.engine.state.ranks[1].incarnation = -1
    lost = ev.RankLost(at_s=0.0, rank=1, incarnation=7, reason="killed")
    assert noted(driver, lambda: driver.feed(lost)) == [(1, 7)]
