"""The checkers of the project, each as one test, and proof that the import contracts bite."""

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.architecture.tree import PACKAGES, ROOT, files_under

BIN = Path(sys.executable).parent


def _run(*command: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    # Each tool lies beside this interpreter; PATH may name another environment.
    return subprocess.run(
        [str(BIN / command[0]), *command[1:]],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(cwd), "NO_COLOR": "1", "COLUMNS": "160"},
        capture_output=True,
        text=True,
        check=False,
    )


def _assert_clean(*command: str) -> None:
    done = _run(*command)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}{done.stderr}"


def test_import_contracts_hold() -> None:
    _assert_clean("lint-imports", "--no-logo", "--no-cache")


def test_linter_is_content() -> None:
    _assert_clean("ruff", "check", ".")


def test_format_is_kept() -> None:
    _assert_clean("ruff", "format", "--check", ".")


@pytest.mark.timeout(600)  # a first run without a cache reads the types of torch and Ray
def test_types_hold() -> None:
    _assert_clean("mypy")


def test_protos_are_lint_clean() -> None:
    _assert_clean("buf", "lint", "protos")


def _skeleton(folder: Path) -> None:
    """Copy what the import contracts read."""
    for path in [*files_under(ROOT / "placement", ".py"), *files_under(ROOT / "moe_serve", ".py")]:
        target = folder / path.relative_to(ROOT)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, target)
    shutil.copyfile(ROOT / "pyproject.toml", folder / "pyproject.toml")


@pytest.mark.parametrize(
    ("file", "line", "contract"),
    [
        ("placement/topology.py", "import placement.layout", "core layers"),
        ("placement/layout.py", "import time", "the core has no I/O"),
        ("placement/layout.py", "import moe_serve.errors", "the core has no I/O"),
        ("placement/unplaced.py", "", "core layers"),
        ("moe_serve/errors.py", "import moe_serve.ports", "shell layers"),
        ("moe_serve/unplaced.py", "", "shell layers"),
        ("moe_serve/ports.py", "import ray", "ray only in"),
        ("moe_serve/shard/planted.py", "import ray", "ray only in"),
        ("moe_serve/ports.py", "import placement.planner", "the core's inside is private"),
        ("moe_serve/ports.py", "import moe_serve.rpc.v1", "generated code only through rpc"),
    ],
)
def test_a_breach_of_a_contract_is_seen(
    tmp_path: Path, file: str, line: str, contract: str
) -> None:
    _skeleton(tmp_path)
    planted = tmp_path / file
    with planted.open("a", encoding="utf-8") as source:
        source.write(f"\n{line}\n")
    done = _run("lint-imports", "--no-logo", "--no-cache", cwd=tmp_path)
    broken = [text for text in done.stdout.splitlines() if " BROKEN" in text]
    assert any(text.startswith(contract) for text in broken), f"{done.stdout}{done.stderr}"


def test_the_skeleton_itself_is_clean(tmp_path: Path) -> None:
    _skeleton(tmp_path)
    done = _run("lint-imports", "--no-logo", "--no-cache", cwd=tmp_path)
    assert done.returncode == 0, f"{done.stdout}{done.stderr}"
    assert {path.name for path in tmp_path.iterdir()} >= {*PACKAGES, "pyproject.toml"}


def _contracts() -> dict[str, dict[str, object]]:
    table = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    return {one["id"]: one for one in table["tool"]["importlinter"]["contracts"]}


def _exists(module: str) -> bool:
    path = ROOT.joinpath(*module.split("."))
    return path.with_suffix(".py").is_file() or (path / "__init__.py").is_file()


@pytest.mark.parametrize("contract", ["core-layers", "shell-layers"])
def test_a_layer_stands_in_parentheses_until_it_exists(contract: str) -> None:
    (container,) = _contracts()[contract]["containers"]
    wrong = []
    for layer in _contracts()[contract]["layers"]:
        for name in layer.split(" | "):
            optional = name.startswith("(")
            if optional == _exists(f"{container}.{name.strip('()')}"):
                wrong.append(f"{name}: {'take off' if optional else 'add'} the parentheses")
    assert wrong == []


@pytest.mark.parametrize(
    ("contract", "key", "modules"),
    [
        (
            "core-private",
            "forbidden_modules",
            ("placement.policy", "placement.planner", "placement.migration", "placement.sim"),
        ),
        ("no-ray-in-clients", "source_modules", ("moe_serve.client", "moe_serve.frontends")),
        ("generated-code", "protected_modules", ("moe_serve.rpc.v1",)),
    ],
)
def test_a_contract_names_every_module_it_is_for(
    contract: str, key: str, modules: tuple[str, ...]
) -> None:
    # The linter refuses names that do not exist, so each arrives here with its module.
    expected = [name for name in modules if _exists(name)]
    if expected:
        assert _contracts()[contract][key] == expected
    else:
        assert contract not in _contracts()
