"""Prompts of the demo, by domain, written for it, and the schedule in which domains come.

The tiny model's router has favourite experts for each domain, so a change of domain moves the load:
that is what the demo is about. The model babbles; the text is to be watched, not believed.
"""

from __future__ import annotations

from importlib import resources
from typing import Final

import msgspec


def load_prompts() -> dict[str, tuple[str, ...]]:
    """Domain -> prompts, from the package."""
    data = resources.files(__package__).joinpath("prompts.json").read_bytes()
    return {name: tuple(prompts) for name, prompts in msgspec.json.decode(data).items()}


SCHEDULE: Final = ("python", "chinese", "log", "english", "json", "japanese", "c", "german")
"""Order in which domains come; neighbours use very different experts."""


def domain_at(share: float) -> str:
    """Domain of the moment: `share` in [0, 1) of the whole run, which goes twice through SCHEDULE.

    domain_at(0.0) and domain_at(0.5) are both the first.
    """
    turns = 2 * len(SCHEDULE)
    return SCHEDULE[min(int(share * turns), turns - 1) % len(SCHEDULE)]
