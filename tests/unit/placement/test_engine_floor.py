"""Two failure domains for every expert where slots and ranks allow it, and words where they do
not."""

from placement.config import RebalanceConfig
from placement.engine.floor import NAMED_MAX, below_floor
from placement.messages import events as ev
from placement.messages.effects import CopyExpert
from tests.builders import make_spec, make_topology
from tests.engine_driver import EngineDriver, two_ranks
from tests.unit.placement.test_engine_stall import run_to


def told(driver):
    return [r for r in driver.records if r.rule == "floor"]


def domains(driver):
    """Failure domains of each expert of layer 0 in the newest table."""
    node = {r.rank: r.failure_domain for r in driver.engine.state.ranks}
    return [
        len({node[rank] for rank, _, _ in driver.table.replicas(0, expert)}) for expert in range(4)
    ]


def ask(driver, kind, **fields):
    driver.feed(kind(at_s=0.0, request_id=1, **fields))
    return driver.answers[1]


def test_two_failure_domains_are_the_default():
    assert RebalanceConfig().floor == 2
    topology = make_topology([4, 4, 4, 4])
    config = RebalanceConfig(cooldown_s=0.0, first_policy="incremental")
    driver = EngineDriver(make_spec(), topology, config, routers=["r0"])
    assert domains(driver) == [2, 2, 2, 2]
    assert told(driver) == []


def test_where_memory_does_not_allow_it_a_record_names_the_experts_below():
    driver = two_ranks(slots=4, floor=2)
    (record,) = told(driver)
    assert record.outcome == "noted"
    assert record.detail.startswith(
        "slots and ranks allow 1 of 2 failure domains for every expert; 4 lie in fewer than 2: "
        "layer 0 expert 0, layer 0 expert 1"
    )
    assert record.numbers == {"floor": 2.0, "floor_reachable": 1.0, "experts_below": 4.0}
    driver.close_window({0: 5000.0})
    assert len(told(driver)) == 1, "it is no news that there are fewer now"


def test_many_experts_are_counted_and_some_named():
    driver = two_ranks(slots=9, spec=make_spec(num_experts=12), floor=2)
    (record,) = told(driver)
    assert record.detail.count("expert ") == NAMED_MAX
    assert record.detail.endswith(" ...")


def test_it_is_said_when_it_gets_worse_and_when_it_is_well_again():
    driver = two_ranks(slots=6, num_ranks=3, floor=2)
    assert domains(driver) == [2, 2, 2, 2]
    driver.wait(31.0)  # a young service would wait for so many of its ranks
    driver.lose(2)
    driver.lose(1)
    driver.wait(12.0)
    assert [r.numbers.get("floor_reachable") for r in told(driver)] == [1.0]
    assert driver.table.missing() == ()
    driver.join(1, incarnation=2)
    driver.wait(12.0)
    assert domains(driver) == [2, 2, 2, 2]
    assert [r.outcome for r in told(driver)] == ["noted", "done"]
    assert told(driver)[-1].detail == "every expert lies in 2 failure domains"


def test_more_experts_below_than_were_told_of_is_told():
    driver = two_ranks(slots=4, floor=2)
    driver.close_window({0: 5000.0})
    driver.close_window({0: 5000.0})
    state = driver.engine.state
    reachable, low = state.floor_told
    assert (reachable, low < 4) == (1, True)
    driver.feed(ev.BudgetAsked(at_s=0.0, request_id=1, rank=0, budget_bytes=3000))
    driver.feed(ev.BudgetAsked(at_s=0.0, request_id=2, rank=1, budget_bytes=3000))
    driver.wait(12.0)
    assert state.floor_told == (1, 4)
    assert len(told(driver)) == 2


def test_a_node_that_is_lost_leaves_every_expert_served_and_is_repaired():
    topology = make_topology([4] * 6)
    config = RebalanceConfig(cooldown_s=0.0, first_policy="incremental")
    driver = EngineDriver(make_spec(), topology, config, routers=["r0"])
    for rank in (0, 1):
        driver.lose(rank)
        assert driver.table.missing() == ()
    driver.wait(12.0)
    assert domains(driver) == [2, 2, 2, 2]
    assert not below_floor(driver.engine._turn(driver.now_s))
    driver.check_agreement()


def test_a_drain_that_costs_a_failure_domain_says_so():
    topology = make_topology([4, 4, 4])  # two ranks on one node, one on the other
    config = RebalanceConfig(cooldown_s=0.0, first_policy="incremental", staging_slots=0)
    driver = EngineDriver(make_spec(), topology, config, routers=["r0"])
    assert domains(driver) == [2, 2, 2, 2]
    done = ask(driver, ev.DrainAsked, rank=0)
    assert done.message == "rank 0 is being emptied"
    driver.wait(12.0)
    assert domains(driver) == [2, 2, 2, 2]
    done = ask(driver, ev.DrainAsked, rank=2)
    assert done.code == "ok"
    assert done.message.endswith("until it is back, 1 of 2 failure domains for every expert")
    driver.wait(12.0)
    assert driver.keys()[2] == []
    assert driver.table.missing() == ()


def test_an_eviction_never_costs_a_failure_domain_that_memory_allows():
    driver = two_ranks(slots=8, num_ranks=3, floor=2)
    driver.close_window({0: 5000.0})
    for rank in range(3):
        driver.feed(ev.BudgetAsked(at_s=0.0, request_id=rank, rank=rank, budget_bytes=4000))
        for _ in range(40):
            driver.wait(0.25)
            assert min(domains(driver)) == 2
    assert [r.num_slots for r in driver.engine.state.ranks] == [4, 4, 4]
    driver.feed(ev.BudgetAsked(at_s=0.0, request_id=9, rank=0, budget_bytes=2000))
    assert driver.answers[9].code == "refused"
    assert driver.answers[9].missing_bytes == 1000


def test_a_removal_is_taken_back_when_the_loss_of_another_rank_costs_its_expert_the_floor():
    """The replica that is on its way out is the nearest there is: nothing has to be copied."""
    driver = two_ranks(
        slots=8, num_ranks=3, floor=2, router_silence_s=600.0, drain_wait_s=60.0, cooldown_s=600.0
    )
    rows = driver.keys()
    out = next(k for k in rows[0] if k in rows[1] and k not in rows[2])
    driver.silent_routers.add("r0")
    run_to(driver, [[k for k in rows[0] if k != out], rows[1], [*rows[2], out]])
    removal = next(s for s in driver.engine.state.run.steps.values() if s.state == "unlisted")
    copies = len([c for c in driver.commands if isinstance(c, CopyExpert) and c.expert == out])
    driver.lose(1)
    assert removal.state == "listed"
    assert sorted(r for r, _, _ in driver.table.replicas(0, out)) == [0, 2]
    assert copies == len(
        [c for c in driver.commands if isinstance(c, CopyExpert) and c.expert == out]
    )
