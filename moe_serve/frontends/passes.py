"""What a forward pass of a transformers model says about its rows: phase and padding.

Responsible for reading the pass's own arguments, before any layer runs. Must never guess: a mask
that does not describe single rows of this pass leaves all rows valid. Called by the library,
through hooks that `attach` sets.
"""

from __future__ import annotations

import inspect
import itertools
import threading
from typing import Any

import numpy as np
import numpy.typing as npt

from moe_serve.errors import InvalidArgument
from placement.topology import Phase


class CurrentPass(threading.local):
    """The pass that runs on this thread: phase, bool [rows] of real rows (None = all), number."""

    phase: Phase = Phase.PREFILL
    row_valid: npt.NDArray[np.bool_] | None = None
    number: int = 0


class PassWatcher:
    """Hooks of a model's decoder: `begin` before and `end` after each forward.

    The decoder, not the model with its head: whoever calls the decoder alone is served right too.
    """

    def __init__(self, decoder: Any) -> None:
        self.current = CurrentPass()
        self._numbers = itertools.count()
        self._names = list(inspect.signature(decoder.forward).parameters)
        self._hooks = (
            decoder.register_forward_pre_hook(self._begin, with_kwargs=True),
            decoder.register_forward_hook(self._end, always_call=True),
        )

    def remove(self) -> None:
        """Take the hooks off."""
        for hook in self._hooks:
            hook.remove()

    def _begin(self, _decoder: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = dict(zip(self._names, args, strict=False)) | kwargs
        ids = given.get("input_ids")
        rows = ids if ids is not None else given.get("inputs_embeds")
        if rows is None:
            raise InvalidArgument("forward needs input_ids or inputs_embeds")
        batch, length = int(rows.shape[0]), int(rows.shape[1])
        cached = cached_tokens(given)
        current = self.current
        current.number = next(self._numbers)
        current.phase = Phase.DECODE if length == 1 and cached > 0 else Phase.PREFILL
        current.row_valid = rows_of_mask(given.get("attention_mask"), batch, length, cached)

    def _end(self, *_given: Any) -> None:
        self.current.phase = Phase.PREFILL
        self.current.row_valid = None


def cached_tokens(given: dict[str, Any]) -> int:
    """Tokens a sequence that are in the cache already, 0 without one."""
    for name in ("cache", "past_key_values"):  # the second is the older name
        cache = given.get(name)
        if cache is not None:
            return int(cache.get_seq_length())
    return 0


def rows_of_mask(mask: Any, batch: int, length: int, cached: int) -> npt.NDArray[np.bool_] | None:
    """bool [batch * length] of the rows of a pass, None = all valid.

    Only a 2-D mask over exactly the cached and the new tokens tells: its last `length` columns are
    the new ones. [[0, 1, 1]] with 1 cached token gives [True, True], [[0, 1, 1]] with none [False,
    True, True].
    """
    if getattr(mask, "ndim", 0) != 2 or tuple(mask.shape) != (batch, cached + length):
        return None
    valid: npt.NDArray[np.bool_] = mask[:, cached:].bool().cpu().numpy().reshape(-1)
    return None if valid.all() else valid
