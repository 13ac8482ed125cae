"""Report, picture, arguments and unpacking of the placement benchmark."""

import zipfile
from pathlib import Path
from xml.etree import ElementTree

import pytest

from benchmarks.environment import Environment
from benchmarks.placement import _jobs, _options, public_command, seed_range
from benchmarks.placement_fetch import PACKAGES, unpack
from benchmarks.placement_plot import picture
from benchmarks.placement_report import (
    BARS,
    bar_lines,
    case_lines,
    cpu_lines,
    document,
    estimate,
    summarise,
)
from benchmarks.placement_runs import ANY_LAYOUT, SHARES, Row, Variant, contenders, ours
from benchmarks.placement_traces import CASES, DATA_VARIABLE


def make_row(planner: str, balance: float, *, seed: int = 0, share: float = 0.03, **over) -> Row:
    fields = {
        "case": "deepseek8",
        "order": "mixed",
        "window": {"equal": balance - 0.1, "level": balance, "bound": balance},
        "quarter": {"equal": balance - 0.12, "level": balance - 0.02, "bound": balance - 0.02},
        "by_window": (balance,),
        "writes_share": share,
        "writes_share_max": share * 2,
        "forecast_ms": 0.1,
        "plan_ms": 2.5,
    }
    return Row(planner=planner, seed=seed, **{**fields, **over})


def rows(mine: float = 0.99, share: float = 0.03) -> list[Row]:
    found = []
    for seed in (0, 1, 2):
        shift = 0.001 * seed
        found += [
            make_row("incremental 4%", mine - 0.01 + shift, seed=seed, share=share / 2),
            make_row("incremental 8%", mine - 0.001 + shift, seed=seed, share=share),
            make_row("clairvoyant 8%", 0.999, seed=seed),
            make_row("static", 0.7, seed=seed, share=0.0),
            make_row("DeepSeek EPLB (last)", 0.96, seed=seed, share=0.85),
            make_row("vLLM EPLB (sum8)", 0.97, seed=seed, share=0.80),
            make_row(ANY_LAYOUT, 1.0, seed=seed, share=0.0, window={"bound": 1.0},
                     quarter={"bound": 1.0}),
        ]  # fmt: skip
    return found


def test_interval_is_students_t_over_seeds() -> None:
    assert estimate([0.9]).text() == "0.900"
    three = estimate([1.0, 2.0, 3.0])
    assert three.mean == 2.0
    assert three.half == pytest.approx(4.303 / 3**0.5, rel=1e-3)
    ten = estimate([float(i) for i in range(10)])
    assert ten.half == pytest.approx(2.262 * 3.02765 / 10**0.5, rel=1e-3)
    many = estimate([float(i % 2) for i in range(100)])
    assert many.half == pytest.approx(1.96 * 0.502519 / 10, rel=1e-3)


def test_a_bar_that_is_met_says_so() -> None:
    line = bar_lines(summarise(rows()))[-1]
    assert "| met |" in line
    assert "0.990 ± 0.002 / 0.970 ± 0.002" in line
    assert "vLLM EPLB (sum8): 0.970 / 0.950 at 80.0%" in line


def test_windows_planned_from_little_history_are_told_apart() -> None:
    known = make_row("incremental 8%", 0.9, by_window=(0.5, 0.6, 0.7, 0.9, 0.94))
    short = make_row("static", 0.9, by_window=(0.5, 0.7))
    summaries = {s.planner: s for s in summarise([known, short])["deepseek8", "mixed"]}
    assert summaries["incremental 8%"].late.mean == pytest.approx(0.92)
    assert summaries["static"].late.mean == pytest.approx(0.6)
    assert "| 0.920 |" in bar_lines(summarise([known]))[-1]


@pytest.mark.parametrize(
    ("mine", "share", "words"),
    [
        (0.97, 0.03, ["window -0.015", "quarter -0.010"]),
        (0.99, 0.09, ["writes 9.0%"]),
    ],
)
def test_a_missed_bar_says_what_is_short(mine: float, share: float, words: list[str]) -> None:
    line = bar_lines(summarise(rows(mine, share)))[-1]
    assert "**missed**" in line
    assert all(word in line for word in words)


def test_absent_peers_are_told_in_the_table_of_bars() -> None:
    alone = [row for row in rows() if "EPLB" not in row.planner]
    assert "| absent | absent |" in bar_lines(summarise(alone))[-1]


def test_tables_and_page_hold_every_planner() -> None:
    table = summarise(rows())
    lines = "\n".join(case_lines(("deepseek8", "mixed"), table["deepseek8", "mixed"]))
    for name in ("incremental 4%", "clairvoyant 8%", "static", ANY_LAYOUT):
        assert f"| {name} |" in lines
    assert "3.0% (6.0%)" in lines
    assert "0.10 + 2.50" in "\n".join(cpu_lines(table))
    environment = Environment(
        benchmark="placement", seed=0, commit="abc", measured_at="now", python="3", system="s",
        cpu="c", cpu_count=2, memory_bytes=1 << 30, load_average=(0.0, 0.0, 0.0), threads={},
        versions={},
    )  # fmt: skip
    page = document(rows(), environment, ["vLLM EPLB: vllm==0.0"], "a command")
    assert "commit abc" in page
    assert "seeds 0, 1, 2" in page
    assert "vllm==0.0" in page
    assert "images/placement.svg" in page


def test_the_picture_is_well_formed_and_shows_every_point() -> None:
    text = picture(summarise(rows()))
    tree = ElementTree.fromstring(text)  # noqa: S314  # our own file
    tag = "{http://www.w3.org/2000/svg}"
    circles = [c for c in tree.iter(f"{tag}circle") if c.get("class") == "ours"]
    assert len(circles) == 2 + 1  # two budgets and the legend
    squares = list(tree.iter(f"{tag}rect"))
    assert len(squares) == 1 + 2 + 2 * 2  # background, legend, two peers under two splits
    assert picture(summarise(rows())) == text


def test_every_bar_has_a_case_and_a_budget_that_is_measured() -> None:
    for (case, _), bar in BARS.items():
        assert bar.share in SHARES
        assert ours(bar.share) in [c.name for c in contenders(CASES[case], Variant())]
        assert ours(bar.share) in [c.name for c in contenders(CASES[case], Variant(few=True))]


def test_runs_go_seed_by_seed_and_made_up_cases_come_last() -> None:
    options = _options(["--seeds", "0-4", "--cases", "synthetic,synthetic64"])
    jobs = _jobs(options)
    assert [job.seed for job in jobs] == [seed for seed in range(5) for _ in range(4)]
    assert {job.order for job in jobs} == {"mixed", "blocks"}
    assert all(job.variant == Variant(few=True) for job in jobs)
    quick = _options(["--quick"])
    assert (quick.seeds, quick.cases, quick.few) == ([0], "gptoss8", True)


def test_a_case_without_its_trace_is_named_and_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv(DATA_VARIABLE, raising=False)
    jobs = _jobs(_options(["--cases", "tiny,synthetic", "--seeds", "0"]))
    assert {job.case for job in jobs} == {"synthetic"}
    assert "left out: tiny" in capsys.readouterr().out


def test_the_published_command_names_no_file_of_this_machine() -> None:
    words = ["--json", "/somewhere/x.json", "--seeds", "0-1", "--json=/y", "--docs"]
    assert public_command(words) == "python -m benchmarks.placement --seeds 0-1 --docs"
    assert public_command([]) == "python -m benchmarks.placement"


def test_seeds_are_ranges_and_lists() -> None:
    assert seed_range("0-2,7") == [0, 1, 2, 7]
    with pytest.raises(ValueError, match="invalid literal"):
        seed_range("a")


def test_only_named_files_and_licences_leave_a_wheel(tmp_path: Path) -> None:
    package = PACKAGES[1]
    wheel = tmp_path / "x.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name in package.files:
            archive.writestr(name, "x = 1\n")
        archive.writestr("vllm/other.py", "y = 1\n")
        archive.writestr("vllm-1.dist-info/licenses/LICENSE", "words\n")
    folder = tmp_path / "peers"
    unpack(wheel, package, folder)
    found = sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())
    assert found == sorted([*package.files.values(), "vllm_eplb/LICENSE", "vllm_eplb/SOURCE"])
    assert "vllm_eplb/default.py" in found
    with pytest.raises(KeyError):
        unpack(wheel, PACKAGES[0], folder)
