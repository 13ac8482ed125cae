"""Blocks of README and docs/: what is in them, who runs them, and whether that is so.

A block is fenced, or indented by four spaces where its first word is a command. A mark is a comment
in front of it:

- `<!-- run: FILE -->`: a test of that file runs it in CI; `<!-- run: here -->`: the page's own
  architecture test does.
- `<!-- slow: FILE -->`: only a test that `make test` leaves out runs it, in `make test-all`.
- `<!-- needs: WHAT -->`: nobody runs it; it says what a test has not.

`<!-- shell: needs WHAT -->`, or `shell: run FILE`, marks all shell blocks of a page that have no
mark of their own.
"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
HERE = "here"
SHELL = frozenset({"sh", "bash"})
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
_PART = re.compile(
    r"^#+ (?P<section>[^\n]+)$"
    r"|(?:^<!-- (?P<word>run|slow|needs): (?P<what>[^\n]+?) -->\n\n?)?"
    r"(?:^```(?P<kind>\w*)\n(?P<fenced>.*?)^```$"
    r"|(?<=\n\n)(?P<indented>(?:    [^\n]*\n|\n(?=    ))+))",
    re.MULTILINE | re.DOTALL,
)
_PAGE = re.compile(r"^<!-- shell: (?P<word>run|slow|needs) (?P<what>.+?) -->$", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A block of a page: the heading it stands under, its language, its mark or its page's, and its
    lines."""

    page: str
    section: str
    kind: str
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
    """Every fenced block of a page, and every indented one that is for a shell, in order."""
    whole, section, found = _PAGE.search(text), "", []
    for part in _PART.finditer(text):
        if part["section"]:
            section = part["section"]
            continue
        kind, inside = part["kind"], part["fenced"]
        if inside is None:
            lines = part["indented"].splitlines(keepends=True)
            kind, inside = "sh", "".join(line[4:] or "\n" for line in lines)
            if not inside.split() or inside.split(maxsplit=1)[0] not in COMMANDS:
                continue
        mark = part if part["word"] else whole if kind in SHELL else None
        word, what = (mark["word"], mark["what"]) if mark else ("", "")
        found.append(Block(page, section, kind, word, what, inside))
    return found


def blocks_of(page: str) -> list[Block]:
    """Those of a page by its name, as `docs/tutorial.md`."""
    return blocks(page, (ROOT / page).read_text(encoding="utf-8"))


def marked(page: str, runner: str, word: str = "run") -> list[Block]:
    """Shell blocks of a page that say, by this word, that this file runs them."""
    return [
        block
        for block in blocks_of(page)
        if block.kind in SHELL and (block.word, block.what) == (word, runner)
    ]


def runner_problem(block: Block) -> str:
    """Why the file that a block names does not run it, "" where it does.

    A test that names the page reads its blocks from there. Any other file must have each command
    and each option of it as words of its own; of a Python file those in texts, without docstrings,
    and for `run` without tests that are slow.
    """
    file = ROOT / block.what
    if not file.is_file():
        return f"{block.what} is not there"
    text = file.read_text(encoding="utf-8")
    if file.suffix != ".py":
        have = set(text.split())
    else:
        tree = ast.parse(text)
        quick = _without_slow(tree)
        if block.word == "run":
            if not list(_tests(quick)):
                return f"{block.what} is slow: only `make test-all` runs it"
            tree = quick
        elif len(list(_tests(quick))) == len(list(_tests(tree))):
            return f"{block.what} is not slow: say `run`"
        have = set(_words(tree))
    if block.page in have:
        return ""
    if block.kind not in SHELL:
        return f"{block.what} does not read {block.page}"
    absent = [
        word
        for words in block.commands
        for word in (words[1], *(w for w in words[2:] if w.startswith("-")))
        if word not in have
    ]
    return f"{block.what} does not run {' '.join(absent)}" if absent else ""


def _tests(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    for node in tree.body:
        if isinstance(node, kinds) and node.name.startswith("test_"):
            yield node


def _without_slow(tree: ast.Module) -> ast.Module:
    """A module without the tests that `make test` leaves out."""
    marks = [n.value for n in tree.body if isinstance(n, ast.Assign) and _names(n) == "pytestmark"]
    if any("mark.slow" in ast.unparse(mark) for mark in marks):
        return ast.Module([], [])
    slow = {
        test
        for test in _tests(tree)
        if any(ast.unparse(mark) == "pytest.mark.slow" for mark in test.decorator_list)
    }
    return ast.Module([node for node in tree.body if node not in slow], [])


def _names(node: ast.Assign) -> str:
    return ast.unparse(node.targets[0])


def _words(tree: ast.Module) -> Iterator[str]:
    """Words of every text of a module that is no docstring."""
    remarks = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in remarks:
            yield from node.value.split()
