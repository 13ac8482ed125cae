"""The pure half of a shard: slots, tags, pins, terms and budgets. See `commands` for the rules."""

from placement.roles.shard.commands import ShardSlots
from placement.roles.shard.ledger import SlotLedger
from placement.roles.shard.records import SlotPhase, Start, TermRefused, Work

__all__ = ["ShardSlots", "SlotLedger", "SlotPhase", "Start", "TermRefused", "Work"]
