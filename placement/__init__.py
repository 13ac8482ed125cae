"""The brain of moe_serve: which expert lies where, when it moves, and why. A pure library.

Responsible for every rule of placement, splitting, retrying, queueing and fairness. Must never do
I/O, read a clock, log, start a thread or draw from a global generator: time, randomness and
measurements arrive as data. Called by the shell (`moe_serve`), the simulator, the benchmarks, and
by engines that only want a planner.

Import the modules, for example `from placement.layout import ExpertLayout`; this file exports only
the version, the one place where it is written.
"""

__version__ = "0.1.0"
