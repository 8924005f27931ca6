"""The reference of the API, generated from the comments of the protos."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    ServiceDescriptorProto,
)

from stagemesh.v1 import roles_pb2
from tools.docs_site.tables import escape, make_table
from tools.proto_comments import ROOT, compile_protos, read_comments

FOLDER = "reference/api"
# The numbers of the fields in FileDescriptorProto, DescriptorProto, EnumDescriptorProto and ServiceDescriptorProto that
# locate a comment.
_MESSAGES, _ENUMS, _SERVICES = 4, 5, 6
_FIELDS, _NESTED, _NESTED_ENUMS = 2, 3, 4
_VALUES, _METHODS = 2, 2

_PACKAGE = ".stagemesh.v1."
_HEAD = """\
# API

The services and messages of `stagemesh.v1`, generated from the comments of the protos. [Clients](../../clients.md) says
how to generate a client, and [errors](../../errors.md) lists the reasons of all errors.

"""

_Path = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class _Page:
    """The page of one proto. `places` has the page of each message and enum by its full name."""

    file: FileDescriptorProto
    comments: Mapping[_Path, str]
    places: Mapping[str, str]

    def comment(self, *path: int) -> str:
        """Returns the comment of the element at a path in the descriptor."""
        return escape(self.comments.get(path, ""))


def render_api() -> dict[str, str]:
    """Returns a page for each proto of `stagemesh.v1` and an overview, as Markdown by their paths in the site."""
    sources = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "protos/stagemesh/v1").glob("*.proto"))
    files = compile_protos(sources)
    places = {name: Path(file.name).stem for file in files for name in _names(file)}
    pages = {
        Path(file.name).stem: "\n".join(_render(_Page(file=file, comments=read_comments(file), places=places)))
        for file in files
    }
    rows = [(f"[{Path(file.name).stem}]({Path(file.name).stem}.md)", _contents(file)) for file in files]
    overview = _HEAD + "\n".join(make_table(("proto", "services, or messages"), rows))
    return {f"{FOLDER}/index.md": overview} | {f"{FOLDER}/{name}.md": text for name, text in pages.items()}


def _contents(file: FileDescriptorProto) -> str:
    types = [each.name for each in file.message_type] + [each.name for each in file.enum_type]
    named = [each.name for each in file.service] or types
    return ", ".join(f"`{name}`" for name in named)


def _names(file: FileDescriptorProto) -> Iterator[str]:
    yield from (f"{_PACKAGE}{each.name}" for each in file.enum_type)
    for message in file.message_type:
        yield from _names_in(message, f"{_PACKAGE}{message.name}")


def _names_in(message: DescriptorProto, name: str) -> Iterator[str]:
    yield name
    yield from (f"{name}.{each.name}" for each in message.enum_type)
    for nested in message.nested_type:
        yield from _names_in(nested, f"{name}.{nested.name}")


def _render(page: _Page) -> Iterator[str]:
    yield f"# {Path(page.file.name).name}"
    yield ""
    for index, service in enumerate(page.file.service):
        yield from _service(page, service, (_SERVICES, index))
    for index, message in enumerate(page.file.message_type):
        yield from _message(page, message, message.name, (_MESSAGES, index))
    for index, enum in enumerate(page.file.enum_type):
        yield from _enum(page, enum, enum.name, (_ENUMS, index))


def _service(page: _Page, service: ServiceDescriptorProto, path: _Path) -> Iterator[str]:
    yield from (f"## {service.name} {{ #{service.name} }}", "", page.comment(*path), "")
    for index, method in enumerate(service.method):
        sent = ("stream " if method.client_streaming else "") + _reference(page, method.input_type)
        received = ("stream " if method.server_streaming else "") + _reference(page, method.output_type)
        yield from (f"### {method.name} {{ #{service.name}.{method.name} }}", "", page.comment(*path, _METHODS, index))
        yield from ("", f"Request: {sent}. Response: {received}.")
        roles = method.options.Extensions[roles_pb2.caller_roles]
        if roles:
            names = (roles_pb2.CallerRole.Name(role).removeprefix("CALLER_ROLE_").lower() for role in roles)
            yield from ("", f"Callers: {', '.join(names)}.")
        yield ""


def _message(page: _Page, message: DescriptorProto, name: str, path: _Path) -> Iterator[str]:
    yield from (f"## {name} {{ #{name} }}", "", page.comment(*path), "")
    rows = [
        (f"`{field.name}`", _type(page, message, field), page.comment(*path, _FIELDS, index))
        for index, field in enumerate(message.field)
    ]
    if rows:
        yield from make_table(("field", "type", "meaning"), rows)
    for index, nested in enumerate(message.nested_type):
        if not nested.options.map_entry:
            yield from _message(page, nested, f"{name}.{nested.name}", (*path, _NESTED, index))
    for index, enum in enumerate(message.enum_type):
        yield from _enum(page, enum, f"{name}.{enum.name}", (*path, _NESTED_ENUMS, index))


def _enum(page: _Page, enum: EnumDescriptorProto, name: str, path: _Path) -> Iterator[str]:
    yield from (f"## {name} {{ #{name} }}", "", page.comment(*path), "")
    rows = [
        (f"`{value.name}`", str(value.number), page.comment(*path, _VALUES, index))
        for index, value in enumerate(enum.value)
    ]
    yield from make_table(("value", "number", "meaning"), rows)


def _type(page: _Page, message: DescriptorProto, field: FieldDescriptorProto) -> str:
    entries = {each.name: each for each in message.nested_type if each.options.map_entry}
    if entry := entries.get(field.type_name.rpartition(".")[2]):
        key, value = (_scalar(page, each) for each in entry.field)
        return f"map of {key} to {value}"
    text = _scalar(page, field)
    if field.label == FieldDescriptorProto.LABEL_REPEATED:
        return f"repeated {text}"
    if field.proto3_optional:
        return f"optional {text}"
    if field.HasField("oneof_index"):
        return f"{text}, one of `{message.oneof_decl[field.oneof_index].name}`"
    return text


def _scalar(page: _Page, field: FieldDescriptorProto) -> str:
    if field.type_name:
        return _reference(page, field.type_name)
    return FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()


def _reference(page: _Page, full_name: str) -> str:
    name = full_name.removeprefix(_PACKAGE)
    place = page.places.get(full_name)
    return f"[{name}]({place}.md#{name})" if place else f"`{name.lstrip('.')}`"
