"""What the demo shows in the terminal: text as it is written, decisions, a live line, a summary.
Prints; decides nothing."""

from __future__ import annotations

import threading
import time
from typing import Any, TextIO

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from moe_serve.config import ServiceConfig
from moe_serve.demo.front_end import TextLine
from moe_serve.demo.report import Check
from moe_serve.demo.watch import Seen

LIVE_EVERY_S = 2.0
"""Seconds between two live lines."""
SHOWN_RULES = frozenset({"replicate", "migrate", "evict"})


class Screen:
    """The terminal. Safe to call from several threads. stream: that of the start: what Ray has to
    say meanwhile goes elsewhere."""

    def __init__(self, quiet: bool, stream: TextIO) -> None:
        self._console = Console(file=stream, highlight=False)
        self._quiet = quiet
        self._lock = threading.Lock()
        self._live_s = 0.0

    def _print(self, text: str) -> None:
        with self._lock:
            self._console.print(text, soft_wrap=True)

    def banner(self, config: ServiceConfig) -> None:
        """What runs, and by which declared figures it is priced."""
        self._print(
            "[bold]moe_serve demo[/]: experts of a real MoE language model, moved while they serve"
        )
        for profile in config.profiles:
            self._print(
                f"[dim]ranks are priced by the declared device profile {profile.name!r}: "
                f"{profile.flops_per_s:.3g} FLOP/s, {profile.memory_bytes_per_s:.3g} B/s read, "
                f"{profile.copy_bytes_per_s:.3g} B/s copy (declared, not measured)[/]"
            )

    def note(self, line: str) -> None:
        """A step or an announcement."""
        self._print(f"[cyan]»[/] {escape(line)}")

    def text(self, line: TextLine) -> None:
        """What the model wrote."""
        if self._quiet:
            return
        prompt = escape(line.prompt[-48:].replace("\n", "⏎"))
        written = escape(line.text.replace("\n", "⏎"))
        self._print(f"[dim]{line.domain:>8}[/] {prompt}[bold green]{written}[/]")

    def record(self, record: Any) -> None:
        """A move that ended, with its reason."""
        if self._quiet or record.rule not in SHOWN_RULES or record.outcome != "done":
            return
        self._print(f"[yellow]{record.rule:>9}[/] {escape(record.detail)}")

    def live(self, seen: Seen) -> None:
        """Imbalance, epoch and moves, every LIVE_EVERY_S."""
        now_s = time.monotonic()
        if seen.placement is None or now_s - self._live_s < LIVE_EVERY_S:
            return
        self._live_s = now_s
        placement = seen.placement
        moves = " ".join(f"{kind} {count}" for kind, count in sorted(placement.moves_done.items()))
        if placement.replicas_replaced:
            moves += f" ({placement.replicas_replaced} made room)"
        self._print(
            f"[bold magenta]-- imbalance {seen.imbalance:.2f} | epoch {placement.epoch} | "
            f"{placement.state} | moves: {moves or 'none yet'}[/]"
        )

    def summary(self, found: dict[str, Any], results: list[Check]) -> None:
        """The figures, and which reached their bar."""
        table = Table(title="demo", title_justify="left")
        for column in ("figure", "value", "bar", ""):
            table.add_column(column)
        barred = {check.name: check for check in results}
        for name, value in found.items():
            check = barred.get(name)
            shown = f"{value:.4g}" if isinstance(value, float) else str(value)
            mark = "" if check is None else ("[green]ok[/]" if check.holds else "[red]missed[/]")
            table.add_row(name, shown, check.bar if check else "", mark)
        with self._lock:
            self._console.print(table)
            failed = [check.name for check in results if not check.holds]
            verdict = (
                "[bold green]every bar reached[/]"
                if not failed
                else f"[bold red]missed: {', '.join(failed)}[/]"
            )
            self._console.print(verdict)
