"""Writes the error catalogue of `protos/stagemesh/v1/errors.proto` as a Markdown document.

`make stubs` runs it: python -m tools.error_catalogue docs/errors.md
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from google.protobuf.descriptor_pb2 import EnumValueDescriptorProto, FileDescriptorProto

from stagemesh.v1 import errors_pb2
from tools.proto_comments import compile_protos, read_comments

_SOURCE = "protos/stagemesh/v1/errors.proto"
# The numbers of the fields in FileDescriptorProto and EnumDescriptorProto that locate a value's comment.
_ENUMS, _VALUES = 5, 2


class Entry(NamedTuple):
    """A reason of the catalogue. `text` is its comment: the cause and the remedy."""

    reason: str
    code: str
    retry: bool
    metadata: tuple[str, ...]
    raised_by: tuple[str, ...]
    text: str


class Key(NamedTuple):
    """A key of an error's metadata. Any error may contain a `common` key."""

    name: str
    meaning: str
    common: bool


class Catalogue(NamedTuple):
    """The reasons by name and the metadata keys by name, in the order of `errors.proto`."""

    entries: dict[str, Entry]
    keys: dict[str, Key]


def read_catalogue() -> Catalogue:
    """Compiles `errors.proto` with its comments and returns its catalogue."""
    (file,) = compile_protos([_SOURCE])
    entries = [_entry(value, text) for value, text in _values(file, "ErrorReason")]
    keys = [_key(value, text) for value, text in _values(file, "ErrorMetadataKey")]
    return Catalogue({entry.reason: entry for entry in entries}, {key.name: key for key in keys})


def render(catalogue: Catalogue) -> str:
    """Returns the catalogue as a Markdown document."""
    return "\n".join([_HEAD, *_code_sections(catalogue), *_key_table(catalogue), ""])


def _values(file: FileDescriptorProto, name: str) -> Iterator[tuple[EnumValueDescriptorProto, str]]:
    """Yields the values of an enum, each with its comment, except for the value 0."""
    comments = read_comments(file)
    for enum_index, enum in enumerate(file.enum_type):
        for index, value in enumerate(enum.value):
            if enum.name == name and value.number:
                yield value, comments[_ENUMS, enum_index, _VALUES, index]


def _entry(value: EnumValueDescriptorProto, text: str) -> Entry:
    details = value.options.Extensions[errors_pb2.error_description]
    return Entry(
        reason=value.name.removeprefix("ERROR_REASON_"),
        code=details.code,
        retry=details.retry,
        metadata=tuple(_key_name(errors_pb2.ErrorMetadataKey.Name(key)) for key in details.metadata),
        raised_by=tuple(_source_name(errors_pb2.ErrorSource.Name(source)) for source in details.raised_by),
        text=text,
    )


def _key(value: EnumValueDescriptorProto, text: str) -> Key:
    return Key(_key_name(value.name), text, common=value.options.Extensions[errors_pb2.common_key])


def _key_name(constant: str) -> str:
    return constant.removeprefix("ERROR_METADATA_KEY_").lower()


def _source_name(constant: str) -> str:
    return constant.removeprefix("ERROR_SOURCE_").lower().replace("_", " ")


def _code_sections(catalogue: Catalogue) -> list[str]:
    lines: list[str] = []
    for code in dict.fromkeys(entry.code for entry in catalogue.entries.values()):
        lines += [
            "",
            f"## {code}",
            "",
            "| reason | cause and remedy | retry | metadata | raised by |",
            "|---|---|---|---|---|",
        ]
        lines += [_row(entry) for entry in catalogue.entries.values() if entry.code == code]
    return lines


def _row(entry: Entry) -> str:
    keys = ", ".join(f"`{key}`" for key in entry.metadata)
    retry = "yes" if entry.retry else "no"
    return f"| `{entry.reason}` | {entry.text} | {retry} | {keys} | {', '.join(entry.raised_by)} |"


def _key_table(catalogue: Catalogue) -> list[str]:
    lines = ["", "## Metadata keys", "", "Any error may contain the keys marked with *.", "", "| key | meaning |"]
    lines.append("|---|---|")
    return lines + [f"| `{key.name}`{' *' if key.common else ''} | {key.meaning} |" for key in catalogue.keys.values()]


_HEAD = """\
# Errors

`tools/error_catalogue.py` generates this document from `protos/stagemesh/v1/errors.proto`. Run `make protos` after a
change.

An RPC that fails ends with a gRPC status: a code, a message that says what is wrong and what to do, and one
`google.rpc.ErrorInfo` with the domain `stagemesh`. Its `reason` is a name of this catalogue. The generated code of
every language has these names as the constants of the enum `ErrorReason`, with the prefix `ERROR_REASON_`. Errors
within a shared stream (`stagemesh.v1.Error`) have the same codes, reasons and metadata. A status that Stagemesh did
not create, for example that of a proxy, has no ErrorInfo.

- Programs compare `reason` and the code, never the message.
- A reason always has the same code. Later versions may add reasons, so that a program treats an unknown reason like
  its code.
- *retry* says whether the same call can succeed later without any change to its content or to the deployment. If the
  status contains a `google.rpc.RetryInfo`, wait for its delay first. A request that was admitted before it failed needs
  another `request_id`, because the orchestrator keeps its error for a while. `UNAUTHENTICATED` and
  `PERMISSION_DENIED` are final: a retry needs other credentials.
- *raised by* names where the error originates: the Python *client* before or after the call, the *orchestrator*, a
  *stage* with its engine (also the media service), the *data plane* between two replicas, or a *command* of `stagemesh`
  or the start of a process, in which case it is never sent. Errors are passed on: a client also receives errors of
  stages.

In Python, each code is a class in `stagemesh.common.errors`, and `error.reason`, `error.metadata` and
`error.retry_after_s` have the rest."""


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(render(read_catalogue()))
