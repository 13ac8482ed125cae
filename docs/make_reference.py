"""Write the reference pages from the code: `python -m docs.make_reference`.

docs/reference/config.md comes from the schema of the service file, cli.md from the commands,
grpc.md from the comments of protos/, metrics.md from the registry of metrics, http.md from
the endpoints of the page; a test fails where a page differs from what this writes.
"""

from __future__ import annotations

import ast
import enum
import inspect
import itertools
import re
import textwrap
import types
from collections.abc import Callable, Iterator
from pathlib import Path, PurePath
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined
from typer.models import ArgumentInfo, ParameterInfo

from docs.grpc_reference import grpc_page
from docs.http_reference import http_page
from docs.metrics_reference import metrics_page
from docs.tables import cell
from moe_serve.cli.app import app
from moe_serve.cli.exits import MEANINGS
from moe_serve.config import schema
from placement.config import RebalanceConfig

FOLDER = Path(__file__).resolve().parent / "reference"
_NOTE = (
    "<!-- Written by `python -m docs.make_reference`; a test compares this page with the code. -->"
)
_BOUNDS = (("ge", ">="), ("gt", ">"), ("le", "<="), ("lt", "<"))
_WORDS: dict[type, str] = {str: "TEXT", int: "N", float: "N", Path: "PATH"}
_LENGTHS = (("min_length", "at least"), ("max_length", "at most"))


def _attribute_docs(kind: type) -> dict[str, str]:
    """Sentence under each attribute of a class, by name, from its source."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(kind)))
    (body,) = (node.body for node in tree.body if isinstance(node, ast.ClassDef))
    docs: dict[str, str] = {}
    for node, after in itertools.pairwise(body):
        match node, after:
            case (
                ast.AnnAssign(target=ast.Name(id=name)) | ast.Assign(targets=[ast.Name(id=name)]),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                docs[name] = " ".join(text.split())
    return docs


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
                found.append(f"{words} {value}")
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
        schema.LogConfig: "log",
        schema.TelemetryConfig: "telemetry",
        schema.MetricsConfig: "metrics",
    }[section]


def _anchor(title: str) -> str:
    return re.sub(r"[^\w\- ]", "", title).lower().replace(" ", "-")


def _sections(root: type[BaseModel]) -> Iterator[type[BaseModel]]:
    yield root
    for info in root.model_fields.values():
        section = _section_of(info.annotation)
        if section is not None:
            yield from _sections(section)


def _meaning(name: str, info: FieldInfo) -> str:
    """What a field means whose sentence stands elsewhere: on its section, or on its type."""
    section = _section_of(info.annotation)
    if section is not None:
        return inspect.cleandoc(section.__doc__ or "")
    return {"name": "Name that other sections refer to."}[name]


def config_page() -> str:
    """The page of the service file: one table a section."""
    core = _attribute_docs(RebalanceConfig)
    lines = [
        "# The service file",
        "",
        _NOTE,
        "",
        "One YAML file describes one service. Unknown keys, keys given twice and YAML aliases are "
        "faults. `moe-serve validate -f FILE`",
        "prints all faults at once as `file:line:column: field: problem`; with `--show-effective` "
        "every field with its value.",
        "",
    ]
    for section in _sections(schema.ServiceConfig):
        own = inspect.cleandoc(section.__doc__ or "").splitlines()
        about = (
            "How the controller decides and how steps are run. Every duration in seconds, every "
            "size in bytes."
            if section is schema.RebalanceSection
            else " ".join(own)
        )
        lines += [f"## {_title(section)}", "", about, ""]
        lines += ["| Field | Type and limits | Default | Meaning |", "|---|---|---|---|"]
        for name, info in section.model_fields.items():
            kind = ", ".join(text for text in (_type_words(info), _limits(info)) if text)
            meaning = cell(info.description or core.get(name) or _meaning(name, info))
            lines.append(f"| `{name}` | {cell(kind)} | {_default(info)} | {meaning} |")
        lines.append("")
    return "\n".join(lines)


def _options(callback: Callable[..., Any]) -> Iterator[str]:
    """A table row for each argument and option of a command, in order."""
    hints = get_type_hints(callback, include_extras=True)
    for name, parameter in inspect.signature(callback).parameters.items():
        for info in getattr(hints[name], "__metadata__", ()):
            kind = _inner(get_args(hints[name])[0])
            yield f"| {cell(_spelled(name, kind, info))} | {cell(_about(info, parameter))} |"


def _spelled(name: str, kind: type, info: ParameterInfo) -> str:
    if isinstance(info, ArgumentInfo):
        return f"`{info.metavar or name.upper()}`"
    # Inside Annotated the first spelling is taken for a default.
    declared = [one for one in (info.default, *(info.param_decls or ())) if isinstance(one, str)]
    declared = declared or [f"--{name.replace('_', '-')}"]
    spelled = ", ".join(f"`{one}`" for words in declared for one in words.split("/"))
    if kind is bool:
        return spelled
    if issubclass(kind, enum.Enum):
        return f"{spelled} " + " or ".join(f"`{one.value}`" for one in kind)
    return f"{spelled} `{info.metavar or _WORDS[kind]}`"


def _plain(bound: float) -> str:
    """Whole numbers in full."""
    return str(int(bound)) if bound == int(bound) else str(bound)


def _about(info: ParameterInfo, parameter: inspect.Parameter) -> str:
    parts = [" ".join((info.help or "").split())]
    if info.min is not None and info.max is not None:
        parts.append(f"From {_plain(info.min)} to {_plain(info.max)}.")
    elif info.min is not None:
        parts.append(f"At least {_plain(info.min)}.")
    default = parameter.default
    if default is inspect.Parameter.empty:
        parts.append("Required.")
    elif isinstance(default, enum.Enum):
        parts.append(f"Default: `{default.value}`.")
    elif default is True:
        parts.append("Default: yes.")
    elif default not in (None, False, ""):
        parts.append(f"Default: `{default}`.")
    if info.envvar:
        parts.append(f"Also read from `{info.envvar}`.")
    return " ".join(parts)


def _commands() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Every command as it is typed, and its function; those of groups after the others."""
    groups = [("", app.registered_commands)]
    for group in app.registered_groups:
        assert group.typer_instance is not None
        groups.append((f"{group.name} ", group.typer_instance.registered_commands))
    for prefix, commands in groups:
        for command in commands:
            assert command.callback is not None
            word = command.name or command.callback.__name__.replace("_", "-")
            yield prefix + word, command.callback


def _usage(word: str, callback: Callable[..., Any]) -> str:
    hints = get_type_hints(callback, include_extras=True)
    arguments = []
    for name, parameter in inspect.signature(callback).parameters.items():
        for info in getattr(hints[name], "__metadata__", ()):
            if isinstance(info, ArgumentInfo):
                shown = info.metavar or name.upper()
                required = parameter.default is inspect.Parameter.empty or shown.startswith("[")
                arguments.append(shown if required else f"[{shown}]")
    return " ".join(["moe-serve", word, "[OPTIONS]", *arguments])


def cli_page() -> str:
    """The page of the command line: global options, exit codes, one table a command."""
    assert app.registered_callback is not None
    assert app.registered_callback.callback is not None
    lines = [
        "# The command line",
        "",
        _NOTE,
        "",
        "Data goes to standard output, progress and errors to standard error. `-o json` and "
        "`-o yaml` are for programs; a",
        "command that goes on prints one document a line, or after each `---`. `-h` after a "
        "command prints its help.",
        "",
        "## Global options",
        "",
        "They stand before the command: `moe-serve --token-file FILE status`.",
        "",
        "| Option | Meaning |",
        "|---|---|",
        *_options(app.registered_callback.callback),
        "",
        "## Exit codes",
        "",
        "| Code | Name | Meaning |",
        "|---|---|---|",
    ]
    lines += [
        f"| {one.value} | {one.name} | {text[0].upper()}{text[1:]}. |"
        for one, text in MEANINGS.items()
    ]
    lines.append("")
    for word, callback in _commands():
        lines += [f"## {word}", "", f"`{_usage(word, callback)}`", ""]
        lines += [inspect.cleandoc(callback.__doc__ or ""), ""]
        options = list(_options(callback))
        lines += ["| Option | Meaning |", "|---|---|", *options, ""] if options else []
    return "\n".join(lines)


PAGES = {
    "config.md": config_page,
    "cli.md": cli_page,
    "grpc.md": lambda: grpc_page(_NOTE),
    "http.md": lambda: http_page(_NOTE),
    "metrics.md": lambda: metrics_page(_NOTE),
}
"""File under docs/reference -> what writes it."""


def main() -> None:
    """Write all pages."""
    FOLDER.mkdir(exist_ok=True)
    for name, page in PAGES.items():
        (FOLDER / name).write_text(page(), encoding="utf-8")
        print(f"docs/reference/{name}")


if __name__ == "__main__":
    main()
