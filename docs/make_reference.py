"""Write the reference pages from the code: `python -m docs.make_reference`.

docs/reference/config.md comes from the service file's schema, docs/reference/cli.md from the command
line itself; a test fails where a page differs from what this writes.
"""

from __future__ import annotations

import ast
import enum
import inspect
import re
import textwrap
import types
from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from moe_serve.cli.app import app
from moe_serve.cli.exits import ExitCode
from moe_serve.config import schema
from placement.config import RebalanceConfig

FOLDER = Path(__file__).resolve().parent / "reference"
_NOTE = (
    "<!-- Written by `python -m docs.make_reference`; a test compares this page with the code. -->"
)
_BOUNDS = (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<"))
_LENGTHS = (("min_length", "at least"), ("max_length", "at most"))


def _attribute_docs(kind: type) -> dict[str, str]:
    """Sentence under each attribute of a class, by name, from its source."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(kind)))
    (body,) = (node.body for node in tree.body if isinstance(node, ast.ClassDef))
    docs: dict[str, str] = {}
    for node, after in zip(body, body[1:], strict=False):
        match node, after:
            case (
                ast.AnnAssign(target=ast.Name(id=name)) | ast.Assign(targets=[ast.Name(id=name)]),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                docs[name] = " ".join(text.split())
    return docs


def _cell(text: str) -> str:
    """Text that does not break a table."""
    return text.replace("|", "\\|")


def _inner(annotation: Any) -> Any:
    """An annotation without `| None`."""
    if get_origin(annotation) in (Union, types.UnionType):
        (one,) = (kind for kind in get_args(annotation) if kind is not type(None))
        return one
    return annotation


def _section_of(annotation: Any) -> type[BaseModel] | None:
    """The model inside `Model` or `list[Model]`."""
    inner = _inner(annotation)
    if get_origin(inner) is list:
        (inner,) = get_args(inner)
    return inner if isinstance(inner, type) and issubclass(inner, BaseModel) else None


def _metadata(info: FieldInfo) -> list[Any]:
    """Bounds and parsers of a field, also where they stand inside `... | None`."""
    inner = _inner(info.annotation)
    found = [*info.metadata, *getattr(inner, "__metadata__", ())]
    return [one for item in found for one in (item, *getattr(item, "metadata", ()))]


def _is_bytes(info: FieldInfo) -> bool:
    return schema.parse_bytes in (getattr(one, "func", None) for one in _metadata(info))


def _type_words(info: FieldInfo) -> str:
    inner = _inner(info.annotation)
    if get_origin(inner) is Annotated:
        inner = get_args(inner)[0]
    section = _section_of(info.annotation)
    if _is_bytes(info):
        return 'bytes: a number or "64MiB"'
    if get_origin(inner) is Literal:
        return " or ".join(f"`{value}`" for value in get_args(inner))
    if section is not None:
        name = "list of sections" if get_origin(inner) is list else "section"
        return f"{name}, see [below](#{_anchor(_title(section))})"
    if get_origin(inner) is dict:
        return "mapping of text to text"
    names: dict[Any, str] = {str: "text", int: "integer", float: "number", bool: "true or false"}
    if isinstance(inner, type) and issubclass(inner, PurePath):
        return "path"
    return names[inner]


def _limits(info: FieldInfo) -> str:
    found = []
    for one in _metadata(info):
        for name, sign in _BOUNDS:
            if (value := getattr(one, name, None)) is not None:
                found.append(f"{sign} {value:g}" if value < 10**6 else f"{sign} {value:,}")
        for name, words in _LENGTHS:
            if (value := getattr(one, name, None)) is not None:
                found.append(f"{words} {value} entries")
        if (pattern := getattr(one, "pattern", None)) is not None:
            found.append(f"matches `{pattern}`")
    return ", ".join(found)


def _default(info: FieldInfo) -> str:
    if info.is_required():
        return "**required**"
    value = info.get_default(call_default_factory=True, validated_data={})
    if isinstance(value, BaseModel):
        return "its defaults"
    if value is None or value in ({}, ""):
        return "none"
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if _is_bytes(info) and value % (1 << 20) == 0:
        return f"`{value >> 20}MiB`"
    assert value is not PydanticUndefined
    return f"`{value}`"


def _title(section: type[BaseModel]) -> str:
    return {
        schema.ServiceConfig: "Top level",
        schema.RankGroup: "fleet.ranks",
        schema.ProfileConfig: "profiles",
        schema.FleetConfig: "fleet",
        schema.ModelConfig: "model",
        schema.LimitsConfig: "limits",
        schema.PortsConfig: "ports",
        schema.SecurityConfig: "security",
        schema.RebalanceSection: "rebalance",
    }[section]


def _anchor(title: str) -> str:
    return re.sub(r"[^\w\- ]", "", title).lower().replace(" ", "-")


def _sections(root: type[BaseModel]) -> Iterator[type[BaseModel]]:
    yield root
    for info in root.model_fields.values():
        section = _section_of(info.annotation)
        if section is not None:
            yield from _sections(section)


def config_page() -> str:
    """The page of the service file: one table a section."""
    core = _attribute_docs(RebalanceConfig)
    lines = [
        "# The service file",
        "",
        _NOTE,
        "",
        "One YAML file describes one service. Unknown keys, keys given twice and YAML aliases are faults; "
        "`moe-serve validate -f FILE`",
        "prints all faults at once as `file:line:column: field: problem`, and `--show-effective` every "
        "field with its default. A relative",
        "path starts at the folder of the file.",
        "",
    ]
    for section in _sections(schema.ServiceConfig):
        own = inspect.cleandoc(section.__doc__ or "").splitlines()
        about = (
            "How the controller decides and how steps are run. Every duration in seconds, every size "
            "in bytes."
            if section is schema.RebalanceSection
            else " ".join(own)
        )
        lines += [f"## {_title(section)}", "", about, ""]
        lines += ["| Field | Type and limits | Default | Meaning |", "|---|---|---|---|"]
        for name, info in section.model_fields.items():
            kind = ", ".join(text for text in (_type_words(info), _limits(info)) if text)
            about = info.description or core.get(name, "")
            meaning = _cell(" ".join(about.split()))
            lines.append(f"| `{name}` | {_cell(kind)} | {_default(info)} | {meaning} |")
        lines.append("")
    return "\n".join(lines)


def _options(command: Any) -> Iterator[str]:
    for one in command.params:
        if one.param_type_name == "argument":
            spelled = f"`{one.metavar or one.name.upper()}`"
        else:
            named = ", ".join(f"`{opt}`" for opt in (*one.opts, *one.secondary_opts))
            takes = "" if one.is_flag else f" {_value(one)}"
            spelled = named + takes
        yield f"| {_cell(spelled)} | {_cell(_about(one))} |"


def _value(one: Any) -> str:
    choices = getattr(one.type, "choices", None)
    if choices:
        words = [c.value if isinstance(c, enum.Enum) else str(c) for c in choices]
        return "or ".join(f"`{word}` " for word in words).strip()
    return f"`{one.metavar or one.type.name.upper()}`"


def _about(one: Any) -> str:
    parts = [" ".join((getattr(one, "help", "") or "").split())]
    low, high = getattr(one.type, "min", None), getattr(one.type, "max", None)
    if low is not None or high is not None:
        parts.append(
            f"From {low:g} to {high:g}." if None not in (low, high) else f"At least {low:g}."
        )
    default = one.default() if callable(one.default) else one.default
    plain = default.value if isinstance(default, enum.Enum) else default
    if one.required:
        parts.append("Required.")
    elif isinstance(plain, str | int | float) and not isinstance(plain, bool) and plain != "":
        parts.append(f"Default: `{plain}`.")
    elif getattr(one, "secondary_opts", None):
        parts.append(f"Default: `{one.opts[0] if plain else one.secondary_opts[0]}`.")
    if getattr(one, "envvar", None):
        parts.append(f"Also read from `{one.envvar}`.")
    return " ".join(part for part in parts if part)


def cli_page() -> str:
    """The page of the command line: global options, exit codes, one table a command."""
    root: Any = typer.main.get_command(app)
    codes = _attribute_docs(ExitCode)
    lines = [
        "# The command line",
        "",
        _NOTE,
        "",
        root.help,
        "",
        "Data goes to standard output, progress and errors to standard error. `-o json` is for "
        "programs; a command that goes on prints one",
        "JSON document a line.",
        "",
        "## Global options",
        "",
        "They stand before the command: `moe-serve --token-file FILE status`.",
        "",
        "| Option | Meaning |",
        "|---|---|",
        *_options(root),
        "",
        "## Exit codes",
        "",
        "| Code | Name | Meaning |",
        "|---|---|---|",
    ]
    for code in ExitCode:
        lines.append(f"| {code.value} | {code.name} | {codes.get(code.name, '')} |")
    lines.append("")
    for name, command in root.commands.items():
        arguments = [
            one.metavar or one.name.upper()
            for one in command.params
            if one.param_type_name == "argument"
        ]
        usage = " ".join(["moe-serve", name, "[OPTIONS]", *arguments])
        lines += [f"## {name}", "", f"`{usage}`", "", inspect.cleandoc(command.help or ""), ""]
        lines += ["| Option | Meaning |", "|---|---|", *_options(command), ""]
    return "\n".join(lines)


PAGES = {"config.md": config_page, "cli.md": cli_page}
"""File under docs/reference -> what writes it."""


def main() -> None:
    """Write all pages."""
    FOLDER.mkdir(exist_ok=True)
    for name, page in PAGES.items():
        (FOLDER / name).write_text(page(), encoding="utf-8")
        print(f"docs/reference/{name}")


if __name__ == "__main__":
    main()
