"""What people see of a plan that ran when the controller was restarted."""

from moe_serve.controller.book import Book
from placement.messages.effects import CopyExpert
from tests.builders import make_spec, make_topology
from tests.engine_driver import EngineDriver, two_ranks


def a_book(driver: EngineDriver) -> Book:
    book = Book(records_kept=99, moves_kept=99)
    book.recall_run(driver.engine.state)
    return book


def test_moves_under_way_are_shown_again_until_their_records_end_them() -> None:
    driver = two_ranks(slots=6)
    driver.hold.add(CopyExpert)
    driver.close_window({0: 5000.0})
    book = a_book(driver)
    assert {move.state for move in book.moves} == {"running"}
    before = len(driver.records)
    driver.let_go()
    book.add(tuple(driver.records[before:]))
    assert {move.state for move in book.moves} == {"done"}


def test_the_first_fill_is_not_shown_as_moves_that_never_end() -> None:
    driver = EngineDriver(make_spec(), make_topology([4, 4]), routers=["r0"], join=False)
    driver.hold.add(CopyExpert)
    for rank in range(2):
        driver.join(rank)
    run = driver.engine.state.run
    assert run is not None
    assert run.cause == "initial"
    assert a_book(driver).moves == ()
