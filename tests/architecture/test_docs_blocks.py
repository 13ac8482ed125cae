"""Shell blocks of docs/: each is executed by somebody or says what it needs, and every command in
it exists. How a block is marked: `tests.doc_blocks`.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
import typer

from moe_serve.cli.app import app
from tests.architecture.test_readme import command_problem, what_a_shell_says
from tests.architecture.tree import ROOT, name_of
from tests.doc_blocks import HERE, SHELL, Block, blocks, runner_problem

NEEDS = frozenset(
    {
        "a cluster",
        "a working copy",
        "an hour or more",
        "Docker",
        "files of yours",
        "Kubernetes",
    }
)
CHECKED = frozenset({"make", "moe-serve"})
"""Commands of ours, whose every option is checked."""
PLACES = {
    "RANK": "0",
    "N": "1",
    "PLAN_ID": "1-1",
    "PLAN": "1-1",
    "SECONDS": "1",
    "LAYER": "0",
    "SLOTS": "39slots",
    "FILE": "service.yaml",
}
"""What stands for a word in capitals where a command is only parsed."""


PAGES = sorted((ROOT / "docs").rglob("*.md"))
ALL = [
    block
    for path in PAGES
    for block in blocks(name_of(path), path.read_text(encoding="utf-8"))
    if block.kind in SHELL
]

INLINE = re.compile(r"`((?:moe-serve|make) [^`]+)`")
"""A command of ours within a sentence."""
COMMAND_NAMES = frozenset(typer.main.get_command(app).commands)  # type: ignore[attr-defined]
RUNBOOKS = sorted((ROOT / "docs" / "runbooks").glob("*.md"))
INLINES = [
    (path.stem, command)
    for path in RUNBOOKS
    for command in INLINE.findall(path.read_text(encoding="utf-8"))
]


def inline_problem(command: str) -> str:
    """As `problem`; a command's name alone stands for it, whatever it must be given."""
    words = shlex.split(command)
    if len(words) == 2 and words[1] in COMMAND_NAMES:
        return ""
    return problem(words)


def problem(words: list[str]) -> str:
    """Why a command of ours cannot be run, "" where it can or is not ours."""
    if words[0] not in CHECKED:
        return ""
    placed = [PLACES.get(word, word) for word in words if "=" not in word or words[0] != "make"]
    said = command_problem(placed, cluster=True)
    # Files of the reader's are not here.
    return "" if said.startswith("no file") else said


def test_blocks_are_found_on_many_pages() -> None:
    assert len(ALL) >= 30
    assert len({block.page for block in ALL}) >= 8


@pytest.mark.parametrize("block", ALL, ids=str)
def test_a_block_is_executed_or_says_what_it_needs(block: Block) -> None:
    assert block.word, "say in front of it who runs it, or what it needs"
    if block.word == "needs":
        assert block.what in NEEDS
    elif block.what != HERE:
        assert runner_problem(block) == ""


@pytest.mark.parametrize("block", ALL, ids=str)
def test_every_command_of_ours_exists(block: Block) -> None:
    assert [said for words in block.commands if (said := problem(words))] == []


@pytest.mark.parametrize(("page", "command"), INLINES)
def test_every_command_that_a_runbook_names_can_be_run(page: str, command: str) -> None:
    assert inline_problem(command) == "", page


@pytest.mark.parametrize(
    "command",
    ["moe-serve roll --only shards", "moe-serve drian", "moe-serve events --rul x", "make soac"],
)
def test_a_command_of_a_runbook_that_is_refused_is_seen(command: str) -> None:
    assert inline_problem(command) != ""


def test_commands_of_runbooks_are_found() -> None:
    assert len(INLINES) >= 40
    assert len({page for page, _ in INLINES}) >= 15


@pytest.mark.timeout(300)  # each command imports numba's kernels
def test_blocks_that_are_run_here_run(tmp_path: Path) -> None:
    own = [block for block in ALL if block.what == HERE]
    assert own
    for block in own:
        problem = what_a_shell_says(block.text, tmp_path)
        assert problem == "", block


def test_marks_and_blocks_are_read() -> None:
    text = (
        "# x\n\n<!-- shell: needs a cluster -->\n\ntext\n\n"
        "    ray up x\n\n    ray down x\n\n## y z\n\n"
        "<!-- run: here -->\n\n    make help\n\ntext:\n\n    key: value\n\n"
        "<!-- slow: t.py -->\n```sh\n# no heading\nmake soak\n```\n\n"
        "- a list\n    make nothing\n\n```python\n\n    make = 1\n```\n"
    )
    found = blocks("x.md", text)
    assert [(one.section, one.kind, one.word, one.what, one.text) for one in found] == [
        ("x", "sh", "needs", "a cluster", "ray up x\n\nray down x\n"),
        ("y z", "sh", "run", "here", "make help\n"),
        ("y z", "sh", "slow", "t.py", "# no heading\nmake soak\n"),
        ("y z", "python", "", "", "\n    make = 1\n"),
    ]
    assert [one.word for one in blocks("x.md", "\n\n    make help\n")] == [""]


QUICK = '''
"""Runs `up --keep` and `drain`, it says."""
def test_a():
    """Not so: `roll`."""
    cli("up", "-f", "x", "--wait 3")
@pytest.mark.parametrize("n", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_b(n):
    cli("down")
@pytest.mark.slow
@pytest.mark.timeout(9)
async def test_c():
    cli("up", "--keep")
'''


@pytest.mark.parametrize(
    ("mark", "line", "said"),
    [
        ("run", "up -f FILE --wait 3", ""),
        ("run", "down", ""),
        ("run", "up --keep", "--keep"),  # only a slow test does
        ("run", "drain", "drain"),  # only a remark names it
        ("run", "roll", "roll"),
        ("run", "own", "own"),  # a part of a word is none
        ("slow", "up --keep", ""),
        ("slow", "up --ship", "--ship"),
    ],
)
def test_a_runner_must_have_each_command_and_option(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mark: str, line: str, said: str
) -> None:
    monkeypatch.setattr("tests.doc_blocks.ROOT", tmp_path)
    block = Block("docs/x.md", "", "sh", mark, "runner.py", f"moe-serve {line}\n")
    assert "not there" in runner_problem(block)
    (tmp_path / "runner.py").write_text(QUICK)
    assert runner_problem(block) == (said and f"runner.py does not run {said}")


def test_a_runner_that_names_the_page_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.doc_blocks.ROOT", tmp_path)
    (tmp_path / "runner.py").write_text("def test_x():\n    walk('docs/x.md')\n")
    for page, fine in (("docs/x.md", True), ("x.md", False)):
        block = Block(page, "", "sh", "run", "runner.py", "moe-serve top\n")
        assert (runner_problem(block) == "") is fine


@pytest.mark.parametrize("mark", ["run", "slow"])
def test_a_mark_says_whether_the_runner_is_slow(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mark: str
) -> None:
    monkeypatch.setattr("tests.doc_blocks.ROOT", tmp_path)
    block = Block("x.md", "", "sh", mark, "runner.py", "moe-serve top\n")
    begin = "pytestmark = [pytest.mark.slow]\n" if mark == "run" else ""
    (tmp_path / "runner.py").write_text(f"{begin}def test_x():\n    cli('top')\n")
    assert "slow" in runner_problem(block)


@pytest.mark.parametrize(
    "line", ["moe-serve drian RANK", "moe-serve plan --polcy eplb", "make soac"]
)
def test_a_command_that_does_not_exist_is_seen(line: str) -> None:
    assert problem(shlex.split(line))
