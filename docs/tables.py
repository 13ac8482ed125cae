"""Tables of the reference pages. Called by the modules that write them."""

from __future__ import annotations


def cell(text: str) -> str:
    """Text on one line that does not break a table."""
    return " ".join(text.split()).replace("|", "\\|")
