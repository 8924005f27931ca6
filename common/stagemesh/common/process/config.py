"""The JSON config files of service processes: reading, writing, mistakes, and the tokens of clients."""

import ast
import inspect
import json
import re
import sys
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from stagemesh.common.errors import InvalidRequestError, file_access

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails


_COMMENT = "//"
_OMITTED = frozenset({"parent_pid"})
"""The keys that only a parent process sets."""
_WIDTH = 100


def config_text(config: Any) -> str:
    """Returns the text of a file with every key of a config, each after its description."""
    values: Mapping[str, object] = TypeAdapter(config.__class__).dump_python(config, mode="json")
    entries = [
        f"{_comment(text)}  {json.dumps(name)}: {json.dumps(values[name], ensure_ascii=False)}"
        for name, text in _descriptions(config.__class__).items()
        if name not in _OMITTED
    ]
    return "{\n" + ",\n".join(entries) + "\n}\n"


def without_comments(text: bytes) -> bytes:
    """Returns a config file's JSON: the text with an empty line instead of each comment."""
    lines = text.split(b"\n")
    return b"\n".join(b"" if line.lstrip().startswith(_COMMENT.encode()) else line for line in lines)


def describe_mistake(error: "ErrorDetails", kind: type[Any], *, text: str) -> str:
    """Returns one of pydantic's errors in a config of type `kind` as "line: mistake; remedy"."""
    key = ".".join(str(part) for part in error["loc"])
    match error["type"]:
        case "json_invalid":
            return f"{error['msg']}; write JSON, in which lines that begin with // are comments"
        case "missing":
            return f"{key!r} is missing; add it, or write a complete file with `stagemesh config`"
        case "unexpected_keyword_argument" | "extra_forbidden":
            known = [field.name for field in fields(kind)]
            close = get_close_matches(str(error["loc"][-1]), known, n=1)
            remedy = f"did you mean {close[0]!r}?" if close else "remove it"
            return f"{_line(text, error)}unknown key {key!r}; {remedy}"
        case _:
            message = error["msg"].removeprefix("Value error, ")
            given = f"{key} is {json.dumps(error['input'], default=str)}; " if key else ""
            return f"{_line(text, error)}{given}{message[:1].lower()}{message[1:]}"


def _line(text: str, error: "ErrorDetails") -> str:
    """Returns "line N: " for the first line that contains the key of an error, or "" if there is none."""
    keys = [part for part in error["loc"] if isinstance(part, str)]
    lines = text.splitlines()
    found = [number for number, line in enumerate(lines, 1) if keys and f'"{keys[-1]}"' in line]
    return f"line {found[0]}: " if found else ""


def _descriptions(kind: type[Any]) -> Mapping[str, str]:
    """Returns the descriptions of the fields of a dataclass, from the docstrings after them in its source code.

    The fields of its base classes are last.
    """
    texts: dict[str, str] = {}
    dataclasses: list[type[Any]] = [each for each in kind.__mro__ if is_dataclass(each)]
    for each in dataclasses:
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(each))).body
        assert isinstance(definition, ast.ClassDef)
        for statement, after in zip(definition.body, (*definition.body[1:], None), strict=True):
            if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
                texts[statement.target.id] = _docstring(after)
    return texts


def _docstring(node: ast.stmt | None) -> str:
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
        return inspect.cleandoc(node.value.value)
    return ""


def _comment(text: str) -> str:
    lines = textwrap.wrap(re.sub(r"\bNone\b", "null", " ".join(text.split())), _WIDTH)
    return "".join(f"  {_COMMENT} {line}\n" for line in lines)


STDIN = "-"
"""The name by which a process reads its config from standard input."""


ConfigT = TypeVar("ConfigT", bound="ProcessConfig")


def load_config(kind: type[ConfigT], path: Path) -> ConfigT:
    """Returns the config of type `kind` that the JSON file at `path` contains. The path "-" means standard input.

    Lines that begin with // are comments. An unknown key is a mistake. Raises InvalidRequestError (INVALID_CONFIG) if
    the file cannot be read or is invalid. The message has a line for each mistake.
    """
    from_stdin = str(path) == STDIN
    name = "standard input" if from_stdin else str(path)
    with file_access(f"{name} cannot be read", reason="INVALID_CONFIG"):
        text = without_comments(sys.stdin.buffer.read() if from_stdin else path.read_bytes())
    try:
        return TypeAdapter(kind).validate_json(text, extra="forbid")
    except ValidationError as exc:
        shown = text.decode(errors="replace")
        mistakes = [describe_mistake(error, kind, text=shown) for error in exc.errors(include_url=False)]
        raise InvalidRequestError("\n".join(f"{name}: {each}" for each in mistakes), reason="INVALID_CONFIG") from exc


def dump_config(config: "ProcessConfig") -> bytes:
    """Returns a config as JSON bytes, in the format that `load_config` reads."""
    return TypeAdapter(type(config)).dump_json(config)


@dataclass(frozen=True)
class TokenConfig:
    """The tokens that a port for clients accepts: those of a file, those of an identity provider, or both."""

    file: str = ""
    """The path of a file with the digests of tokens, which `stagemesh token new` writes. Empty for none.

    The file is read again when it has changed.
    """
    keys: str = ""
    """The JSON Web Key Set by which an identity provider signs its tokens (JWT): an https URL, or the path of a file.

    Empty if there is no provider.
    """
    issuer: str = ""
    """The value that the claim `iss` of a JWT must have."""
    audience: str = ""
    """The value that the claim `aud` of a JWT must contain."""
    caller_claim: str = "sub"
    """The claim of a JWT that contains the name of the caller."""

    def __post_init__(self) -> None:
        if not self.file and not self.keys:
            raise ValueError("tokens need `file` or `keys`")
        if bool(self.keys) != bool(self.issuer and self.audience) or bool(self.issuer) != bool(self.audience):
            raise ValueError("`keys`, `issuer` and `audience` belong together; set all of them, or none")
        if "://" in self.keys and not self.keys.startswith("https://"):
            raise ValueError(f"keys is {self.keys!r}; it must be an https URL, or the path of a file")


@dataclass(frozen=True, kw_only=True)
class ProcessConfig:
    """The settings of every service process."""

    parent_pid: int | None = None
    """The id of the parent process. If the parent terminates, this process terminates too.

    None if this process may outlive its parent.
    """


@dataclass(frozen=True, kw_only=True)
class ServiceConfig(ProcessConfig):
    """The settings of every process that serves gRPC."""

    tls: str | None = None
    """The folder with the certificates of this process: `ca.crt`, `tls.crt` and `tls.key` in PEM. None for no TLS.

    All ports then serve TLS alone, except the ports for metrics and health, and the process uses its certificate when
    it calls other processes. Peers need a certificate of an authority in `ca.crt`. The certificate of a replica must
    have the name `stagemesh://stage/STAGE/REPLICA`. The files are read again when they have changed.
    """
    health_listen: str | None = None
    """The address of a further port for health checks without TLS, "host:port", or None for no such port.

    The probes of Kubernetes need it if there is `tls`, because they have no certificate.
    """


@dataclass(frozen=True, kw_only=True)
class ClientServiceConfig(ServiceConfig):
    """The settings of every process that clients call."""

    tokens: TokenConfig | None = None
    """The tokens by which clients identify themselves, or None if they need a certificate. Needs `tls`."""

    def __post_init__(self) -> None:
        if self.tokens is not None and self.tls is None:
            raise ValueError("tokens need tls; without it, anyone on the network can read and use them")
