"""Where parts go, and what a machine must hold."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from moe_serve.bootstrap.nodes import RayNode, choose_node, needed_bytes, node_of
from moe_serve.bootstrap.preflight import NodeFacts, check
from moe_serve.config import ServiceConfig
from moe_serve.errors import StartRefused

SLOT_BYTES = 1000
A = RayNode("a", "id-a", "10.0.0.1", {"site": "a", "ray.io/node-id": "id-a"})
B = RayNode("b", "id-b", "10.0.0.2", {"site": "b", "ray.io/node-id": "id-b"})
B2 = RayNode("b2", "id-b2", "10.0.0.2", {"site": "b"})
VERSIONS = {"moe-serve": "1", "ray": "2", "numba": "3", "pyzmq": "4"}


def a_config(*groups: dict[str, Any], **fleet: Any) -> ServiceConfig:
    profile = {
        "name": "p",
        "flops_per_s": 1.0,
        "memory_bytes_per_s": 1.0,
        "copy_bytes_per_s": 1.0,
    }
    ranks = [{"slots": 10, "profile": "p", **group} for group in groups]
    return ServiceConfig.model_validate(
        {
            "service": "s",
            "model": {"name": "m", "checkpoint": "package:tiny_moe"},
            "fleet": {"ranks": ranks, **fleet},
            "profiles": [profile],
        }
    )


def test_the_emptiest_matching_node_is_chosen_ties_to_the_lowest_id() -> None:
    assert choose_node([B, A], {}, {}, what="rank 0") is A
    assert choose_node([B, A], {}, {"id-a": 1}, what="rank 0") is B
    assert choose_node([A, B], {"site": "b"}, {"id-b": 9}, what="rank 0") is B
    assert choose_node([A, B], {}, {}, what="rank 0", draining={"id-a"}) is B


def test_no_matching_node_is_one_line_that_names_what_there_is() -> None:
    with pytest.raises(StartRefused) as refused:
        choose_node([A, B], {"site": "c"}, {}, what="rank 3", draining={"id-b"})
    assert refused.value.message == (
        "no node with labels {'site': 'c'} for rank 3; the cluster has 2 alive nodes "
        "(1 draining) with labels site=a, site=b"
    )


def test_a_node_that_is_not_there_is_told_with_those_that_are_and_a_way_out() -> None:
    assert choose_node([A, B], {}, {}, what="rank 3", only_node=B.node) is B
    with pytest.raises(StartRefused) as refused:
        choose_node([B, A], {}, {}, what="rank 3", only_node="bb")
    assert refused.value.message == (
        "no node named 'bb' that takes parts, with labels {} for rank 3; the cluster has 2 alive "
        f"nodes (0 draining) with labels site=a, site=b, named {A.node}, {B.node}; bring that node "
        "up, or remove rank 3 and add one elsewhere"
    )


def test_ranks_spread_over_nodes_and_their_bytes_add_up_by_machine() -> None:
    config = a_config({"count": 4})
    assert needed_bytes(config, [A, B], SLOT_BYTES) == {"id-a": 20_000, "id-b": 20_000}
    # Two logical nodes of one machine share its memory.
    spread = needed_bytes(a_config({"count": 3}), [A, B, B2], SLOT_BYTES)
    assert spread == {"id-a": 10_000, "id-b": 20_000, "id-b2": 20_000}


def test_labels_decide_and_slots_on_a_gpu_take_no_memory_of_the_machine() -> None:
    config = a_config(
        {"count": 2, "node_labels": {"site": "b"}},
        {"count": 1, "budget": "7500", "slots": None, "node_labels": {"site": "a"}},
        {"count": 4, "backend": "torch", "device": "cuda"},
    )
    assert needed_bytes(config, [A, B], SLOT_BYTES) == {"id-a": 7_000, "id-b": 20_000}


@pytest.mark.parametrize(
    ("config", "what"),
    [
        (a_config({"count": 1}, {"count": 1, "node_labels": {"site": "c"}}), "rank 1"),
        (a_config({"count": 1}, router_node_labels={"site": "c"}), "the routers"),
    ],
)
def test_a_part_that_fits_no_node_is_refused_before_anything_starts(
    config: ServiceConfig, what: str
) -> None:
    with pytest.raises(StartRefused, match=f"for {what}"):
        needed_bytes(config, [A, B], SLOT_BYTES)


def test_a_node_of_ray_has_the_name_people_gave_it() -> None:
    info = {"NodeID": "f" * 56, "NodeManagerAddress": "10.0.0.1", "Labels": {"moe.node": "left"}}
    assert node_of(info).node == "left"
    assert node_of({**info, "Labels": None}).node == "f" * 12


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({}, ""),
        ({"free_memory_bytes": 9_999}, "1 bytes of memory missing (9999 free, 10000 needed)"),
        ({"versions": {**VERSIONS, "ray": "1"}}, "ray is 1, here it is 2: install the same"),
        ({"versions": {"moe-serve": ""}}, "moe-serve is absent, here it is 1"),
        ({"checkpoint": "no config.json"}, "checkpoint: no config.json"),
        ({"error": "has left the cluster"}, "has left the cluster"),
    ],
)
def test_what_is_wrong_with_a_node(change: dict[str, Any], problem: str) -> None:
    facts: dict[str, Any] = {
        "node": "a",
        "ip": "10.0.0.1",
        "versions": VERSIONS,
        "checkpoint": "present",
        "free_memory_bytes": 10_000,
        "free_disk_bytes": 0,
    }
    problems = check(NodeFacts(**{**facts, **change}), VERSIONS, 10_000).problems
    assert (not problems) if not problem else problems[0].startswith(problem)


def test_paths_of_a_file_start_at_the_file() -> None:
    config = a_config({"count": 1})
    security = config.security.model_copy(update={"token_file": Path("tokens")})
    model = config.model.model_copy(update={"checkpoint": "models/m"})
    moved = config.model_copy(
        update={"security": security, "model": model, "state_dir": Path("/var/s")}
    ).rooted(Path("/etc/moe"))
    assert moved.model.checkpoint == "/etc/moe/models/m"
    assert moved.security.token_file == Path("/etc/moe/tokens")
    assert moved.security.tls_ca_file is None
    assert moved.state_dir == Path("/var/s")
    for kept in ("package:tiny_moe", "~/m", "/m"):
        model = config.model.model_copy(update={"checkpoint": kept})
        assert (
            config.model_copy(update={"model": model}).rooted(Path("/etc")).model.checkpoint == kept
        )


def test_many_ranks_at_once_are_even() -> None:
    held: Counter[str] = Counter()
    for rank in range(9):
        held[choose_node([A, B, B2], {}, held, what=f"rank {rank}").node_id] += 1
    assert held == {"id-a": 3, "id-b": 3, "id-b2": 3}
