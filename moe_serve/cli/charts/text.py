"""A panel as lines of text, for a terminal or a log. Pure. Called by the replay command."""

from __future__ import annotations

from moe_serve.cli.charts.panel import Panel, binned, scale_of

MARKS = "o*x+#@%&$~"
"""One a line, in turn; where two meet, the later one is seen."""
ROWS = 15
COLUMNS = 96


def text_chart(panel: Panel, *, rows: int = ROWS, columns: int = COLUMNS) -> str:
    """The panel in about `rows` x `columns` characters; more places than columns are averaged."""
    scale = scale_of(panel)
    places = min(panel.num_places, columns)
    field = [[" "] * max(places, 1) for _ in range(rows)]
    for number, one in enumerate(panel.series):
        for place, value in enumerate(binned(one.values, columns)):
            if value is not None:
                row = rows - 1 - round(scale.share(value) * (rows - 1))
                field[row][place] = MARKS[number % len(MARKS)]
    names = {rows - 1 - round(scale.share(tick) * (rows - 1)): tick for tick in scale.ticks}
    shown = {row: scale.shown(tick) for row, tick in names.items()}
    wide = max(len(text) for text in shown.values())
    lines = [panel.title]
    for row, cells in enumerate(field):
        lines.append(f"{shown.get(row, ''):>{wide}} |{''.join(cells)}".rstrip())
    last = str(max(panel.num_places - 1, 0))
    lines.append(" " * wide + " +" + "-" * max(places, 1))
    lines.append(" " * wide + "  0" + last.rjust(max(places - 1, len(last) + 1)))
    lines += [
        f"{'':>{wide}}  {MARKS[number % len(MARKS)]} {one.name}"
        for number, one in enumerate(panel.series)
    ]
    return "\n".join(lines)
