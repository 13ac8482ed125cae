"""The promises I1 to I12 as checkers over facts: small, written apart from what they check.

The same checkers read the facts of a simulated world and the lines of real processes.
"""

from placement.sim.checks.base import Checker, InvariantBroken, check_facts
from placement.sim.checks.contributions import ExactlyOnce
from placement.sim.checks.fence import Fence
from placement.sim.checks.journal import JournalFirst, check_replay
from placement.sim.checks.load import LoadOnce
from placement.sim.checks.memory import Memory, ReleaseLast
from placement.sim.checks.progress import Progress
from placement.sim.checks.requests import Isolation, Termination
from placement.sim.checks.tables import Coverage, TableOrder

__all__ = [
    "Checker",
    "Coverage",
    "ExactlyOnce",
    "Fence",
    "InvariantBroken",
    "Isolation",
    "JournalFirst",
    "LoadOnce",
    "Memory",
    "Progress",
    "ReleaseLast",
    "TableOrder",
    "Termination",
    "check_facts",
    "check_replay",
]
