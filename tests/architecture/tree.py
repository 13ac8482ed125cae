"""What the architecture tests look at: the files of the checkout, without generated code."""

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("placement", "moe_serve")
GENERATED = ROOT / "moe_serve" / "rpc" / "v1"
SKIPPED_FOLDERS = frozenset(
    {"__pycache__", ".git", ".venv", "node_modules", "build", "dist", "htmlcov", ".peers"}
)


def files_under(folder: Path, *suffixes: str) -> list[Path]:
    """Return the files below `folder` (all, or those with one of the suffixes), sorted by path."""
    return sorted(
        path
        for path in folder.rglob("*")
        if path.is_file()
        and (not suffixes or path.suffix in suffixes)
        and not SKIPPED_FOLDERS & set(path.relative_to(ROOT).parts)
        and not any(part.endswith(("_cache", ".egg-info")) for part in path.parts)
    )


def sources(*folders: str) -> list[Path]:
    """Return the Python files that people wrote below the named folders of the checkout."""
    found = [path for name in folders for path in files_under(ROOT / name, ".py")]
    return [path for path in found if GENERATED not in path.parents]


@cache
def parsed(path: Path) -> ast.Module:
    """Return the syntax tree of a Python file."""
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def name_of(path: Path) -> str:
    """Return the path as people write it: relative to the checkout, with forward slashes."""
    return path.relative_to(ROOT).as_posix()


def module_of(path: Path) -> str:
    """Return the dotted name of a module of the two packages."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
