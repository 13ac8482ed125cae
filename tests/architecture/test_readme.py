"""Blocks of README and of the tutorial: each block of README for a shell is executed by somebody or
marked and every command in it exists; every Python block of both is executed, imports what it
names and passes arguments that are taken."""

import ast
import importlib
import inspect
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from moe_serve.cli.app import app
from tests.architecture.tree import ROOT
from tests.doc_blocks import HERE, Block, blocks_of, runner_problem

TARGET = re.compile(r"^([a-z-]+):.*## ", re.MULTILINE)
# What a line may begin with; everything else would need a rule of its own here.
ANYWHERE = frozenset({"make", "moe-serve"})
ON_A_CLUSTER = ANYWHERE | {"ray"}
NEEDS = frozenset({"a cluster"})


ALL = blocks_of("README.md")
SHELL = [block for block in ALL if block.kind == "sh"]
PYTHON = [block for block in [*ALL, *blocks_of("docs/tutorial.md")] if block.kind == "python"]
CLIENT, MODEL = PYTHON


def command_problem(words: list[str], *, cluster: bool) -> str:
    """Return why a command line cannot be run, "" where it can."""
    if words[0] not in (ON_A_CLUSTER if cluster else ANYWHERE):
        return f"no rule for {words[0]!r}"
    if words[0] == "make":
        there = set(TARGET.findall((ROOT / "Makefile").read_text(encoding="utf-8")))
        return ", ".join(f"no target {word}" for word in words[1:] if word not in there)
    if words[0] == "ray":
        inner = [shlex.split(word) for word in words if word.startswith("moe-serve ")]
        return ", ".join(filter(None, (_moe_serve_problem(line[1:]) for line in inner)))
    return _moe_serve_problem(words[1:])


def _moe_serve_problem(words: list[str]) -> str:
    group: Any = typer.main.get_command(app)
    try:
        # Parsing only: neither the group nor the command is invoked.
        parsed = group.make_context("moe-serve", list(words))
        name, command, rest = group.resolve_command(parsed, [*parsed._protected_args, *parsed.args])
        command.make_context(name, rest, parent=parsed)
    except (SystemExit, typer.Exit) as ended:
        return f"{' '.join(words)}: ended with {ended}"
    except Exception as error:  # the parser's own class of usage errors is private
        return f"{' '.join(words)}: {getattr(error, 'message', error)}"
    files = [word for word in words if word.endswith((".yaml", ".npz")) and word[0] != "/"]
    return ", ".join(f"no file {name}" for name in files if not (ROOT / name).is_file())


def what_a_shell_says(text: str, state: Path) -> str:
    """Run a block with this environment's programs, its services recorded under `state`. Returns
    all it said where it failed, "" where it went well."""
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "XDG_STATE_HOME": str(state),
    }
    done = subprocess.run(
        ["/bin/bash", "-euo", "pipefail", "-c", text],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    return f"exit {done.returncode}\n{done.stdout}{done.stderr}" if done.returncode else ""


def test_blocks_are_found() -> None:
    assert len(SHELL) >= 5
    assert len(ALL) == len(SHELL)


@pytest.mark.parametrize("block", SHELL, ids=lambda block: block.text.splitlines()[0])
def test_a_shell_block_is_executed_or_marked(block: Block) -> None:
    assert block.word, "say above the block who runs it, or what it needs"
    if block.word == "needs":
        assert block.what in NEEDS
    elif block.what != HERE:
        assert runner_problem(block) == ""


@pytest.mark.parametrize("block", SHELL, ids=lambda block: block.text.splitlines()[0])
def test_every_command_exists(block: Block) -> None:
    cluster = block.what == "a cluster"
    problems = [command_problem(words, cluster=cluster) for words in block.commands]
    assert [problem for problem in problems if problem] == []


@pytest.mark.parametrize(
    ("line", "cluster"),
    [
        ("make dmeo", False),
        ("moe-serve statsu", False),
        ("moe-serve status --chekc", False),
        ("moe-serve up -f examples/absent.yaml", False),
        ("moe-serve apply", False),
        ("moe-serve demo --seconds soon", False),
        ("ray up cluster.yaml", False),
        ("ray exec cluster.yaml 'moe-serve up --addres auto'", True),
        ("curl https://example.org", True),
    ],
)
def test_a_command_that_does_not_exist_is_seen(line: str, cluster: bool) -> None:
    assert command_problem(shlex.split(line), cluster=cluster)


@pytest.mark.timeout(180)  # each command imports numba's kernels
def test_blocks_of_this_page_run(tmp_path: Path) -> None:
    own = [block for block in SHELL if block.what == HERE]
    assert own
    for block in own:
        problem = what_a_shell_says(block.text, tmp_path)
        assert problem == "", block


def _imports(tree: ast.Module) -> dict[str, Any]:
    """Objects that a block imports, by the name it gives them. Raises where one does not exist."""
    found: dict[str, Any] = {}
    for node in tree.body:
        if isinstance(node, ast.ImportFrom):
            assert node.module is not None
            module = importlib.import_module(node.module)
            found |= {one.asname or one.name: getattr(module, one.name) for one in node.names}
        elif isinstance(node, ast.Import):
            found |= {
                one.asname or one.name: importlib.import_module(one.name) for one in node.names
            }
    return found


def _kinds(tree: ast.Module, imported: dict[str, Any]) -> dict[str, type]:
    """Classes of the names bound by `with Class(...) as name`."""
    found: dict[str, type] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.withitem) and isinstance(node.optional_vars, ast.Name):
            match node.context_expr:
                case ast.Call(func=ast.Name(id=name)) if isinstance(imported.get(name), type):
                    found[node.optional_vars.id] = imported[name]
    return found


def call_problems(text: str) -> list[str]:
    """Return the calls of a block whose function is known and does not take their arguments."""
    tree = ast.parse(text)
    imported = _imports(tree)
    kinds = _kinds(tree, imported)
    problems = []
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Name(id=name)) if name in imported:
                called, first = imported[name], ()
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name), attr=attr)) if name in kinds:
                called, first = getattr(kinds[name], attr, None), (None,)
            case _:
                continue
        if called is None:
            problems.append(f"line {node.lineno}: {ast.unparse(node.func)} does not exist")
            continue
        words = {word.arg: None for word in node.keywords if word.arg is not None}
        try:
            inspect.signature(called).bind(*first, *node.args, **words)
        except TypeError as error:
            problems.append(f"line {node.lineno}: {ast.unparse(node.func)}: {error}")
    return problems


@pytest.mark.parametrize("block", PYTHON, ids=["client", "model"])
@pytest.mark.timeout(120)  # transformers takes seconds to import
def test_a_python_block_names_what_exists(block: Block) -> None:
    assert block.word == "run"
    assert runner_problem(block) == ""
    compile(block.text, block.page, "exec")
    assert call_problems(block.text) == []


def test_a_wrong_call_is_seen() -> None:
    text = CLIENT.text
    assert call_problems(text.replace("phase=", "phaze="))
    assert call_problems(text.replace("client.spec()", "client.spec(1, 2)"))
    assert call_problems(text.replace("client.spec()", "client.specs()"))
    with pytest.raises(AttributeError):
        call_problems(text.replace("Client, Phase", "Client, Fase"))
