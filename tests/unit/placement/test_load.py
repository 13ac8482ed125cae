import msgspec
import numpy as np
import pytest

from placement.load import (
    INCARNATIONS_MAX,
    NOTHING_ACKED,
    REORDER_MAX,
    DemandReport,
    HotnessReport,
    LoadError,
    LoadFolder,
    LoadHistory,
    LoadWindow,
    demand_rate,
)
from placement.messages.codec import decode_as, encode
from placement.topology import Phase
from tests.builders import make_demand, make_spec, make_window

LAYERS, EXPERTS, RANKS = 2, 3, 2


def folder(**fields):
    sizes = {"num_layers": LAYERS, "num_experts": EXPERTS, "num_ranks": RANKS}
    times = {"window_s": 2.0, "sub_windows": 4, "start_s": 10.0}
    return LoadFolder(**{**sizes, **times, **fields})


def key_of(layer, expert, phase=Phase.PREFILL):
    return (phase * LAYERS + layer) * EXPERTS + expert


def demand(seq, keys, pairs, source="router-0", incarnation=1):
    return DemandReport(
        source=source,
        incarnation=incarnation,
        seq=seq,
        at_s=0.0,
        key=np.array(keys, np.int32),
        pairs=np.array(pairs, np.int64),
    )


def hotness(seq, keys, pairs, seconds, rank=0, source="shard-0"):
    return HotnessReport(
        source=source,
        incarnation=1,
        seq=seq,
        rank=rank,
        at_s=0.0,
        key=np.array(keys, np.int32),
        pairs=np.array(pairs, np.int64),
        seconds=np.array(seconds, np.float64),
    )


def test_a_rank_that_joins_is_counted_from_then_on_and_nothing_is_lost():
    load = folder()
    assert load.add_hotness(hotness(1, [key_of(1, 2)], [5], [0.5], rank=1), 10.0)
    with pytest.raises(LoadError, match="rank 3 must lie in"):
        load.add_hotness(hotness(1, [0], [1], [0.1], rank=3, source="shard-3"), 10.0)
    load.hold_ranks(4)
    load.hold_ranks(2)  # numbers are kept by ranks that have left
    assert load.add_hotness(hotness(1, [key_of(0, 0)], [7], [0.7], rank=3, source="shard-3"), 10.0)
    first = load.close(12.0)
    assert first.rank_pairs.tolist() == [[0, 0], [0, 5], [0, 0], [7, 0]]
    assert first.rank_busy_s.sum(axis=1).tolist() == [0.0, 0.5, 0.0, 0.7]
    assert load.close(14.0).rank_pairs.shape == (4, LAYERS)


def test_reports_fall_into_the_sub_window_in_which_they_arrive():
    load = folder()
    assert load.add_demand(demand(1, [key_of(1, 2)], [5]), at_s=10.0)
    assert load.add_demand(demand(2, [key_of(1, 2, Phase.DECODE)], [7]), at_s=11.2)
    assert load.add_demand(demand(3, [key_of(0, 0)], [1]), at_s=12.9)
    window = load.close(12.9)
    assert (window.index, window.start_s, window.end_s) == (0, 10.0, 12.9)
    assert window.demand.shape == (4, 2, LAYERS, EXPERTS)
    assert window.demand[0, Phase.PREFILL, 1, 2] == 5
    assert window.demand[2, Phase.DECODE, 1, 2] == 7
    assert window.demand[3, Phase.PREFILL, 0, 0] == 1, "late for its window, not for the folder"
    assert window.demand.sum() == 13
    assert not window.demand.flags.writeable


def test_layer_calls_are_added_up_by_phase_and_begin_anew_with_each_window():
    load = folder()
    first = msgspec.structs.replace(demand(1, [0], [5]), calls=(2, 3))
    for report in (first, first, demand(2, [0], [5]), demand(1, [0], [1], "router-1")):
        load.add_demand(report, 10.1)
    assert load.close(12.0).calls == (2, 3)
    assert load.close(14.0).calls == (0, 0)
    with pytest.raises(LoadError, match="calls must be >= 0"):
        load.add_demand(msgspec.structs.replace(demand(3, [0], [5]), calls=(-1, 0)), 14.1)


def test_a_report_that_comes_again_counts_once_and_is_acknowledged():
    load = folder()
    assert load.acked_seq("router-0", 1) == NOTHING_ACKED
    assert load.add_demand(demand(1, [0], [5]), 10.1)
    assert not load.add_demand(demand(1, [0], [5]), 10.2)
    load.close(12.0)
    assert not load.add_demand(demand(1, [0], [5]), 12.1), "also across windows"
    assert load.acked_seq("router-0", 1) == 1
    assert load.close(14.0).demand.sum() == 0


def test_a_late_report_falls_into_the_open_window():
    load = folder()
    load.close(12.0)
    assert load.add_demand(demand(1, [0], [5]), at_s=11.0)
    window = load.close(14.0)
    assert (window.index, window.demand[0].sum()) == (1, 5)


def test_acknowledgement_stops_at_a_gap_until_it_is_filled():
    load = folder()
    for seq in (4, 6, 7):
        assert load.add_demand(demand(seq, [0], [1]), 10.0)
    assert load.acked_seq("router-0", 1) == 4
    assert not load.add_demand(demand(7, [0], [1]), 10.0)
    assert not load.add_demand(demand(2, [0], [1]), 10.0), "older than the first seen: counted once"
    assert load.add_demand(demand(5, [0], [1]), 10.0)
    assert load.acked_seq("router-0", 1) == 7
    assert load.close(12.0).demand.sum() == 4


def test_a_gap_that_is_never_filled_is_passed_over():
    load = folder()
    load.add_demand(demand(0, [0], [1]), 10.0)
    for seq in range(2, REORDER_MAX + 2):
        load.add_demand(demand(seq, [0], [1]), 10.0)
    assert load.acked_seq("router-0", 1) == 0
    load.add_demand(demand(REORDER_MAX + 2, [0], [1]), 10.0)
    assert load.acked_seq("router-0", 1) == REORDER_MAX + 2


def test_what_comes_late_behind_a_gap_that_was_passed_over_still_counts():
    """Every other number is missing; giving the first of them up says nothing of the others."""
    load = folder()
    for seq in range(0, 2 * REORDER_MAX + 6, 2):
        assert load.add_demand(demand(seq, [0], [1]), 10.0)
    counted = REORDER_MAX + 3
    given_up = load.acked_seq("router-0", 1)
    for seq in range(1, 2 * REORDER_MAX + 6, 2):
        counted += load.add_demand(demand(seq, [0], [1]), 10.0)
    window = load.close(10.5)
    assert int(window.demand.sum()) == counted
    assert counted >= 2 * (REORDER_MAX + 3) - (given_up + 1) // 2 - 1
    assert given_up < REORDER_MAX


def test_a_source_that_starts_again_counts_from_zero():
    load = folder()
    for incarnation in range(1, INCARNATIONS_MAX + 2):
        assert load.add_demand(demand(1, [0], [1], incarnation=incarnation), 10.0)
    newest = INCARNATIONS_MAX + 1
    assert load.add_demand(demand(2, [0], [1], incarnation=newest - 1), 10.0), "its last words"
    assert not load.add_demand(demand(2, [0], [1], incarnation=1), 10.0), "too old to know"
    assert load.acked_seq("router-0", newest) == 1
    assert load.close(12.0).demand.sum() == newest + 1


def test_hotness_is_counted_by_expert_rank_and_phase():
    load = folder()
    keys = [key_of(0, 1), key_of(1, 1), key_of(1, 2, Phase.DECODE)]
    assert load.add_hotness(hotness(1, keys, [2, 3, 4], [0.1, 0.2, 0.4], rank=1), 10.0)
    assert not load.add_hotness(hotness(1, keys, [2, 3, 4], [0.1, 0.2, 0.4], rank=1), 10.0)
    window = load.close(12.0)
    assert window.executed_pairs[Phase.PREFILL].tolist() == [[0, 2, 0], [0, 3, 0]]
    assert window.executed_pairs[Phase.DECODE].tolist() == [[0, 0, 0], [0, 0, 4]]
    assert window.rank_pairs.tolist() == [[0, 0], [2, 7]]
    assert window.rank_busy_s[1] == pytest.approx([0.3, 0.4])
    assert window.demand.sum() == 0, "demand is the routers' word"


def test_a_window_names_the_sources_that_were_silent():
    load = folder()
    load.expect("shard-1")
    load.add_demand(demand(1, [], []), 10.0)
    assert load.close(12.0).sources_missing == ("shard-1",)
    assert load.close(14.0).sources_missing == ("router-0", "shard-1")
    load.forget("router-0")
    assert load.close(16.0).sources_missing == ("shard-1",)


@pytest.mark.parametrize(
    ("report", "says"),
    [
        (demand(1, [-1], [1]), r"key must lie in \[0, 12\), got -1"),
        (demand(1, [12], [1]), "got 12..12"),
        (demand(1, [0], [-1]), "pairs must be >= 0, got -1"),
        (demand(1, [0, 1], [1]), "one pair count a key"),
        (demand(-1, [0], [1]), "seq must be >= 0"),
        (hotness(1, [0], [1], [0.1], rank=2), r"rank 2 must lie in \[0, 2\)"),
        (hotness(1, [0], [1], [float("nan")]), "seconds must be 1 finite"),
        (hotness(1, [0], [1], [0.1, 0.2]), "seconds must be 1 finite"),
    ],
)
def test_a_report_that_cannot_be_is_refused_and_stays_unseen(report, says):
    load = folder()
    add = load.add_hotness if isinstance(report, HotnessReport) else load.add_demand
    with pytest.raises(LoadError, match=says):
        add(report, 10.0)
    assert load.acked_seq(report.source, 1) == NOTHING_ACKED
    assert load.close(12.0).executed_pairs.sum() == 0


def test_keys_must_be_whole_numbers():
    report = demand(1, [0], [1])
    floats = DemandReport(
        source="r", incarnation=1, seq=1, at_s=0.0, key=report.key * 1.0, pairs=report.pairs
    )
    with pytest.raises(LoadError, match="must be integers"):
        folder().add_demand(floats, 10.0)


def test_a_window_cannot_end_before_it_began():
    with pytest.raises(LoadError, match="opened at 10"):
        folder().close(9.0)


@pytest.mark.parametrize("wrong", [{"num_layers": 0}, {"sub_windows": 0}, {"window_s": 0.0}])
def test_sizes_of_a_folder_must_be_positive(wrong):
    with pytest.raises(LoadError, match="must be >= 1"):
        folder(**wrong)


def test_history_keeps_the_last_windows_and_survives_the_journal():
    spec = make_spec()
    history = LoadHistory(kept=2)
    for index in range(3):
        window = make_window(spec, make_demand(spec, base=8.0 * (index + 1)), index=index)
        history = history.with_window(window)
    assert [window.index for window in history.windows] == [1, 2]
    assert history.rates()[:, 0, 0, 0].tolist() == [8.0, 12.0], "pairs a second, windows of 2 s"
    read = decode_as(encode(history), LoadHistory)
    assert encode(read) == encode(history)
    assert np.array_equal(read.rates(), history.rates())


def test_history_refuses_windows_of_another_model():
    spec, other = make_spec(), make_spec(num_experts=5)
    history = LoadHistory(kept=2).with_window(make_window(spec, make_demand(spec)))
    with pytest.raises(LoadError, match="start a new history"):
        history.with_window(make_window(other, make_demand(other)))


def test_a_window_of_no_length_has_no_rate():
    spec = make_spec()
    assert demand_rate(make_window(spec, make_demand(spec, base=8.0), window_s=0.0)).sum() == 0


def test_what_waits_in_routers_is_told_as_it_stands_when_the_window_closes():
    loads = folder()
    first, second = key_of(0, 1), key_of(1, 2, Phase.DECODE)
    loads.set_queued("router-0", np.array([first], np.int32), np.array([7], np.int64))
    loads.set_queued("router-0", np.array([first], np.int32), np.array([5], np.int64))
    loads.set_queued("router-1", np.array([first, second], np.int32), np.array([1, 2], np.int64))
    loads.set_queued("router-2", np.array([first], np.int32), np.array([99], np.int64))
    loads.forget("router-2")
    window = loads.close(12.0)
    assert window.queued[Phase.PREFILL].tolist() == [[0, 6, 0], [0, 0, 0]]
    assert window.queued[Phase.DECODE].tolist() == [[0, 0, 0], [0, 0, 2]]
    assert not window.demand.any()
    assert not loads.close(14.0).queued.any()


def test_a_queue_that_cannot_be_is_refused_and_the_word_before_stands():
    loads = folder()
    key = np.array([key_of(0, 0)], np.int32)
    loads.set_queued("router-0", key, np.array([3], np.int64))
    with pytest.raises(LoadError, match="pairs must be >= 0"):
        loads.set_queued("router-0", key, np.array([-1], np.int64))
    assert loads.close(12.0).queued.sum() == 3


def test_a_window_that_says_nothing_of_queues_has_none():
    window = make_window(make_spec(num_layers=2), make_demand(make_spec(num_layers=2)))
    assert window.queued.shape == window.executed_pairs.shape
    assert not window.queued.any()
    old = msgspec.msgpack.decode(encode(window))
    del old["queued"]
    again = decode_as(msgspec.msgpack.encode(old), LoadWindow)
    assert encode(again) == encode(window)
