"""Rules of the tree that no linter knows: sizes, names, unsafe loaders, imports of the core."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from moe_serve import warm_kernels
from tests.architecture.tree import (
    PACKAGES,
    ROOT,
    files_under,
    module_of,
    name_of,
    parsed,
    sources,
)

MODULE_LINES_MAX = 450
TEST_LINES_MAX = 800
FUNCTION_LINES_MAX = 80
# Files that are longer than the limit, with their length. The list may only shrink: an entry above
# the file's real length, or for a file within the limit, fails too.
LONGER_FILES: dict[str, int] = {}

MAY_PRINT = ("moe_serve/cli", "moe_serve/demo", "moe_serve/bench", "benchmarks")
BANNED_STEMS = frozenset({"utils", "util", "helpers", "helper", "common", "misc"})
BANNED_IMPORTS = frozenset({"pickle", "cloudpickle", "dill", "marshal", "shelve"})
BANNED_CALLS = frozenset({"eval", "exec", "torch.load", "yaml.load", "yaml.unsafe_load"})
CORE_MAY_IMPORT = frozenset(
    {
        "__future__",
        "abc",
        "base64",
        "bisect",
        "collections",
        "copy",
        "dataclasses",
        "enum",
        "fractions",
        "functools",
        "hashlib",
        "heapq",
        "itertools",
        "math",
        "msgspec",
        "numba",
        "numpy",
        "operator",
        "placement",
        "re",
        "struct",
        "types",
        "typing",
        "zlib",
    }
)
UNFINISHED = re.compile(r"\b(TODO|FIXME|XXX|HACK)\b")
MACHINE_PATH = re.compile(r"(?<![\w.])/(work|home|root)/\w")


def _dotted(node: ast.expr) -> str:
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def _calls(path: Path) -> Iterator[tuple[ast.Call, str]]:
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Call):
            yield node, _dotted(node.func)


def _imported(path: Path) -> Iterator[tuple[int, str]]:
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.lineno, node.module


def _texts() -> list[Path]:
    suffixes = (".py", ".proto", ".md", ".toml", ".yaml", ".yml", ".html", ".js", ".css", ".txt")
    # This file names what it looks for.
    return [path for path in files_under(ROOT, *suffixes) if path != Path(__file__).resolve()]


def test_nothing_prints_but_what_talks_to_people() -> None:
    found = [
        f"{name_of(path)}:{call.lineno}"
        for path in sources(*PACKAGES)
        if not name_of(path).startswith(MAY_PRINT)
        for call, name in _calls(path)
        if name == "print"
    ]
    assert found == []


def test_nothing_is_marked_unfinished() -> None:
    found = [
        f"{name_of(path)}:{number}: {line.strip()}"
        for path in _texts()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if UNFINISHED.search(line)
    ]
    assert found == []


def test_no_path_of_a_developers_machine() -> None:
    found = [
        f"{name_of(path)}:{number}: {line.strip()}"
        for path in _texts()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1)
        if MACHINE_PATH.search(line)
    ]
    assert found == []


def test_modules_are_named_for_what_they_do() -> None:
    found = [
        name_of(path)
        for path in sources(*PACKAGES, "benchmarks", "tests")
        if BANNED_STEMS & {path.stem, *path.relative_to(ROOT).parts[:-1]}
    ]
    assert found == []


def test_no_unsafe_loader() -> None:
    found = [
        f"{name_of(path)}:{line}: import {name}"
        for path in sources(*PACKAGES)
        for line, name in _imported(path)
        if name.partition(".")[0] in BANNED_IMPORTS
    ]
    for path in sources(*PACKAGES):
        for call, name in _calls(path):
            pickles = any(
                word.arg == "allow_pickle"
                and not (isinstance(word.value, ast.Constant) and word.value.value is False)
                for word in call.keywords
            )
            tensors_alone = name == "torch.load" and any(
                word.arg == "weights_only"
                and isinstance(word.value, ast.Constant)
                and word.value.value is True
                for word in call.keywords
            )
            if (name in BANNED_CALLS and not tensors_alone) or pickles:
                found.append(f"{name_of(path)}:{call.lineno}: {name}")
    assert found == []


def test_no_generator_without_a_seed() -> None:
    found = [
        f"{name_of(path)}:{call.lineno}: {name}()"
        for path in sources(*PACKAGES, "benchmarks", "tests")
        for call, name in _calls(path)
        if name.rpartition(".")[2] in {"default_rng", "SeedSequence"}
        and not call.args
        and not call.keywords
    ]
    assert found == []


def test_the_core_imports_only_what_is_pure() -> None:
    found = [
        f"{name_of(path)}:{line}: {name}"
        for path in sources("placement")
        for line, name in _imported(path)
        if name.partition(".")[0] not in CORE_MAY_IMPORT
    ]
    assert found == []


@pytest.mark.parametrize(
    ("folders", "limit"),
    [((*PACKAGES, "benchmarks"), MODULE_LINES_MAX), (("tests", "protos"), TEST_LINES_MAX)],
    ids=["modules", "tests"],
)
def test_files_are_short(folders: tuple[str, ...], limit: int) -> None:
    found = []
    for path in sources(*folders):
        lines = len(path.read_text(encoding="utf-8").splitlines())
        allowed = LONGER_FILES.get(name_of(path))
        if allowed is None and lines > limit:
            found.append(f"{name_of(path)}: {lines} lines, the limit is {limit}; split it")
        elif allowed is not None and lines > allowed:
            found.append(f"{name_of(path)}: {lines} lines, it had {allowed}; the list only shrinks")
        elif allowed is not None and (lines < allowed or lines <= limit):
            found.append(f"{name_of(path)}: now {lines} lines; lower or remove its entry")
    assert found == []


def test_every_longer_file_exists() -> None:
    assert [name for name in LONGER_FILES if not (ROOT / name).is_file()] == []


def test_functions_fit_on_a_screen() -> None:
    found = [
        f"{name_of(path)}:{node.lineno}: {node.name} has {length} lines"
        for path in sources(*PACKAGES, "benchmarks", "protos")
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (length := (node.end_lineno or node.lineno) - node.lineno + 1) > FUNCTION_LINES_MAX
    ]
    assert found == []


def test_every_kernel_is_compiled_by_setup() -> None:
    with_kernels = {
        module_of(path)
        for path in sources(*PACKAGES)
        if any(name.partition(".")[0] == "numba" for _, name in _imported(path))
    }
    warmed = {warm.__module__ for warm in warm_kernels.WARMERS}
    assert sorted(warmed) == sorted(with_kernels)
