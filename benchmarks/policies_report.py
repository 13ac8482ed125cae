"""What the policy benchmarks found, as tables of Markdown: for the terminal and for the page.

Responsible for means over seeds, bars and wording. Must never measure. Called by
`benchmarks.policies`. A cell is the mean over seeds and, in brackets, the least and the most.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

Row = Mapping[str, Any]

TITLES: Final = {
    "race": "Race on recorded traffic",
    "learned": "What the learned policy learnt",
    "swap": "16 of the 64 hottest experts swap at once",
    "ratio": "Competitive ratio",
    "clairvoyant": "Distance to a perfect forecast",
}
RATIO_BARS: Final = {
    "gptoss mixed": 1.15,
    "gptoss blocks": 1.15,
    "ping-pong": 1.35,
    "ping-pong hotter": 1.35,
}
PATTERN_BAR: Final = 1.5
SWAP_BARS: Final = "bars: <= 2 windows, area <= 0.35, steady <= 1.04, writes <= 4%"

_WORDS: Final = {
    "race": """Balance (mean over layers of mean / max rank load, exact split) of windows / quarters
of windows, then slots written a window as a share of all. Everybody starts from the layout nobody
planned; the first four windows are not scored. `engine` is the production engine with its gate,
`incremental` the same forecast and policy after every window without gate, `clairvoyant` the same
policy told the next window. Learned: a network that forecasts shares in front of the same placement
step, trained offline on the odd requests of a trace, tested on the even ones; `memory` also knows
each expert's share in training. **Bold**: tested on the model and an order it was trained on.""",
    "learned": """Cross-entropy of the next window against the forecast, above its own entropy, in
thousandths of a nat (0 = perfect), over windows and layers. `last` and `three` are the shares of
the last window and of the last three.""",
    "swap": """256 experts, 288 slots on 32 ranks, one layer, 16,384 tokens x 8 a window. From the
shift on: windows with max_over_mean >= 1.15, area above 1.15, of that the part of the window in
which the shift falls (no policy can help there), mean of the last 20 windows, share of slots
written a window after the warm-up (most in one window). `price`: cost of a slot write as the
engine's gate sees it, in windows of the layer.""",
    "ratio": """Sum of max_over_mean under the exact split + price x slots written, over the same of
the offline optimum (dynamic programme over all 375 layouts of 6 experts on 4 ranks x 2 slots).
`engine` is the production engine with its defaults; `policy` the production policy on the last 8
windows one by one, moved by the gate's rule of accumulated regret alone; `gate` that rule around an
exhaustive search on these windows, `gate of mean` on their mean; `work` the work function
algorithm; `eplb` every 10 windows; `last` the best layout for the last window, always; `never`
stays. The adversary (ping-pong) sees the layout and asks for the worse of two sets, against each
player anew; each set's hot expert has 1.97 to 4.01 times the mean load, the range of GPT-OSS-20B's
layers, or, `hotter`, 2.4 to 4.5 times; `floor` is the ratio there of a player who goes to the best
single layout for both sets and stays.""",
    "clairvoyant": """The placement benchmark's timelines (all requests once), scored after the
first plan: `incremental` with the production forecast after every window, and the same with the
true next window as its only scenario, or its quarters, at the same budget of 8% of the slots a
window.""",
}


def lines_of(part: str, rows: Sequence[Row]) -> list[str]:
    """Title and table of a part."""
    return ["", f"## {TITLES[part]}", "", *_TABLES[part](rows)]


def page(parts: Mapping[str, Mapping[str, Any]]) -> str:
    """The page: every part with its words, its table and where it was measured."""
    out = [
        "# Policies against each other",
        "",
        "Made by `python -m benchmarks.policies --docs`; do not edit. All figures are simulated:",
        "recorded or made-up counts, the production code for forecast, policy, planner, gate and",
        "split, and an executor that takes no time. Cells: mean over seeds [least..most].",
    ]
    for name in _TABLES:
        if name not in parts:
            continue
        rows, environment = parts[name]["rows"], parts[name]["environment"]
        seeds = sorted({row["seed"] for row in rows})
        out += [*lines_of(name, rows)[:3], *_WORDS[name].splitlines(), "", *_TABLES[name](rows), ""]
        out += [
            f"Seeds {seeds[0]} to {seeds[-1]}, commit {environment['commit']}, "
            f"{environment['measured_at'][:10]}, {environment['cpu_count']} x "
            f"{environment['cpu']}, Python {environment['python']}, "
            f"numpy {environment['versions']['numpy']}."
        ]
    return "\n".join(out).rstrip() + "\n"


def cell(values: Iterable[float], digits: int = 3, scale: float = 1.0) -> str:
    """Mean and range: `0.990 [0.985..0.993]`, without a range where there is one value.

    >>> cell([0.5, 0.7], 2)
    '0.60 [0.50..0.70]'
    """
    found = [value * scale for value in values]
    mean = f"{sum(found) / len(found):.{digits}f}"
    if len(found) == 1:
        return mean
    return f"{mean} [{min(found):.{digits}f}..{max(found):.{digits}f}]"


def table(header: Sequence[str], body: Iterable[Sequence[str]]) -> list[str]:
    """Markdown table."""
    return [
        "| " + " | ".join(header) + " |",
        "|" + "---|" * len(header),
        *("| " + " | ".join(row) + " |" for row in body),
    ]


def _some(rows: Sequence[Row], **want: Any) -> list[Row]:
    return [row for row in rows if all(row[name] == value for name, value in want.items())]


def _each(rows: Sequence[Row], *names: str) -> list[tuple[Any, ...]]:
    return list(dict.fromkeys(tuple(row[name] for name in names) for row in rows))


def _race(rows: Sequence[Row]) -> list[str]:
    tests = _each(rows, "case", "order")
    body = []
    for runner, on in _each(rows, "runner", "trained_on"):
        line = [f"{runner}, trained on {on}" if on else runner]
        for case, order in tests:
            here = _some(rows, case=case, order=order, runner=runner, trained_on=on)
            text = (
                f"{cell(r['window_balance'] for r in here).split()[0]} / "
                f"{cell(r['quarter_balance'] for r in here).split()[0]}, "
                f"{cell((r['writes_share'] for r in here), 1, 100.0).split()[0]}%"
            )
            line.append(f"**{text}**" if _inside(on, case, order) else text)
        body.append(line)
    return table(["", *(" ".join(test) for test in tests)], body)


def _inside(trained_on: str, case: str, order: str) -> bool:
    """Whether a test has the model and an order of the training."""
    model, _, orders = trained_on.partition(" ")
    return model == case and order in orders.split("+")


def _learned(rows: Sequence[Row]) -> list[str]:
    tests = _each(rows, "case", "order")
    body = []
    for runner, on in _each(rows, "network", "trained_on"):
        line = [f"{runner}, trained on {on}" if on else runner]
        for case, order in tests:
            here = _some(rows, case=case, order=order, network=runner, trained_on=on)
            text = cell((r["excess_nats"] for r in here), 1, 1000.0)
            line.append(f"**{text}**" if _inside(on, case, order) else text)
        body.append(line)
    return table(["", *(" ".join(test) for test in tests)], body)


def _swap(rows: Sequence[Row]) -> list[str]:
    body = []
    for skew, price, runner in _each(rows, "skew", "price", "runner"):
        here = _some(rows, skew=skew, price=price, runner=runner)
        body.append(
            [
                f"{skew}",
                f"{price}",
                runner,
                cell((r["windows_over"] for r in here), 1),
                cell((r["area"] for r in here), 2),
                cell((max(r["first"] - 1.15, 0.0) for r in here), 2),
                cell(r["steady"] for r in here),
                f"{cell((r['writes_share'] for r in here), 1, 100.0)}% "
                f"({max(r['writes_worst_share'] for r in here):.0%})",
            ]
        )
    header = ["skew", "price", "", "windows over", "area", "of it first", "steady", "writes"]
    return [*table(header, body), "", SWAP_BARS]


def _ratio(rows: Sequence[Row]) -> list[str]:
    body = []
    players = [name for (name,) in _each(rows, "player")]
    for traffic, price in _each(rows, "traffic", "price"):
        line = [traffic, f"{price}", f"{RATIO_BARS.get(traffic, PATTERN_BAR)}"]
        for player in players:
            here = _some(rows, traffic=traffic, price=price, player=player)
            line.append(cell(((r["loss"] + r["price"] * r["writes"]) / r["best"] for r in here), 2))
        floors = [r["floor"] for r in _some(rows, traffic=traffic, price=price, player=players[0])]
        line.append(cell(floors, 2) if min(floors) > 0 else "")
        body.append(line)
    return table(["traffic", "price", "bar", *players, "floor"], body)


def _clairvoyant(rows: Sequence[Row]) -> list[str]:
    body = []
    for case, order, runner in _each(rows, "case", "order", "runner"):
        here = _some(rows, case=case, order=order, runner=runner)
        body.append(
            [
                case,
                order,
                runner,
                cell(r["window_balance"] for r in here),
                cell(r["quarter_balance"] for r in here),
                cell((r["writes_share"] for r in here), 1, 100.0) + "%",
            ]
        )
    return table(["case", "order", "", "window", "quarters", "writes"], body)


_TABLES: Final[Mapping[str, Callable[[Sequence[Row]], list[str]]]] = {
    "race": _race,
    "learned": _learned,
    "swap": _swap,
    "ratio": _ratio,
    "clairvoyant": _clairvoyant,
}
