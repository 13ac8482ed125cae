"""Counters of a router's report: totals since start, of all that count in it, by name.

Responsible for putting them together. Must never count itself. Called by `dispatch`.
"""

from __future__ import annotations

from moe_serve.router.demand import DemandLog
from moe_serve.router.permits import Permits
from moe_serve.router.pulse import Pulse
from placement.roles.router import RouterRole
from placement.roles.router_records import PAIR_COUNTERS


def counters(
    role: RouterRole, pulse: Pulse, demand: DemandLog, permits: Permits
) -> dict[str, float]:
    """As `RouterReport.counters` has them; what has not happened yet is 0."""
    found = dict.fromkeys(PAIR_COUNTERS, 0.0)
    found |= {name: float(value) for name, value in role.counters.items()}
    found |= pulse.counters()
    found["demand_pairs"] = float(demand.total_pairs)
    found["dropped_replies"] = float(role.dropped_replies)
    found["ejections"] = float(role.ejections)
    return found | permits.counters()
