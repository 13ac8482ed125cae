"""Load on a running service, and what it felt like: `moe-serve bench`.

Responsible for asking as a front end would, at times that do not depend on the answers, and for
figures of what came back. Must never check what an output means (parity is the tests' business),
nor decide anything about experts. Imports no Ray. Called by the bench command.

Open loop: requests are due at the times of a Poisson process, whatever the service does, and
latency is counted from the time a request was *due*. A generator that waits for answers would stop
asking just when the service is slow, and leave the slow ones out of its figures (coordinated
omission). Closed loop: a fixed number of callers, each asking again when it has its answer; its
latency is that of such callers and of nobody else.
"""

from moe_serve.bench.figures import BenchReport, Latency
from moe_serve.bench.load import BenchLoad, run_bench
from moe_serve.bench.workload import Choices, shifting_choices, traced_choices, zipf_choices

__all__ = [
    "BenchLoad",
    "BenchReport",
    "Choices",
    "Latency",
    "run_bench",
    "shifting_choices",
    "traced_choices",
    "zipf_choices",
]
