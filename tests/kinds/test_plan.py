"""Placements that nobody can serve: an expert twice on one rank, and sizes that do not divide."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from placement.layout import EMPTY, ExpertLayout
from placement.policy import POLICIES, PolicyError, PolicyInput, propose
from tests.builders import make_layout, make_request, make_spec, make_topology


def zipf(experts: int, exponent: float, seed: int) -> np.ndarray:
    share = np.arange(1, experts + 1, dtype=np.float64) ** -exponent
    return np.random.default_rng(seed).permutation(share / share.sum())[None] * 1e6


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_no_rank_holds_an_expert_twice_however_hot_it_is(policy: str) -> None:
    """One expert draws most of the load and there are few spare slots: a packing by load alone
    puts its replicas together."""
    experts, ranks = 64, 8
    spec = make_spec(num_experts=experts)
    topology = make_topology([9] * ranks, ranks_per_node=2)
    empty = make_layout([[EMPTY] * 9] * ranks, num_experts=experts)
    planned = 0
    for seed in range(300 if policy == "eplb" else 40):
        for exponent in (1.3,) if seed % 10 else (0.7, 1.3, 3.0):
            request = make_request(
                spec, topology, empty, zipf(experts, exponent, seed), staging_slots=0
            )
            request = msgspec.structs.replace(request, uniform=policy == "eplb")
            layout = propose(policy, request)
            assert int(layout.hosts.max()) == 1, f"seed {seed}: an expert twice on one rank"
            assert layout.hosts.any(axis=1).all(), f"seed {seed}: an expert is nowhere"
            planned += 1
    assert planned >= 40


def proposed(policy: str, request: PolicyInput) -> tuple[ExpertLayout | None, str]:
    """The layout, or what the policy says against the request."""
    try:
        return propose(policy, request), ""
    except PolicyError as error:
        return None, str(error)


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_every_size_gives_a_whole_plan_or_words_that_name_the_numbers(policy: str) -> None:
    """Experts that do not divide by ranks, no spare slots, too few slots: never an assertion, never
    a plan that lacks something."""
    whole = refused = 0
    for experts in (1, 2, 3, 5, 7, 12, 20):
        for ranks in range(1, 8):
            for spare in range(-2, 10):
                slots = -(-(experts + spare) // ranks)
                if slots < 0:
                    continue
                spec = make_spec(num_experts=experts, top_k=1)
                topology = make_topology([slots] * ranks)
                empty = make_layout([[EMPTY] * max(slots, 1)] * ranks, num_experts=experts)
                request = make_request(spec, topology, empty, staging_slots=0)
                layout, words = proposed(policy, request)
                if layout is None:
                    assert slots * ranks < experts or policy == "eplb", words
                    assert any(digit in words for digit in "0123456789"), words
                    refused += 1
                    continue
                assert layout.hosts.any(axis=1).all()
                assert int(layout.hosts.max()) == 1
                assert ((layout.slots != EMPTY).sum(axis=1) <= slots).all()
                whole += 1
    assert whole > 100
    assert refused > 10
