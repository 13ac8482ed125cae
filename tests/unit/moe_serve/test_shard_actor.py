"""The Ray face of a shard, without Ray running: which calls may keep which waiting, and how errors
cross."""

import pytest

from moe_serve.errors import ResourceExhausted, StaleTerm
from moe_serve.shard.actor import CONCURRENCY_GROUPS, ShardActor, outcome_of

CALLS = (
    *("describe", "fence", "execute", "execute_long", "execute_abort"),
    *("install_table", "report", "probe", "take_ledger"),
)


def group_of(call: str) -> str:
    return str(getattr(ShardActor, call).__ray_concurrency_group__)


def test_a_probe_that_waits_for_the_compute_thread_keeps_no_other_call_waiting() -> None:
    others = {group_of(call) for call in CALLS if call != "probe"}
    assert group_of("probe") not in others
    assert group_of("execute_long") != group_of("install_table") == group_of("execute")
    assert others | {group_of("probe")} == set(CONCURRENCY_GROUPS)


def test_an_abort_waits_neither_behind_copies_nor_before_tables_and_reports() -> None:
    others = {group_of(call) for call in CALLS if call != "execute_abort"}
    assert group_of("execute_abort") not in others


def test_errors_cross_as_values_and_come_out_as_what_they_were() -> None:
    with pytest.raises(ResourceExhausted, match="64 rows wait"):
        outcome_of(ResourceExhausted("64 rows wait")).unwrap()
    with pytest.raises(StaleTerm) as caught:
        outcome_of(StaleTerm("over", term=7)).unwrap()
    assert caught.value.term == 7
