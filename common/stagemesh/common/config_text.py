"""The text of a config file: JSON with a comment before each key, and the description of mistakes in such a file.

A line that begins with // is a comment. The comments that are written are the descriptions in the code of the config's
class.
"""

import ast
import inspect
import json
import re
import textwrap
from collections.abc import Mapping
from dataclasses import fields
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from pydantic import TypeAdapter

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
    """Returns the descriptions of the fields of a dataclass, from the docstrings after them in its source code."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(definition, ast.ClassDef)
    texts: dict[str, str] = {}
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
