"""Tells a renamed tensor from one that is missing.

Responsible for: the error to raise when a tensor was not found.
Must never: decide what is loaded: a near name is a hint for people, not a fallback.
Called by: `safetensors_index`, `binding`.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from itertools import islice

from moe_serve.weights.errors import MissingTensor, RenamedTensor, shown

_CANDIDATES_MAX = 4096
"""Names compared with the missing one; each comparison costs tens of microseconds."""

_SIMILARITY_MIN = 0.8
"""Share of equal characters from which a name counts as near."""

_NUMBER = re.compile(r"\d+")


def missing_tensor(missing: str, unclaimed: Iterable[str], why: str) -> MissingTensor:
    """The error for tensor `missing`: `RenamedTensor` if one of the `unclaimed` names (those nobody
    expects) is near it and has the same numbers, else `MissingTensor`. `why` says where it was
    looked for.

    The numbers must agree because `experts.1.w1` is not a new name of `experts.2.w1`.
    """
    numbers = _NUMBER.findall(_without_projection(missing))
    candidates = islice(
        (name for name in unclaimed if _NUMBER.findall(_without_projection(name)) == numbers),
        _CANDIDATES_MAX,
    )
    near = difflib.get_close_matches(missing, list(candidates), n=1, cutoff=_SIMILARITY_MIN)
    if near:
        return RenamedTensor(
            f"tensor {shown(missing)} is missing: {why}. Did you mean {shown(near[0])}, which is "
            "there and unused? Rename it or fetch the checkpoint again"
        )
    return MissingTensor(f"tensor {shown(missing)} is missing: {why}; fetch the checkpoint again")


def _without_projection(name: str) -> str:
    """`name` without the digits that belong to a projection's name (w1, w2, w3)."""
    return re.sub(r"\bw[123]\b", "w", name)
