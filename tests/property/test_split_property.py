"""The splitter against references written another way, on layouts of any shape."""

from itertools import combinations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.split_proof import Oracle
from placement.split import (
    assign_pairs,
    compile_layer,
    count_ids,
    level,
    rank_loads,
    split_activated,
    split_counts,
)

DETERMINISTIC = settings(max_examples=300, derandomize=True, database=None, deadline=None)


@st.composite
def layers(draw):
    """(slot_expert, slot_rank, num_experts, num_ranks), every expert with at least one slot."""
    num_experts = draw(st.integers(1, 8))
    num_ranks = draw(st.integers(1, 6))
    extra = draw(st.lists(st.integers(-2, num_experts - 1), max_size=10))
    slot_expert = draw(st.permutations(list(range(num_experts)) + extra))
    ranks = st.lists(
        st.integers(0, num_ranks - 1), min_size=len(slot_expert), max_size=len(slot_expert)
    )
    return slot_expert, draw(ranks), num_experts, num_ranks


def amounts(size):
    small = st.lists(st.integers(0, 5), min_size=size, max_size=size)
    large = st.lists(st.integers(0, 1 << 50), min_size=size, max_size=size)
    return small | large


@st.composite
def splits(draw):
    layer = draw(layers())
    return layer, draw(amounts(layer[2])), draw(amounts(layer[3])), draw(st.integers(0, 1 << 64))


@st.composite
def batches(draw):
    layer = draw(layers())
    width = draw(st.integers(1, 4))
    pair = st.integers(-1, layer[2] - 1)
    row = st.lists(pair, min_size=width, max_size=width)
    ids = draw(st.lists(row, min_size=1, max_size=12))
    return layer, np.array(ids, np.int32), draw(st.integers(0, 1 << 64))


def wide_layer(rng):
    """(compiled, num_experts): up to 96 experts on up to 24 ranks, from no spare slots to many."""
    num_experts, num_ranks = int(rng.integers(2, 97)), int(rng.integers(2, 25))
    extra = rng.integers(0, num_experts, int(rng.integers(0, num_experts + 1)))
    experts = rng.permutation(np.concatenate((np.arange(num_experts), extra)))
    ranks = rng.permutation(np.arange(experts.size) % num_ranks)
    return compile_layer(experts, ranks, num_experts, num_ranks), num_experts


def closed_set_bound(layer, counts, backlog):
    """Least possible maximum: over all sets of ranks, what only they can serve, spread evenly."""
    slot_expert, slot_rank, num_experts, num_ranks = layer
    hosts = [
        {rank for slot, rank in zip(slot_expert, slot_rank, strict=True) if slot == expert}
        for expert in range(num_experts)
    ]
    bound = 0
    for size in range(1, num_ranks + 1):
        for ranks in combinations(range(num_ranks), size):
            forced = sum(backlog[rank] for rank in ranks)
            forced += sum(counts[e] for e in range(num_experts) if hosts[e] <= set(ranks))
            bound = max(bound, -(-forced // size))
    return bound


class ReferenceChoice:
    """The three passes over a batch in plain lists; `chosen` maps (token, k) to a replica."""

    def __init__(self, layer, ids, quotas, start):
        self.ids = ids
        self.left = list(quotas)
        self.rank = layer.replica_rank.tolist()
        ptr = layer.replica_ptr
        self.replicas = [range(ptr[e], ptr[e + 1]) for e in range(layer.num_experts)]
        self.able = [[r for r in replicas if quotas[r] > 0] for replicas in self.replicas]
        self.chosen = {}
        tokens = [(start + i) % len(ids) for i in range(len(ids))]
        still_open = {token: self.sole_and_join(token) for token in tokens}
        for token in tokens:
            while (rank := self.meeting_rank(still_open[token])) is not None:
                still_open[token] = self.join(still_open[token], {rank})
        for token in tokens:
            for pair in still_open[token]:
                self.take(pair, self.replicas[ids[pair]])

    def take(self, pair, candidates):
        replica = max(candidates, key=lambda r: (self.left[r], -r))
        self.left[replica] -= 1
        self.chosen[pair] = replica

    def join(self, pairs, used):
        for pair in pairs:
            there = [r for r in self.replicas[self.ids[pair]] if self.rank[r] in used]
            there = [r for r in there if self.left[r] > 0]
            if there:
                self.take(pair, there)
        return [pair for pair in pairs if pair not in self.chosen]

    def sole_and_join(self, token):
        pairs = [(token, k) for k in range(self.ids.shape[1]) if self.ids[token, k] >= 0]
        for pair in pairs:
            if len(self.able[self.ids[pair]]) == 1:
                self.take(pair, self.able[self.ids[pair]])
        taken = [pair for pair in pairs if pair in self.chosen]
        used = {self.rank[self.chosen[pair]] for pair in taken}
        return self.join([pair for pair in pairs if pair not in self.chosen], used)

    def meeting_rank(self, pairs):
        cover, best, most = {}, None, 1
        for pair in pairs:
            replicas = [r for r in self.replicas[self.ids[pair]] if self.left[r] > 0]
            for rank in dict.fromkeys(self.rank[r] for r in replicas):
                cover[rank] = cover.get(rank, 0) + 1
                if cover[rank] > most:
                    best, most = rank, cover[rank]
        return best


@DETERMINISTIC
@given(splits())
def test_the_maximum_is_the_closed_set_bound(case):
    layer, counts, backlog, tie_offset = case
    compiled = compile_layer(*layer)
    quotas = split_counts(compiled, counts, backlog, tie_offset)
    assert min(quotas) >= 0
    served = np.zeros(layer[2], np.int64)
    np.add.at(served, np.asarray(layer[0])[compiled.replica_slot], quotas)
    assert served.tolist() == counts
    assert rank_loads(compiled, quotas, backlog).max() == closed_set_bound(layer, counts, backlog)


@DETERMINISTIC
@given(splits())
def test_activated_experts_reach_the_closed_set_bound(case):
    layer, counts, backlog, tie_offset = case
    compiled = compile_layer(*layer)
    quotas = split_activated(compiled, counts, backlog, tie_offset)
    read = (quotas > 0).astype(np.int64)
    active = [min(count, 1) for count in counts]
    assert rank_loads(compiled, read, backlog).max() == closed_set_bound(layer, active, backlog)
    for expert, count in enumerate(counts):
        part = quotas[compiled.replica_ptr[expert] : compiled.replica_ptr[expert + 1]]
        assert sorted(part.tolist())[-1] == count == part.sum()


@DETERMINISTIC
@given(st.integers(0, 2**32), st.sampled_from([0.2, 1.0, 3.0]), st.sampled_from([1, 8, 60, 2000]))
def test_no_flow_passes_below_the_maximum_on_wide_layers(seed, skew, mean):
    rng = np.random.default_rng(seed)
    layer, num_experts = wide_layer(rng)
    counts = rng.poisson(mean * rng.gamma(skew, 1 / skew, num_experts))
    backlog = rng.integers(0, 1 + 2 * mean * num_experts // layer.num_ranks, layer.num_ranks)
    backlog[rng.random(layer.num_ranks) < rng.random()] = 0
    oracle = Oracle(layer)
    for given_counts, given_backlog in ((counts, backlog), (counts, 0 * backlog)):
        quotas = split_counts(layer, given_counts, given_backlog, seed)
        reached = int(rank_loads(layer, quotas, given_backlog).max())
        assert oracle.is_least(given_counts, given_backlog, reached)
        assert oracle.passes(given_counts, given_backlog, reached)
    queued = np.minimum(backlog, 6)
    quotas = split_activated(layer, counts, queued, seed)
    worst = int(rank_loads(layer, (quotas > 0).astype(np.int64), queued).max())
    assert oracle.is_least(np.minimum(counts, 1), queued, worst)


@DETERMINISTIC
@given(splits(), st.randoms(use_true_random=False))
def test_relabelling_experts_only_relabels(case, random):
    (slot_expert, slot_rank, num_experts, num_ranks), counts, backlog, tie_offset = case
    name = list(range(num_experts))
    random.shuffle(name)
    renamed_slots = [e if e < 0 else name[e] for e in slot_expert]
    renamed_counts = [0] * num_experts
    for expert, count in enumerate(counts):
        renamed_counts[name[expert]] = count
    tokens = level(slot_expert, slot_rank, counts, num_ranks, backlog, tie_offset)
    renamed = level(renamed_slots, slot_rank, renamed_counts, num_ranks, backlog, tie_offset)
    assert tokens.tolist() == renamed.tolist()


@DETERMINISTIC
@given(st.integers(1, 6), st.integers(0, 40), st.integers(0, 1 << 64), st.data())
def test_one_expert_fills_its_hosts_like_water(hosts, count, tie_offset, data):
    backlog = data.draw(st.lists(st.integers(0, 15), min_size=hosts, max_size=hosts))
    layer = compile_layer([0] * hosts, range(hosts), 1, hosts)
    quotas = split_counts(layer, [count], backlog, tie_offset)
    loads = list(backlog)
    for _ in range(count):
        loads[loads.index(min(loads))] += 1
    assert sorted(rank_loads(layer, quotas, backlog).tolist()) == sorted(loads)


@DETERMINISTIC
@given(batches())
def test_pair_choice_meets_quotas_and_equals_its_reference(case):
    layer, ids, tie_offset = case
    compiled = compile_layer(*layer)
    valid = ids >= 0
    counts = count_ids(ids, valid, layer[2])
    assert counts.tolist() == np.bincount(ids[valid], minlength=layer[2]).tolist()
    for split in (split_counts, split_activated):
        quotas = split(compiled, counts, None, tie_offset)
        chosen = assign_pairs(compiled, ids, valid, quotas, tie_offset)
        assert (chosen >= 0).tolist() == valid.tolist()
        met = np.bincount(chosen[valid], minlength=compiled.num_replicas)
        assert met.tolist() == quotas.tolist()
        slots = compiled.replica_slot[chosen[valid]]
        assert np.asarray(layer[0])[slots].tolist() == ids[valid].tolist()
        # tie_offset turns the first token by the golden section of the circle
        point = (tie_offset & (2**63 - 1)) * 0x9E3779B97F4A7C15 % 2**64
        start = (point >> 32) * len(ids) >> 32
        expected = ReferenceChoice(compiled, ids, quotas.tolist(), start).chosen
        assert {
            pair: int(chosen[pair]) for pair in zip(*np.nonzero(valid), strict=True)
        } == expected


@DETERMINISTIC
@given(batches(), st.data())
def test_room_never_costs_a_row_nor_passes_its_limit(case, data):
    layer, ids, tie_offset = case
    compiled = compile_layer(*layer)
    valid = ids >= 0
    quotas = split_counts(compiled, count_ids(ids, valid, layer[2]), None, tie_offset)
    spare = st.lists(st.integers(-1, 5), min_size=layer[3], max_size=layer[3])
    room = data.draw(spare)
    exact = assign_pairs(compiled, ids, valid, quotas, tie_offset)
    chosen = assign_pairs(compiled, ids, valid, quotas, tie_offset, room)
    assert (chosen >= 0).tolist() == valid.tolist()
    slots = compiled.replica_slot[chosen[valid]]
    assert np.asarray(layer[0])[slots].tolist() == ids[valid].tolist()
    taken = np.bincount(compiled.replica_rank[chosen[valid]], minlength=layer[3])
    assert (taken <= rank_loads(compiled, quotas) + np.maximum(room, 0)).all()
    for before, after in zip(exact, chosen, strict=True):
        rows = [len({compiled.replica_rank[r] for r in row if r >= 0}) for row in (before, after)]
        assert rows[1] <= rows[0]
    assert assign_pairs(compiled, ids, valid, quotas, tie_offset, room).tolist() == chosen.tolist()
    none = [0] * layer[3]
    roomless = assign_pairs(compiled, ids, valid, quotas, tie_offset, none)
    rows = [
        sum(len({compiled.replica_rank[r] for r in row if r >= 0}) for row in choice)
        for choice in (exact, roomless)
    ]
    assert rows[1] <= rows[0]


@DETERMINISTIC
@given(batches(), st.randoms(use_true_random=False), st.booleans())
def test_relabelling_experts_only_relabels_pair_choice(case, random, roomy):
    (slot_expert, slot_rank, num_experts, num_ranks), ids, tie_offset = case
    name = list(range(num_experts))
    random.shuffle(name)
    renamed_slots = [e if e < 0 else name[e] for e in slot_expert]
    renamed_ids = np.where(ids >= 0, np.array(name)[ids], -1)
    slots = []
    for experts, batch in ((slot_expert, ids), (renamed_slots, renamed_ids)):
        layer = compile_layer(experts, slot_rank, num_experts, num_ranks)
        quotas = split_counts(layer, count_ids(batch, batch >= 0, num_experts), None, tie_offset)
        room = [2] * num_ranks if roomy else None
        chosen = assign_pairs(layer, batch, batch >= 0, quotas, tie_offset, room)
        slots.append([layer.replica_slot[r] if r >= 0 else -1 for r in chosen.ravel()])
    assert slots[0] == slots[1]
