"""The planted bugs: one small patch each, with a word on what it does and which promise it breaks.

A patch is a unified diff below a header of `What:` (it may go on in indented lines), `Breaks:` and
an empty line.
"""

import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(__file__).resolve().parent / "patches"
NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
HEADER = re.compile(r"What: (?P<what>\S.*(?:\n  \S.*)*)\nBreaks: (?P<breaks>[IS][1-9][0-9]?)\n\n")
CHANGED = re.compile(r"^--- a/(\S+)\n\+\+\+ b/(\S+)\n", re.MULTILINE)


@dataclass(frozen=True)
class Planted:
    """A planted bug. `breaks`: the invariant (I1 to I13) or rule of security (S) it breaks.
    `files`: what it changes."""

    name: str
    what: str
    breaks: str
    files: tuple[str, ...]
    path: Path


class BadPatch(Exception):
    """The patch is not as it should be, or does not apply. The text says which and why."""


def read_patch(path: Path) -> Planted:
    """Raises BadPatch."""
    text = path.read_text(encoding="utf-8")
    header = HEADER.match(text)
    if NAME.fullmatch(path.stem) is None:
        raise BadPatch(f"{path.name}: names are words of small letters, with hyphens between")
    if header is None:
        raise BadPatch(f"{path.name}: begins with 'What: ...', 'Breaks: I3' and an empty line")
    changed = CHANGED.findall(text)
    files = tuple(before for before, after in changed if before == after)
    if not files or len(files) < len(changed):
        raise BadPatch(f"{path.name}: changes one file or several, and renames none")
    if not all(file.startswith(("placement/", "moe_serve/")) for file in files):
        raise BadPatch(f"{path.name}: changes production code only, not {', '.join(files)}")
    what = re.sub(r"\s+", " ", header["what"])
    return Planted(path.stem, what, header["breaks"], files, path)


def all_patches() -> list[Planted]:
    """By name. Raises BadPatch."""
    return [read_patch(path) for path in sorted(FOLDER.iterdir())]


def apply(planted: Planted, tree: Path, *, only_check: bool = False) -> None:
    """Apply it to a tree. Raises BadPatch where it does not fit."""
    command = ["git", "apply", "--whitespace=nowarn", *(["--check"] if only_check else [])]
    # A tree within some other repository is not that one's business.
    alone = os.environ | {"GIT_CEILING_DIRECTORIES": str(tree.parent)}
    applied = subprocess.run(
        [*command, str(planted.path)],
        check=False,
        cwd=tree,
        env=alone,
        capture_output=True,
        text=True,
    )
    if applied.returncode:
        why = applied.stderr.strip().replace("\n", "; ")
        raise BadPatch(f"{planted.path.name} no longer applies, make it anew: {why}")
