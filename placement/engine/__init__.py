"""The engine: trigger, plan supervision, tables, ranks, operators. `step(event) -> effects`, and
nothing else.

Responsible for deciding when to plan and for running plans safely. Does no I/O, reads no clock and
never plans itself: `compute_target` does, wherever the driver lets it.
"""

from placement.engine.durable import Durability
from placement.engine.engine import RebalanceEngine
from placement.engine.facts import EngineFacts
from placement.engine.state import EngineSnapshot, EngineState
from placement.engine.target import compute_target

__all__ = [
    "Durability",
    "EngineFacts",
    "EngineSnapshot",
    "EngineState",
    "RebalanceEngine",
    "compute_target",
]
