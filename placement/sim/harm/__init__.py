"""What each kind of fault does to a service, and how it is mended.

Responsible for the harm alone: `nemesis` says when.
"""

from placement.sim.harm.harm import Harm
from placement.sim.harm.people import Flow
from placement.sim.harm.targets import Mend

__all__ = ["Flow", "Harm", "Mend"]
