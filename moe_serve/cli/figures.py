"""Numbers as people read them. Pure.

Responsible for units and rounding, so that one quantity reads alike everywhere. Called by views.
"""

from __future__ import annotations

from math import isfinite

_STEPS = ("B", "KiB", "MiB", "GiB", "TiB")


def shown_number(value: float, form: str) -> str:
    """A figure in a form of `format`: shown_number(0.25, ".1f") is "0.2"; one that is no number, or
    without an end, is "-"."""
    return format(value, form) if isfinite(value) else "-"


def shown_bytes(count: int) -> str:
    """Bytes in powers of 1024: shown_bytes(98304) is "96.0 KiB", shown_bytes(0) "0 B"."""
    size, unit = float(count), 0
    while abs(size) >= 1024 and unit < len(_STEPS) - 1:
        size, unit = size / 1024, unit + 1
    return f"{count} B" if unit == 0 else f"{size:.1f} {_STEPS[unit]}"


def shown_seconds(seconds: float) -> str:
    """Seconds with their unit: 0.00042 is "0.42 ms", 75 is "75 s", 4000 is "1 h 06 min"; no number
    is "-"."""
    if not isfinite(seconds):
        return "-"
    if abs(seconds) < 0.9995:
        # What rounds to 1000 ms is a second: 0.9996 would be written 1e+03.
        return f"{seconds * 1000:.3g} ms"
    if seconds < 120:
        return f"{seconds:.3g} s"
    minutes = int(seconds) // 60
    if minutes < 60:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60:02d} min"


def shown_imbalance(balancedness: float) -> str:
    """Imbalance of a balancedness in (0, 1]: shown_imbalance(0.8) is "0.25"; no load is "-"."""
    known = isfinite(balancedness) and balancedness > 0
    return f"{1.0 / balancedness - 1.0:.2f}" if known else "-"


def shown_counts(counts: dict[str, int]) -> str:
    """Counts by name, in order of name: "1 evict, 3 migrate"; nothing is "none"."""
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items()) if count) or "none"
