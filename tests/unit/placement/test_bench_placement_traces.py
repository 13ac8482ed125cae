"""Timelines of the placement benchmark: what the recorded traces and the made-up demand promise."""

import os
from itertools import pairwise

import numpy as np
import pytest

from benchmarks.placement_synthetic import (
    DOMAINS,
    TOTAL_TOKENS,
    request_share,
    synthetic_counts,
    synthetic_source,
)
from benchmarks.placement_traces import (
    CASES,
    DATA_VARIABLE,
    ORDERS,
    TracesMissing,
    count_windows,
    load_case,
    load_trace,
    orders_of,
    request_domains,
    request_order,
    timeline,
)

recorded = pytest.mark.skipif(
    not os.environ.get(DATA_VARIABLE), reason=f"{DATA_VARIABLE} does not name the recorded traces"
)
LABELS = ["a", "b", "c"] * 40


@pytest.mark.parametrize("order", ORDERS)
def test_an_order_is_a_permutation_of_the_requests_and_follows_its_seed(order: str) -> None:
    first, again, other = (
        request_order(LABELS, order, np.random.default_rng(seed)) for seed in (1, 1, 2)
    )
    assert sorted(first) == list(range(len(LABELS)))
    assert first == again
    assert first != other


def test_blocks_bring_each_domain_once_in_an_order_that_the_seed_decides() -> None:
    runs = []
    for seed in range(8):
        line = request_order(LABELS, "blocks", np.random.default_rng(seed))
        labels = [LABELS[i] for i in line]
        runs.append(tuple(a for a, b in zip(labels, [*labels[1:], None], strict=True) if a != b))
    assert {len(run) for run in runs} == {3}
    assert len(set(runs)) > 1


def test_shifting_moves_from_the_first_domain_to_the_last_without_a_sharp_change() -> None:
    line = request_order(LABELS, "shifting", np.random.default_rng(3))
    when = {label: np.mean([line.index(i) for i in range(len(LABELS)) if LABELS[i] == label])
            for label in "abc"}  # fmt: skip
    spread = sorted(when.values())
    assert spread[2] - spread[0] > len(LABELS) / 3
    labels = [LABELS[i] for i in line]
    changes = sum(a != b for a, b in pairwise(labels))
    assert changes > 10


def test_windows_count_consecutive_tokens_and_drop_what_fills_none() -> None:
    # 5 tokens, one layer, top-2; windows of 4 tokens in 2 quarters: the last token is dropped
    ids = np.array([[[0, 1]], [[0, 2]], [[3, 1]], [[3, 2]], [[0, 1]]], dtype=np.uint8)
    counted = count_windows(ids, 4, 4, 2)
    assert counted.tolist() == [[[[2, 1, 1, 0]], [[0, 1, 1, 2]]]]


@pytest.mark.parametrize(
    ("order", "tokens", "passes", "words"),
    [
        ("sorted", 2048, 1, "order 'sorted'"),
        ("mixed", 2047, 1, "multiple of 4"),
        ("mixed", 0, 1, "multiple of 4"),
        ("mixed", 2048, 0, "passes"),
        ("mixed", 1 << 22, 1, "do not fill|fill a window"),
    ],
)
def test_a_timeline_that_cannot_be_is_refused(
    order: str, tokens: int, passes: int, words: str
) -> None:
    small = CASES["synthetic"]
    with pytest.raises(ValueError, match=words):
        timeline(small, order, 0, tokens, passes=passes, requests=[0, 1])


def test_requests_outside_the_trace_are_refused() -> None:
    for wrong in ([390], [-1], []):
        with pytest.raises(ValueError, match="requests"):
            timeline(CASES["synthetic"], "mixed", 0, requests=wrong)


def test_a_missing_trace_says_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(DATA_VARIABLE, raising=False)
    with pytest.raises(TracesMissing, match=DATA_VARIABLE):
        load_case("deepseek8")
    monkeypatch.setenv(DATA_VARIABLE, "/nowhere")
    with pytest.raises(TracesMissing, match="does not exist"):
        load_case("deepseek8")
    assert load_case("synthetic").slots == 288
    with pytest.raises(ValueError, match="not one of"):
        load_case("unknown")


@recorded
@pytest.mark.parametrize("name", ["deepseek8", "gptoss8"])
def test_every_part_of_a_recorded_timeline_holds_its_tokens(name: str) -> None:
    case = load_case(name)
    windows = timeline(case, "mixed", 5)
    assert windows.dtype == np.int64
    assert windows.shape[1:] == (4, case.layers, case.experts)
    assert (windows.sum(axis=-1) == 512 * case.top_k).all()
    assert (windows <= 512).all()
    # the same tokens, cut once: quarters are parts of the windows
    whole = timeline(case, "mixed", 5, quarters=1)
    assert np.array_equal(whole[:, 0], windows.sum(axis=1))
    assert not np.array_equal(windows, timeline(case, "mixed", 6))
    assert np.array_equal(windows, timeline(case, "mixed", 5))


@recorded
def test_tokens_of_a_request_stay_together_and_in_order() -> None:
    case = load_case("gptoss8")
    trace = load_trace(case)
    chosen = [3, 11, 20]
    lengths = [int(trace.first[r + 1] - trace.first[r]) for r in chosen]
    # windows of one token show every token of the timeline
    single = timeline(case, "mixed", 2, 1, 1, requests=chosen)
    assert len(single) == sum(lengths)
    rest = single[:, 0]
    seen = []
    while len(rest):
        for request in chosen:
            ids = trace.ids[trace.first[request] : trace.first[request + 1]]
            wanted = count_windows(ids, case.experts, 1, 1)[:, 0]
            if request not in seen and np.array_equal(rest[: len(wanted)], wanted):
                seen.append(request)
                rest = rest[len(wanted) :]
                break
        else:
            pytest.fail("the timeline goes on with no whole request")
    assert sorted(seen) == chosen


@recorded
def test_passes_go_through_the_trace_again_in_another_order() -> None:
    case = load_case("gptoss8")
    once, twice = (timeline(case, "mixed", 1, 512, 1, passes=n) for n in (1, 2))
    assert np.array_equal(twice[: len(once)], once)
    assert len(twice) >= 2 * len(once)
    assert not np.array_equal(twice[len(once) : 2 * len(once)], once)


@recorded
def test_labels_are_finer_than_domains_where_it_matters() -> None:
    gptoss, deepseek = load_case("gptoss8"), load_case("deepseek8")
    assert "labels" in orders_of(gptoss)
    assert "labels" not in orders_of(deepseek)
    assert np.array_equal(timeline(deepseek, "labels", 1), timeline(deepseek, "blocks", 1))
    assert not np.array_equal(timeline(gptoss, "labels", 1), timeline(gptoss, "blocks", 1))
    assert len(set(load_trace(gptoss).labels)) > 60


@recorded
def test_domains_of_the_recorded_traces() -> None:
    assert set(request_domains(load_case("deepseek8"))) == {"intent", "law", "summary"}
    assert {"stem", "law", "humanities"} <= set(request_domains(load_case("gptoss8")))


def test_made_up_parts_hold_their_tokens_and_no_expert_more_than_one_a_token() -> None:
    source = synthetic_source(3, 16, seed=4)
    line = list(range(len(source.requests)))
    assert sum(request.tokens for request in source.requests) == TOTAL_TOKENS
    parts = synthetic_counts(source, line, 8, 4096, seed=1)
    assert parts.shape == (TOTAL_TOKENS // 4096, 3, 16)
    assert (parts.sum(axis=-1) == 4096 * 8).all()
    assert parts.max() <= 4096
    assert np.array_equal(parts, synthetic_counts(source, line, 8, 4096, seed=1))
    assert not np.array_equal(parts, synthetic_counts(source, line, 8, 4096, seed=2))


def test_made_up_demand_is_as_skewed_and_as_drifting_as_the_recorded() -> None:
    # Recorded, DeepSeek-V2-Lite and GPT-OSS: max / mean of a domain's load 3.9 and 3.2, cosine
    # between domains 0.71 and 0.87. Variation of parts of 512 tokens beyond chance: 0.16, 0.36.
    source = synthetic_source(26, 64, seed=0)
    total = source.popularity
    assert 3.2 < (total.max(axis=-1) / total.mean(axis=-1)).mean() < 4.5
    length = np.linalg.norm(total, axis=-1)
    cosine = (total[0] * total[1]).sum(axis=-1) / length[0] / length[1]
    assert 0.68 < cosine.mean() < 0.88
    mine = [i for i, r in enumerate(source.requests) if r.domain == DOMAINS[0]]
    parts = synthetic_counts(source, mine, 6, 512, seed=0).astype(np.float64)
    mean = parts.mean(axis=0)
    beyond = np.sqrt(np.maximum(parts.var(axis=0) - mean, 0.0).mean()) / mean.mean()
    assert 0.15 < beyond < 0.45
    share = request_share(source, 7)
    assert np.allclose(share.sum(axis=1), 1.0)
