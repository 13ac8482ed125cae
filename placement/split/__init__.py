"""The router's rule: counts of a batch and backlog -> tokens per replica, then which pairs.

The kernels are exact in whole tokens: the largest (load + backlog) of any rank is the least
possible. `level`, `level_uniform` and `level_activated` answer for one batch; `compile_layer` once
and `split_counts`, `split_activated`, `assign_pairs` for each batch are the hot path.

Responsible for: splitting tokens over replicas that exist. Must never decide which replicas exist,
and knows no clock, wire or seconds. Called by the router's pure half, by policies and scoring (a
layout is worth what this split makes of it), and by other engines. Importable without Ray or torch.
"""

from placement.split.checks import EXPERTS_MAX, RANKS_MAX, TOTAL_MAX
from placement.split.compiled import CompiledLayer, compile_layer
from placement.split.errors import SplitError
from placement.split.levels import (
    level,
    level_activated,
    level_uniform,
    rank_loads,
    split_activated,
    split_counts,
)
from placement.split.pairs import assign_pairs, count_ids

__all__ = [
    "EXPERTS_MAX",
    "RANKS_MAX",
    "TOTAL_MAX",
    "CompiledLayer",
    "SplitError",
    "assign_pairs",
    "compile_layer",
    "count_ids",
    "level",
    "level_activated",
    "level_uniform",
    "rank_loads",
    "split_activated",
    "split_counts",
]
