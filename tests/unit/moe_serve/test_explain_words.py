"""Sentences and next steps: every kind has both, with the numbers in them."""

from __future__ import annotations

from pathlib import Path

import pytest

from moe_serve.explain.cause import Cause, Kind
from moe_serve.explain.words import controller_away, next_step, sentence

HOT = {"replicas": 1.0, "layers": 1.0, "times_even_share": 3.21}
OVER = {
    "queue_share": 0.5,
    "wait_share": 0.0,
    "busy_share": 0.91,
    "waiting_requests": 7.0,
    "refused_requests": 0.0,
}
COLD = {"experts_missing": 0.0, "ranks_silent": 0.0, "ranks_cold": 1.0}
SLOW = {"times_slower": 2.5, "ranks": 1.0, "ranks_alike": 3.0}
MEMORY = {"spare_slots": 0.0, "memory_errors": 0.0}


@pytest.mark.parametrize(
    ("cause", "said"),
    [
        (
            Cause(Kind.HOT_EXPERT, 0.42, HOT, rank=2, layer=1, expert=6),
            "expert 6 of layer 1 is hot: rank 2 has 3.2 x its even share of the layer and answers "
            "last, with one replica of the expert; it costs 42% of the time of requests",
        ),
        (
            Cause(Kind.HOT_EXPERT, 0.3, HOT | {"replicas": 2.0, "layers": 2.0}),
            "with 2 replicas of the expert (and one layer more is like it)",
        ),
        (Cause(Kind.HOT_EXPERT, 0.3, HOT | {"layers": 5.0}), "(and 4 layers more are like it)"),
        (
            Cause(Kind.IMBALANCE, 0.3, {"times_even_share": 1.5}, rank=1, layer=4),
            "rank 1 has 1.5 x its even share of layer 4",
        ),
        (
            Cause(Kind.SLOW_RANK, 0.3, SLOW | {"ranks": 2.0}, rank=3),
            "rank 3 is slow (and 1 more): it takes 2.5 x as long to compute a pair as others of "
            "its profile;",
        ),
        (
            Cause(Kind.SLOW_RANK, 0.3, SLOW | {"ranks_alike": 1.0}, rank=3),
            "2.5 x as long to compute a pair as its profile says, compared with the other ranks;",
        ),
        (
            Cause(
                Kind.COPY,
                0.3,
                {"source_rank": 0.0, "target_rank": 3.0, "times_slower": 2.0},
                rank=3,
            ),
            "an expert is copied from rank 0 to rank 3",
        ),
        (
            Cause(Kind.COPY, 0.3, {"source_rank": -1.0, "target_rank": 3.0, "times_slower": 2.0}),
            "an expert is copied into rank 3",
        ),
        (Cause(Kind.OVERLOAD, 0.5, OVER), "7 wait for a permit now, 0 were refused"),
        (
            Cause(Kind.OVERLOAD, 0.5, OVER | {"queue_share": 0.1, "wait_share": 0.5}),
            "every rank has a queue and computes 91% of the time",
        ),
        (Cause(Kind.COLD_START, 0.5, COLD, rank=1), "rank 1 has only just begun to serve"),
        (
            Cause(Kind.COLD_START, 0.5, COLD | {"experts_missing": 8.0}, rank=1),
            "8 experts have no replica until rank 1 has loaded them",
        ),
        (
            Cause(Kind.COLD_START, 0.5, COLD | {"ranks_silent": 1.0, "ranks_cold": 0.0}, rank=1),
            "rank 1 does not answer, and requests wait for it",
        ),
        (Cause(Kind.MEMORY, 0.5, MEMORY), "no slot is free beyond what each expert needs"),
        (
            Cause(Kind.MEMORY, 0.5, MEMORY | {"memory_errors": 4.0}, rank=2),
            "rank 2 had too little memory for 4 batches",
        ),
        (controller_away(), "the controller does not answer; routers go on with the table"),
    ],
)
def test_a_cause_is_told_with_its_numbers(cause: Cause, said: str) -> None:
    assert said in sentence(cause)
    assert next_step(cause).endswith(tuple("abcdefghijklmnopqrstuvwxyz)"))


def test_every_kind_is_in_the_explanation_of_how_causes_are_found() -> None:
    text = (Path(__file__).parents[3] / "docs" / "explanation.md").read_text(encoding="utf-8")
    told = [kind for kind in Kind if kind is not Kind.CONTROLLER_AWAY]
    assert all(f"`{kind}`" in text for kind in told)
