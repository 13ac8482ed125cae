"""The fence of a shard, field by field: a pair is computed only where everything it names is so."""

from collections.abc import Iterator

import numpy as np
import pytest

from moe_serve.ports import RowStatus, SubReply
from moe_serve.shard.assembly import Shard
from tests.fakes.marker_experts import add, marker_shard, release
from tests.fakes.sub_calls import sub_call

LIFE = 5
HELD = {"incarnation": LIFE, "slot": 1, "layer": 0, "expert": 3}


@pytest.fixture
def shard() -> Iterator[Shard]:
    """Slot 1 holds expert 3 for the second time, slot 2 expert 3 of the other layer."""
    made = marker_shard(incarnation=LIFE)
    made.core.start()
    release(made, 1, add(made, 1, 3, step_id=100), expert=3)
    add(made, 1, 3, step_id=101)
    add(made, 2, 3, layer=1)
    yield made
    made.core.stop()


def asked(shard: Shard, **named: int) -> SubReply:
    """What one row gets with one pair."""
    where = HELD | {"tag": shard.core.slots.ledger.holder(1)[2]} | named
    pair = (0, where["slot"], where["tag"], 1.0, where["expert"])
    row = np.ones((1, shard.core.model.expert.hidden_size), np.float32)
    call = sub_call(row, [pair], layer=where["layer"], incarnation=where["incarnation"])
    answers: list[object] = []
    shard.core.submit(call, row.nbytes, answers.append)
    shard.core.on_compute_thread(lambda: None).result(5)
    shard.core.on_compute_thread(lambda: None).result(5)
    (answer,) = answers
    assert isinstance(answer, SubReply), answer
    return answer


def test_what_is_named_rightly_is_computed(shard: Shard) -> None:
    reply = asked(shard)
    assert reply.row_status.tolist() == [RowStatus.SERVED]
    assert reply.partial[0, 0] == 4.0


@pytest.mark.parametrize(
    "wrong",
    [
        *({"incarnation": life} for life in (1, LIFE - 1, LIFE + 1)),
        *({"tag": tag} for tag in (-1, 0, 1, 3, 4, 1 << 40)),
        *({"slot": slot} for slot in (0, 2, 3, 5, 6, 1 << 30)),
        *({"expert": expert} for expert in (0, 2, 4, 7)),
        {"layer": 1},
    ],
    ids=str,
)
def test_what_names_one_thing_wrongly_is_stale_and_not_computed(
    shard: Shard, wrong: dict[str, int]
) -> None:
    executed = shard.core.counters()["executed_pairs"]
    reply = asked(shard, **wrong)
    assert reply.row_status.tolist() == [RowStatus.STALE]
    assert reply.partial.shape[0] == 0
    assert shard.core.counters()["executed_pairs"] == executed
