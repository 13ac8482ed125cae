"""Shell blocks of docs/: each is executed by somebody or says what it needs, and every command in
it exists.

A block is fenced (```sh) or indented by four spaces. A mark is a comment in front of it:
`<!-- run: FILE -->` names the test that runs it, `<!-- run: here -->` has this test run it, and
`<!-- needs: WHAT -->` says what a test has not. `<!-- shell: needs WHAT -->`, or `shell: run FILE`,
marks all blocks of a page that have no mark of their own.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass
from pathlib import Path

import pytest
import typer

from moe_serve.cli.app import app
from tests.architecture.test_readme import command_problem, what_a_shell_says
from tests.architecture.tree import ROOT, name_of

NEEDS = frozenset(
    {
        "a cluster",
        "a running service",
        "a working copy",
        "an hour or more",
        "Docker",
        "files of yours",
        "Kubernetes",
    }
)
HERE = "here"
COMMANDS = frozenset(
    {
        "cd",
        "curl",
        "docker",
        "export",
        "for",
        "git",
        "kubectl",
        "make",
        "moe-serve",
        "openssl",
        "pip",
        "pytest",
        "python",
        "ray",
    }
)
"""First words by which an indented block is one for a shell."""
CHECKED = frozenset({"make", "moe-serve"})
"""Commands of ours, whose every option is checked."""
BLOCK = re.compile(
    r"(?:^<!-- (?P<word>run|needs): (?P<what>.+?) -->\n\n?)?"
    r"(?:^```(?:sh|bash)\n(?P<fenced>.*?)^```$"
    r"|(?<=\n\n)(?P<indented>(?:    [^\n]*\n|\n(?=    ))+))",
    re.MULTILINE | re.DOTALL,
)
PAGE = re.compile(r"^<!-- shell: (?P<word>run|needs) (?P<what>.+?) -->$", re.MULTILINE)
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


@dataclass(frozen=True)
class Block:
    """A shell block of a page, with its mark or its page's."""

    page: str
    word: str
    what: str
    text: str

    @property
    def commands(self) -> list[list[str]]:
        """Words of each command line, without comments; continued lines are one."""
        joined = self.text.replace("\\\n", " ").splitlines()
        lines = (shlex.split(line, comments=True) for line in joined)
        return [words for words in lines if words]

    def __str__(self) -> str:
        return f"{self.page}: {self.text.splitlines()[0].strip()}"


def blocks(page: str, text: str) -> list[Block]:
    """Shell blocks of a page, in order."""
    whole = PAGE.search(text)
    found = []
    for match in BLOCK.finditer(text):
        inside = match["fenced"] or "".join(
            line[4:] or "\n" for line in match["indented"].splitlines(keepends=True)
        )
        first = inside.split(maxsplit=1)[0] if inside.split() else ""
        if match["fenced"] is None and first not in COMMANDS:
            continue
        mark = match if match["word"] else whole
        word, what = (mark["word"], mark["what"]) if mark else ("", "")
        found.append(Block(page, word, what, inside))
    return found


PAGES = sorted((ROOT / "docs").rglob("*.md"))
ALL = [block for path in PAGES for block in blocks(name_of(path), path.read_text(encoding="utf-8"))]


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
        runner = ROOT / block.what
        assert runner.is_file(), f"{block.what} runs this block but is not there"
        text = runner.read_text(encoding="utf-8")
        absent = [words[1] for words in block.commands if words[1].strip("-") not in text]
        assert absent == [], f"{block.what} does not run these"


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
        "    ray up x\n\n    ray down x\n\ntext\n\n"
        "<!-- run: here -->\n\n    make help\n\ntext:\n\n    key: value\n\n"
        "<!-- needs: an hour or more -->\n```sh\nmake soak\n```\n\n"
        "- a list\n    make nothing\n\n```python\n    make = 1\n```\n"
    )
    assert [(one.word, one.what, one.text) for one in blocks("x.md", text)] == [
        ("needs", "a cluster", "ray up x\n\nray down x\n"),
        ("run", "here", "make help\n"),
        ("needs", "an hour or more", "make soak\n"),
    ]
    assert [one.word for one in blocks("x.md", "\n\n    make help\n")] == [""]


@pytest.mark.parametrize(
    "line", ["moe-serve drian RANK", "moe-serve plan --polcy eplb", "make soac"]
)
def test_a_command_that_does_not_exist_is_seen(line: str) -> None:
    assert problem(shlex.split(line))
