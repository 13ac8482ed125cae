"""Fetch the ledgers of shards and routers and turn them into the audit's form. The one part of the
demo that uses the fleet's ports (through bootstrap)."""

from __future__ import annotations

import numpy as np

from moe_serve.demo.audit import AuditResult, Combined, Demanded, Executed, audit
from moe_serve.errors import MoeServeError
from moe_serve.ports import Cause
from moe_serve.router.ledger import LedgerPage, RequestEntry
from moe_serve.rpc.codec import unpack_bits
from moe_serve.shard.executed import LedgerEntry


def executed_of(entries: tuple[LedgerEntry, ...]) -> list[Executed]:
    """The audit's form of a shard's ledger."""
    return [
        Executed(
            entry.router,
            entry.call_id,
            entry.sub_id,
            entry.request_key,
            entry.layer,
            Cause(entry.cause),
            entry.row_id.astype(np.int64),
            entry.pair_k.astype(np.int64),
        )
        for entry in entries
    ]


def routed_of(page: LedgerPage) -> tuple[list[Demanded], list[Combined]]:
    """The audit's form of a router's ledger. Raises MoeServeError where entries were forgotten:
    nothing is proved then."""
    if page.forgotten:
        raise MoeServeError(
            f"router {page.router} forgot {page.forgotten} ledger entries; raise "
            "limits.ledger_rows_max"
        )
    demanded: list[Demanded] = []
    combined: list[Combined] = []
    for entry in page.entries:
        if isinstance(entry, RequestEntry):
            valid = unpack_bits(entry.pair_valid, (entry.rows, entry.top_k))
            row, pair_k = np.nonzero(valid)
            demanded.append(Demanded(page.router, entry.request_key, entry.layer, row, pair_k))
        else:
            row_id = np.frombuffer(entry.row_id, "<i4").astype(np.int64)
            combined.append(Combined(page.router, entry.call_id, entry.sub_id, row_id))
    return demanded, combined


def audit_pages(shards: list[tuple[LedgerEntry, ...]], routers: list[LedgerPage]) -> AuditResult:
    """Join the ledgers of all shards and routers."""
    executed = [item for entries in shards for item in executed_of(entries)]
    demanded: list[Demanded] = []
    combined: list[Combined] = []
    for page in routers:
        wanted, added = routed_of(page)
        demanded.extend(wanted)
        combined.extend(added)
    return audit(demanded, executed, combined)
