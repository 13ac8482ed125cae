"""Exactly once, whatever happens to sub-calls: the output is the oracle's."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from placement.roles.calls import Cause
from placement.roles.router import RouterRole
from placement.roles.router_records import Dispatch, Failure, PlanJob, RouterRules
from placement.routing import RankAddress, RoutingTable

NUM_EXPERTS = 6
NUM_RANKS = 4


def table_of(placement: list[list[int]], epoch: int) -> RoutingTable:
    """Table of one layer: for each expert the ranks that hold it; tag = 1000 * epoch + slot."""
    ranks = [rank for hosts in placement for rank in hosts]
    ptr = np.cumsum([0, *map(len, placement)]).astype(np.int32)
    slots = np.arange(len(ranks), dtype=np.int32)
    return RoutingTable(
        term=1,
        epoch=epoch,
        model="m",
        weights_version="v",
        num_layers=1,
        num_experts=NUM_EXPERTS,
        replica_ptr=ptr,
        replica_rank=np.array(ranks, np.int32),
        replica_slot=slots,
        replica_tag=slots.astype(np.int64) + 1000 * epoch,
        ranks=tuple(
            RankAddress(rank=r, node=f"n{r}", address=f"inproc://{r}", incarnation=1)
            for r in range(NUM_RANKS)
        ),
    )


class World:
    """Drives a RouterRole with answers drawn by Hypothesis."""

    def __init__(self, data: st.DataObject, rules: RouterRules) -> None:
        self.data = data
        self.role = RouterRole(3, 1, NUM_EXPERTS, rules)
        self.epoch = 0
        self.publish()
        self.way: list[Dispatch] = []
        self.at_s = 0.0
        self.failed: Failure | None = None
        self.finished = False

    def publish(self) -> None:
        hosts = st.lists(st.integers(0, NUM_RANKS - 1), min_size=1, max_size=3, unique=True)
        drawn = self.data.draw(st.lists(hosts, min_size=NUM_EXPERTS, max_size=NUM_EXPERTS))
        self.epoch += 1
        self.role.accept(table_of([sorted(h) for h in drawn], self.epoch))

    def start(self, job: PlanJob | Failure | None) -> None:
        if isinstance(job, Failure):
            self.failed = job
        elif job is not None:
            self.way += self.role.commit(job, job.run(), self.at_s)

    def pump(self) -> None:
        for retry in self.role.take_retries(self.at_s):
            self.start(self.role.plan_cover(retry.call_id, Cause.RETRY, self.at_s))

    def something_happens(self) -> None:
        """A new table, a disturbance, hedges, or nothing."""
        if self.data.draw(st.integers(0, 9)) == 0:
            self.publish()
        if self.data.draw(st.integers(0, 4)) == 0:
            self.disturb()
        if self.data.draw(st.booleans()):
            for call_id, _ in self.role.hedges_due(self.at_s):
                self.start(self.role.plan_cover(call_id, Cause.HEDGE, self.at_s))

    def disturb(self) -> None:
        """Connections break and heal, and the controller suspects whom it likes."""
        rank = self.data.draw(st.integers(0, NUM_RANKS - 1))
        self.role.connection(rank, 1, self.data.draw(st.sampled_from(["", "reset"])))
        self.role.told_suspects(self.data.draw(st.sets(st.integers(0, NUM_RANKS))))

    def heal(self) -> None:
        """Nothing is on its way: what is held or waits for the budget can go on."""
        for rank in range(NUM_RANKS):
            self.role.connection(rank, 1, "")
        self.role.told_suspects(())
        self.pump()

    def answer(self, sent: Dispatch, gate: np.ndarray, rows: np.ndarray) -> None:
        how = self.data.draw(st.sampled_from(["serve", "serve", "lose", "mixed"]))
        part = sent.part
        count = part.row_id.shape[0]
        if how == "lose":
            step = self.role.lost(sent.sub_id, fault=True, at_s=self.at_s)
        else:
            status = np.zeros(count, np.uint8)
            if how == "mixed":
                status[:] = self.data.draw(
                    st.lists(st.sampled_from([0, 1, 2]), min_size=count, max_size=count)
                )
            partial = np.zeros((count, rows.shape[1]))
            for at, k, expert in zip(part.pair_row, part.pair_k, part.pair_expert, strict=True):
                row = part.row_id[at]
                partial[at] += gate[row, k] * (expert + 1) * rows[row]
            step = self.role.answered(
                sent.sub_id,
                status,
                partial[status == 0],
                backlog_s=0.001,
                backlog_seq=sent.sub_id,
                compute_s=0.001,
                at_s=self.at_s,
            )
        if step.failure is not None:
            self.failed = step.failure
        self.finished = self.finished or step.finished


@pytest.mark.parametrize("hedged", [False, True])
@given(data=st.data())
@settings(max_examples=150)
def test_combine_is_the_oracle_and_adds_each_contribution_once(
    hedged: bool, data: st.DataObject
) -> None:
    rules = RouterRules(
        max_attempts=50,
        hedge_after_s=0.5 if hedged else None,
        hedge_share=1.0,
        faults_to_eject=10**6,
        memory_bound_pairs=data.draw(st.sampled_from([0.0, 2.0, 50.0])),
    )
    world = World(data, rules)
    tokens, k = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 3))
    seed = data.draw(st.integers(0, 2**16))
    rng = np.random.default_rng(seed)
    ids = np.stack([rng.permutation(NUM_EXPERTS)[:k] for _ in range(tokens)]).astype(np.int32)
    valid = rng.integers(0, 4, (tokens, k)) > 0
    valid[0, 0] = True
    gate, rows = rng.standard_normal((tokens, k)), rng.standard_normal((tokens, 3))
    pairs = valid.astype(np.uint8)
    world.start(world.role.open_request(1, 0, ids, pairs, at_s=0.0, deadline_at_s=1000.0))
    computed: dict[int, Dispatch] = {}
    for _ in range(400):
        if world.finished or world.failed:
            break
        world.at_s += 1.0
        if not world.way:
            assert world.role.waiting, "an open call is on its way or waits"
            world.heal()
            continue
        world.something_happens()
        sent = world.way.pop(data.draw(st.integers(0, len(world.way) - 1)))
        computed[sent.sub_id] = sent
        world.answer(sent, gate, rows)
        world.pump()
    added = world.role.close_request(1)
    while world.way:
        late = world.way.pop()
        world.answer(late, gate, rows)
    assert world.role.open_calls == 0
    assert world.role.open_sub_calls == 0
    assert world.role.quiesced_epoch == world.role.applied_epoch
    assert world.role.take_retries() == ()
    assert not world.role.waiting
    counted: Counter[tuple[int, int]] = Counter()
    output = np.zeros((tokens, 3))
    for one in added:
        output[one.row_id] += one.partial[one.take]
        part = computed[one.sub_id].part
        for at, pair_k in zip(part.pair_row, part.pair_k, strict=True):
            if part.row_id[at] in one.row_id:
                counted[int(part.row_id[at]), int(pair_k)] += 1
    assert max(counted.values(), default=0) <= 1
    if world.failed is None:
        assert world.finished
        assert set(counted) == set(zip(*map(list, np.nonzero(valid)), strict=True))
        weight = np.where(valid, gate * (ids + 1), 0.0).sum(axis=1)
        np.testing.assert_allclose(output, weight[:, None] * rows, rtol=1e-9, atol=1e-12)
