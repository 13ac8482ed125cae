"""Read a service file and say everything that is wrong with it, each fault with file, line and
column.

Responsible for YAML (plain types only, no objects), positions and the wording of faults. Knows no
rule about fields: those are in `schema`. Called by the CLI.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from moe_serve.config.schema import PATTERN_WORDS, RULE_BROKEN, ServiceConfig

FILE_BYTES_MAX = 64 << 10
"""A service file is a page of text; anything larger is a mistake. PyYAML takes about a kilobyte for
each node, so this bounds memory as well."""
DEPTH_MAX = 32
"""Lists and maps within each other; a service has four. PyYAML's time grows with the square."""
FIELD_CHARS_MAX = 200
"""Characters of a field's name in a fault: a key of the file may have any length."""
PROBLEM_CHARS_MAX = 500
"""Characters of what one fault says."""
FAULTS_MAX = 64
"""Faults told at once: a list of thousands of wrong entries says the same a thousand times."""
_MALFORMED = (
    ValueError,  # bytes that are no UTF-8 among them
    RecursionError,
    LookupError,
    AttributeError,
    TypeError,
    ArithmeticError,
)
"""What PyYAML's constructors raise beside its own errors, for `!!int ""`, `!!bool x` and such."""


@dataclass(frozen=True, slots=True)
class ConfigFault:
    """One thing wrong: `line` and `column` count from 1; both are 0 where the file was not read."""

    file: str
    line: int
    column: int
    field: str
    problem: str

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}:{self.column}" if self.line else self.file
        return ": ".join(part for part in (where, self.field, self.problem) if part)


class ConfigInvalid(ValueError):
    """The file is not a service. `faults` holds all of them, in file order."""

    def __init__(self, faults: tuple[ConfigFault, ...]) -> None:
        self.faults = faults
        super().__init__("\n".join(str(fault) for fault in faults))


def load_config(path: str | Path) -> ServiceConfig:
    """Read and check a service file. Raises ConfigInvalid; a file that cannot be read is a fault
    without a place."""
    file = Path(path)
    try:
        if file.exists() and not file.is_file():
            # A pipe or a device may never end.
            raise _unread(path, "no regular file")
        with file.open("rb") as stream:
            data = stream.read(FILE_BYTES_MAX + 1)
    except OSError as error:
        raise _unread(path, str(error.strerror)) from error
    return parse_config(data, str(path))


def _unread(path: str | Path, why: str) -> ConfigInvalid:
    problem = f"cannot be read: {why}; give the path of a service file"
    return ConfigInvalid((ConfigFault(str(path), 0, 0, "", problem),))


def parse_config(data: bytes, file: str) -> ServiceConfig:
    """Check the bytes of a service file; `file` is only for messages."""
    if len(data) > FILE_BYTES_MAX:
        raise ConfigInvalid(
            (
                _fault(
                    file,
                    None,
                    "",
                    f"too large; a service file has at most {FILE_BYTES_MAX} bytes",
                ),
            )
        )
    root, tree = _compose(data, file)
    faults = tuple(islice(_duplicates(root, file), FAULTS_MAX))
    try:
        config = ServiceConfig.model_validate(tree)
    except ValidationError as error:
        items = error.errors(include_url=False)
        found = [_from_pydantic(item, root, file) for item in items[:FAULTS_MAX]]
        told = sorted((*faults, *found), key=lambda f: (f.line, f.column))
        if len(items) > FAULTS_MAX:
            told.append(_fault(file, None, "", f"{len(items) - FAULTS_MAX} more faults"))
        raise ConfigInvalid(tuple(told)) from error
    if faults:
        raise ConfigInvalid(faults)
    return config


def _compose(data: bytes, file: str) -> tuple[yaml.Node, Any]:
    try:
        text = data.decode("utf-8")
        depth = 0
        for event in yaml.parse(text, yaml.SafeLoader):
            depth += isinstance(event, yaml.CollectionStartEvent)
            depth -= isinstance(event, yaml.CollectionEndEvent)
            _refuse_event(event, depth, file)
        root = yaml.compose(text, yaml.SafeLoader)
        tree = yaml.safe_load(text)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        raise ConfigInvalid((_fault(file, mark, "", f"not YAML: {error.problem}"),)) from error
    except (yaml.YAMLError, *_MALFORMED) as error:
        if isinstance(error, ConfigInvalid):
            raise
        problem = f"not YAML: {error}"
        raise ConfigInvalid((_fault(file, None, "", problem),)) from error
    if not isinstance(root, yaml.MappingNode):
        raise ConfigInvalid(
            (_fault(file, None, "", "want a mapping with service, model, fleet, profiles"),)
        )
    return root, tree


def _refuse_event(event: yaml.Event, depth: int, file: str) -> None:
    """Aliases would make a small file huge; tags would make other types than a service has."""
    if isinstance(event, yaml.AliasEvent):
        problem = "YAML aliases (*name) are not supported here"
    elif getattr(event, "tag", None) is not None:
        problem = "YAML tags (!name) are not supported here; write the plain value"
    elif depth > DEPTH_MAX:
        problem = f"more than {DEPTH_MAX} lists and maps within each other; correct the brackets"
    else:
        return
    raise ConfigInvalid((_fault(file, event.start_mark, "", problem),))


def _fault(file: str, mark: Any, field: str, problem: str) -> ConfigFault:
    line, column = (mark.line + 1, mark.column + 1) if mark is not None else (1, 1)
    return ConfigFault(
        file, line, column, _cut(field, FIELD_CHARS_MAX), _cut(problem, PROBLEM_CHARS_MAX)
    )


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 3]}..."


def _duplicates(node: yaml.Node, file: str, path: str = "") -> Iterator[ConfigFault]:
    """Keys given twice: YAML would keep the last one without a word."""
    if isinstance(node, yaml.MappingNode):
        seen: set[str] = set()
        for key, value in node.value:
            name = f"{path}.{key.value}" if path else str(key.value)
            if key.value in seen:
                yield _fault(file, key.start_mark, name, "is given twice")
            seen.add(key.value)
            yield from _duplicates(value, file, name)
    elif isinstance(node, yaml.SequenceNode):
        for number, value in enumerate(node.value):
            yield from _duplicates(value, file, f"{path}.{number}")


def _from_pydantic(item: Any, root: yaml.Node, file: str) -> ConfigFault:
    loc = tuple(item["loc"])
    mark, known = _locate(root, loc)
    field = ".".join(str(part) for part in loc)
    problem = str(item["msg"]).removeprefix("Value error, ")
    if item["type"] == "missing":
        return _fault(file, mark, field, "is missing")
    if item["type"] == "extra_forbidden":
        problem = f"unknown field (got {_shown(item['input'])})"
        close = difflib.get_close_matches(str(loc[-1]), _siblings(loc[:-1]), n=1)
        if close:
            problem += f"; did you mean {close[0]}?"
        return _fault(file, mark, field, problem)
    if item["type"] == RULE_BROKEN:
        return _fault(file, mark, field, problem)
    problem = PATTERN_WORDS.get(item.get("ctx", {}).get("pattern"), problem)
    if loc and known and not isinstance(item["input"], dict):
        problem = f"{problem} (got {_shown(item['input'])})"
        expected = item.get("ctx", {}).get("expected")
        if isinstance(expected, str) and isinstance(item["input"], str):
            close = difflib.get_close_matches(
                item["input"],
                [e.strip("' ") for e in expected.replace(" or ", ", ").split(",")],
                n=1,
            )
            problem += f"; did you mean {close[0]}?" if close else ""
    return _fault(file, mark, field, problem)


def _shown(value: Any) -> str:
    try:
        return _cut(repr(value), 60)
    except (ValueError, RecursionError):  # a number of thousands of digits; too many brackets
        return f"a {type(value).__name__} too large to show"


def _locate(root: yaml.Node, loc: tuple[Any, ...]) -> tuple[Any, bool]:
    """Node at a path, the mark to show (the key's where there is one), and whether the path
    exists."""
    node, mark = root, root.start_mark
    for part in loc:
        if isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                if key.value == str(part):
                    node, mark = value, key.start_mark
                    break
            else:
                return mark, False
        elif (
            isinstance(node, yaml.SequenceNode) and isinstance(part, int) and part < len(node.value)
        ):
            node = node.value[part]
            mark = node.start_mark
        else:
            return mark, True
    return mark, True


def _siblings(loc: tuple[Any, ...]) -> list[str]:
    """Field names allowed at a path, for "did you mean"."""
    model: Any = ServiceConfig
    for part in loc:
        if isinstance(part, int):
            continue
        info = model.model_fields.get(part)
        if info is None:
            return []
        model = next((kind for kind in _models(info.annotation)), None)
        if model is None:
            return []
    return list(model.model_fields)


def _models(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in getattr(annotation, "__args__", ()):
        yield from _models(inner)
