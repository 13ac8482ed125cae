"""Routing tables: what they list, what they miss, which of two is newer; and profiles of ranks."""

import pytest

from placement.layout import SlotId
from placement.routing import build_table
from placement.topology import Topology
from tests.builders import make_address, make_layout, make_table, make_topology

LAYOUT = make_layout([[0, 1, -1], [2, 0, -1]])


def test_a_table_lists_replicas_by_rank_and_slot_and_knows_what_it_misses():
    table = make_table(LAYOUT)
    assert table.replicas(0, 0) == ((0, 0, 1), (1, 1, 102))
    assert table.replicas(0, 3) == ()
    assert table.missing() == ((0, 3),)


def test_addresses_are_those_of_its_ranks():
    table = make_table(LAYOUT)
    assert table.address(1) == make_address(1)
    assert table.address(2) is None


def test_a_newer_term_or_epoch_replaces():
    table = make_table(LAYOUT, term=2, epoch=5)
    assert table.is_newer(None)
    assert table.is_newer(make_table(LAYOUT, term=1, epoch=9))
    assert table.is_newer(make_table(LAYOUT, term=2, epoch=4))
    assert not table.is_newer(table)


def build(tags, ranks):
    return build_table(
        LAYOUT, tags, term=1, epoch=1, model="m", weights_version="v1", ranks=tuple(ranks)
    )


def test_a_replica_without_a_tag_or_on_a_rank_without_an_address_is_a_bug_of_the_caller():
    tags = {SlotId(r, i): 1 for r in range(2) for i in range(2)}
    with pytest.raises(ValueError, match=r"ranks \[1\], which have no address"):
        build(tags, [make_address(0)])
    del tags[SlotId(1, 0)]
    with pytest.raises(KeyError):
        build(tags, [make_address(0), make_address(1)])


def test_a_rank_must_name_a_declared_profile():
    topology = make_topology([2])
    assert topology.profile_of(0) is topology.profiles[0]
    with pytest.raises(KeyError, match="rank 0 names device profile 'small'"):
        Topology(ranks=topology.ranks, profiles=()).profile_of(0)
