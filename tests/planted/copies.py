"""Copies of the tree to plant bugs in: what git knows of or would add, with numba's caches.

Numba's cache looks at the time and size of a kernel's file and not at what the kernel imports:
times are kept in a copy, and where a bug is planted the caches of all kernels that use it go.
"""

import re
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

PACKAGES = ("placement", "moe_serve")
IMPORTED = re.compile(r"^\s*(?:from|import) ((?:placement|moe_serve)[\w.]*)", re.MULTILINE)


def files_of(root: Path) -> list[str]:
    """Files of the working tree, changed and new ones as they are, without what git ignores."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=root,
        check=True,
        capture_output=True,
        text=True,
    )
    return sorted({name for name in listed.stdout.split("\0") if name and (root / name).is_file()})


def copy_tree(root: Path, files: Iterable[str], to: Path) -> None:
    """Copy the files and numba's caches of both packages."""
    caches = [
        str(path.relative_to(root))
        for package in PACKAGES
        for path in (root / package).rglob("__pycache__/*.nb[ic]")
    ]
    for name in [*files, *caches]:
        (to / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(root / name, to / name)


def drop_caches(tree: Path, changed: Iterable[str]) -> int:
    """Remove the caches of all kernels that use the changed files, however far away; how many
    modules lost theirs."""
    sources = {
        ".".join(path.relative_to(tree).with_suffix("").parts).removesuffix(".__init__"): path
        for package in PACKAGES
        for path in (tree / package).rglob("*.py")
    }
    uses = {
        name: set(IMPORTED.findall(path.read_text(encoding="utf-8")))
        for name, path in sources.items()
    }
    stale = {name for name, path in sources.items() if str(path.relative_to(tree)) in set(changed)}
    while more := {name for name in uses if name not in stale and uses[name] & stale}:
        stale |= more
    dropped = set()
    for name in stale:
        path = sources[name]
        for cache in (path.parent / "__pycache__").glob(f"{path.stem}.*.nb[ic]"):
            cache.unlink()
            dropped.add(name)
    return len(dropped)
