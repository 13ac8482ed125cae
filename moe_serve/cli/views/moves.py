"""Moves as lines of a diff: + replicate, ~ migrate, - evict.

Responsible for the symbols and the columns. Called by the views of plan and status.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from rich.table import Table

from moe_serve.cli.figures import shown_bytes, shown_number
from moe_serve.cli.plain import enum_word
from moe_serve.rpc import placement_pb2 as pb

SYMBOLS = {"replicate": "+", "migrate": "~", "evict": "-"}
STYLES = {"replicate": "green", "migrate": "yellow", "evict": "red"}
NEXT_WORDS = {"replicate": "to replicate", "migrate": "to migrate", "evict": "to evict"}


def moves_table(moves: Iterable[pb.Move], *, states: bool) -> Table:
    """One line a move: what, from where to where in place of what, its price (bytes, and whether
    they cross nodes), its predicted gain in seconds saved a second, its reason; with `states` also
    how far it is."""
    table = Table.grid(padding=(0, 2, 0, 0))
    for _ in range(6 + states):
        table.add_column(no_wrap=True)
    table.columns[4].justify = "right"
    for move in moves:
        kind = enum_word(move, "kind")
        cells = [
            f"  {SYMBOLS.get(kind, '?')} L{move.layer} E{move.expert}",
            kind,
            *([enum_word(move, "state")] if states else []),
            _way(move),
            _price(move),
            f"saves {shown_number(move.gain_s_per_s, '.3g')} s/s" if move.gain_s_per_s > 0 else "",
            move.reason,
        ]
        table.add_row(*cells, style=STYLES.get(kind, ""))
    if states:
        table.columns[4].justify, table.columns[3].justify = "right", "left"
    return table


def moves_sum(moves: Iterable[pb.Move]) -> str:
    """ "24 to replicate (in place of 20 replicas), 1 to evict", in the order of SYMBOLS; no move is
    "nothing to move"."""
    counts: Counter[str] = Counter()
    gone: Counter[str] = Counter()
    for move in moves:
        kind = enum_word(move, "kind")
        counts[kind] += 1
        gone[kind] += len(move.room)
    parts = [
        f"{counts[kind]} {words}{_replaced(gone[kind])}"
        for kind, words in NEXT_WORDS.items()
        if counts[kind]
    ]
    return ", ".join(parts) or "nothing to move"


def _replaced(count: int) -> str:
    return f" (in place of {count} {'replica' if count == 1 else 'replicas'})" if count else ""


def _way(move: pb.Move) -> str:
    source = f"rank {move.source_rank}" if move.source_rank >= 0 else "checkpoint"
    if enum_word(move, "kind") == "evict":
        return source
    gone = ", ".join(f"L{one.layer} E{one.expert}" for one in move.room)
    return f"{source} -> rank {move.target_rank}" + (f" in place of {gone}" if gone else "")


def _price(move: pb.Move) -> str:
    if not move.copy_bytes:
        return ""
    # What comes from the checkpoint counts as far too, and says so itself.
    far = move.cross_node and move.source_rank >= 0
    return shown_bytes(move.copy_bytes) + (" cross-node" if far else "")
