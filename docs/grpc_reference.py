"""The page of the gRPC API, docs/reference/grpc.md, from the comments of the .proto files.

Called by `docs.make_reference`. Compiles the files of protos/ in memory: what a client reads there
is what stands here.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    ServiceDescriptorProto,
)
from grpc_tools import protoc

from docs.tables import cell

PROTOS = Path(__file__).resolve().parents[1] / "protos"
Trail = tuple[int, ...]
# Field numbers inside descriptor messages, which make up the paths of comments.
_MESSAGE, _ENUM, _SERVICE, _MEMBER = 4, 5, 6, 2


def grpc_page(note: str) -> str:
    """The page. `note`: the line that says who writes it. RuntimeError where protoc fails."""
    lines = [
        "# The gRPC API",
        "",
        note,
        "",
        "From the comments of [protos/](../../protos/moe_serve/rpc/v1/). Errors are "
        "`google.rpc.Status` with `ErrorInfo`, `BadRequest` and `RetryInfo`;",
        "a field that is not set has its type's zero. How to call it: "
        "[write a front end](../how-to/front-end.md).",
        "",
    ]
    for file in _compiled().file:
        if file.name.startswith("moe_serve/"):
            lines += _file(file)
    return "\n".join(lines)


def _compiled() -> FileDescriptorSet:
    names = sorted(str(path.relative_to(PROTOS)) for path in PROTOS.rglob("*.proto"))
    with tempfile.NamedTemporaryFile(suffix=".bin") as out:
        status = protoc.main(
            [
                "protoc",
                f"-I{PROTOS}",
                f"-I{files('grpc_tools') / '_proto'}",
                "--include_source_info",
                f"--descriptor_set_out={out.name}",
                *names,
            ]
        )
        if status:
            raise RuntimeError(f"protoc refused {names}")
        return FileDescriptorSet.FromString(Path(out.name).read_bytes())


def _file(file: FileDescriptorProto) -> Iterator[str]:
    said = {
        tuple(place.path): " ".join((place.leading_comments or place.trailing_comments).split())
        for place in file.source_code_info.location
    }
    for number, service in enumerate(file.service):
        yield from _service(file.package, service, (_SERVICE, number), said)
    for number, message in enumerate(file.message_type):
        yield from _message(message, (_MESSAGE, number), said)
    for number, kind in enumerate(file.enum_type):
        yield from _enum(kind, (_ENUM, number), said)


def _service(
    package: str, service: ServiceDescriptorProto, path: Trail, said: dict[Trail, str]
) -> Iterator[str]:
    yield from (f"## {package}.{service.name}", "", said.get(path, ""), "")
    yield from ("| Method | Takes | Gives | What |", "|---|---|---|---|")
    for number, method in enumerate(service.method):
        asks = ("stream of " if method.client_streaming else "") + _link(method.input_type)
        gives = ("stream of " if method.server_streaming else "") + _link(method.output_type)
        text = cell(said.get((*path, _MEMBER, number), ""))
        yield f"| `{method.name}` | {asks} | {gives} | {text} |"
    yield ""


def _message(message: DescriptorProto, path: Trail, said: dict[Trail, str]) -> Iterator[str]:
    if not message.field and not said.get(path):
        return
    yield from (f"### {message.name}", "")
    if said.get(path):
        yield from (said[path], "")
    if not message.field:
        return
    maps = {one.name: one for one in message.nested_type if one.options.map_entry}
    yield from ("| Field | Type | Meaning |", "|---|---|---|")
    for number, field in enumerate(message.field):
        text = cell(said.get((*path, _MEMBER, number), "")) or "as its name says"
        yield f"| `{field.name}` = {field.number} | {_type(field, maps)} | {text} |"
    yield ""


def _enum(kind: EnumDescriptorProto, path: Trail, said: dict[Trail, str]) -> Iterator[str]:
    yield from (f"### {kind.name}", "", said.get(path, ""), "")
    names = (f"`{value.name}` = {value.number}" for value in kind.value)
    yield from (", ".join(names) + ".", "")


def _type(field: FieldDescriptorProto, maps: dict[str, DescriptorProto]) -> str:
    last = field.type_name.rpartition(".")[2]
    if last in maps:
        key, value = maps[last].field
        return f"map of {_type(key, {})} to {_type(value, {})}"
    name = (
        _link(field.type_name)
        if field.type_name
        else FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()
    )
    if field.label == FieldDescriptorProto.LABEL_REPEATED:
        return f"list of {name}"
    return f"optional {name}" if field.proto3_optional else name


def _link(type_name: str) -> str:
    last = type_name.rpartition(".")[2]
    return f"`{last}`"
