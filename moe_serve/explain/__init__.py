"""Why requests are slow: from what was measured lately to causes, in words.

Pure: numbers in, causes out; no clock, no network, no part. Every cause is found by comparing one
thing with another that was measured beside it, never by an absolute speed: a slow machine is slow
everywhere and nothing's cause. Called by the controller, and for words alone by page and CLI.
"""

from moe_serve.explain.cause import Cause, Kind
from moe_serve.explain.evidence import Evidence, RankFacts, Slice
from moe_serve.explain.finding import Finding, RankPart, explain

__all__ = [
    "Cause",
    "Evidence",
    "Finding",
    "Kind",
    "RankFacts",
    "RankPart",
    "Slice",
    "explain",
]
