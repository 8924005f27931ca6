"""The reference of pipeline files, generated from the schema that checks them."""

import ast
import inspect
import json
import textwrap
from collections.abc import Iterator, Mapping
from functools import cache
from typing import NamedTuple, cast

from pydantic import AliasChoices, BaseModel, Field, JsonValue

from stagemesh.pipeline import schema, signature_schema
from stagemesh.pipeline.schema import PipelineFile
from tools.docs_site.tables import escape, make_table

_HEAD = """\
# Pipeline file

Every key of a pipeline file, generated from the schema by which `stagemesh pipeline validate` checks it. The file is
YAML. Unknown keys are errors. `${NAME:-default}` inserts an environment variable, and `--set KEY=VALUE` overrides a
value. [Graphs](../graphs.md) explains how stages and edges work together. None stands for a key that the file omits.

"""
_REFERENCE = "#/$defs/"
_UNLIMITED = 2**63 - 1
_SCALARS = {"boolean": "`true` or `false`", "string": "text", "integer": "integer", "number": "number"}


class _Schema(BaseModel):
    """The parts of a JSON schema that pydantic generates for a key or a mapping of a pipeline file."""

    reference: str = Field("", validation_alias="$ref")
    kind: str = Field("", validation_alias="type")
    options: list["_Schema"] = Field([], validation_alias=AliasChoices("anyOf", "oneOf"))
    words: list[str] = Field([], validation_alias="enum")
    word: str = Field("", validation_alias="const")
    items: "_Schema | None" = None
    patterns: dict[str, "_Schema"] = Field({}, validation_alias="patternProperties")
    values: "_Schema | bool" = Field(default=False, validation_alias="additionalProperties")
    minimum: float | None = None
    above: float | None = Field(None, validation_alias="exclusiveMinimum")
    maximum: float | None = None
    default: JsonValue = None
    properties: dict[str, "_Schema"] = {}
    required: frozenset[str] = frozenset()
    definitions: dict[str, "_Schema"] = Field({}, validation_alias="$defs")


class Key(NamedTuple):
    """A key of a mapping in a pipeline file. The texts are Markdown. `default` is empty if the key may be omitted."""

    name: str
    type: str
    default: str
    meaning: str


def describe_pipeline_file() -> dict[str, list[Key]]:
    """Returns the keys of each mapping of a pipeline file by the name of its class, PipelineFile first."""
    return {name: list(_keys(name, entry)) for name, entry in _entries().items()}


def render_pipeline_file() -> str:
    """Returns the schema as a Markdown document."""
    lines: list[str] = []
    for name, keys in describe_pipeline_file().items():
        rows = [(f"`{key.name}`", key.type, key.default, key.meaning) for key in keys]
        lines += [f"## {name} {{ #{name} }}", "", inspect.cleandoc(_class_of(name).__doc__ or ""), ""]
        lines += make_table(("key", "value", "default", "meaning"), rows)
    return _HEAD + "\n".join(lines)


@cache
def _entries() -> Mapping[str, _Schema]:
    whole = _Schema.model_validate(PipelineFile.model_json_schema(by_alias=True))
    return {PipelineFile.__name__: whole} | {name: each for name, each in whole.definitions.items() if each.properties}


def _keys(name: str, entry: _Schema) -> Iterator[Key]:
    meanings = _meanings(_class_of(name))
    for key, value in entry.properties.items():
        default = "required" if key in entry.required else _default(value)
        yield Key(key, _type(value), default, meanings.get(key, ""))


def _class_of(name: str) -> type:
    return cast("type", vars(schema).get(name) or vars(signature_schema)[name])


def _meanings(owner: type) -> dict[str, str]:
    """Returns the docstrings of a class's attributes, those of its base classes included, by the keys of the file."""
    texts: dict[str, str] = {}
    for base in reversed(owner.__mro__):
        if base.__module__.startswith("stagemesh."):
            texts |= _attribute_docstrings(base)
    fields = owner.model_fields if issubclass(owner, BaseModel) else {}
    aliases = {name: field.validation_alias for name, field in fields.items()}
    return {str(aliases.get(name) or name): text for name, text in texts.items()}


def _attribute_docstrings(owner: type) -> dict[str, str]:
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(owner))).body
    assert isinstance(definition, ast.ClassDef)
    found: dict[str, str] = {}
    for statement, following in zip(definition.body, definition.body[1:], strict=False):
        match statement, following:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                found[name] = escape(text)
            case _:
                pass
    return found


def _default(value: _Schema) -> str:
    default = value.default
    if isinstance(default, dict) or default in (None, [], "", _UNLIMITED):
        return ""
    return f"`{default if isinstance(default, str) else json.dumps(default)}`"


def _type(value: _Schema) -> str:
    """Returns a JSON schema in words."""
    if value.options:
        return " or ".join(dict.fromkeys(_type(each) for each in value.options if each.kind != "null"))
    if words := value.words or [value.word] * bool(value.word):
        return " or ".join(f"`{word}`" for word in words)
    if value.items is not None:
        return f"list of {_type(value.items)}"
    if isinstance(content := next(iter(value.patterns.values()), value.values), _Schema):
        return f"mapping of names to {_type(content)}"
    name = value.reference.removeprefix(_REFERENCE)
    return f"[{name}](#{name})" if name in _entries() else _SCALARS.get(value.kind, "any value") + _bounds(value)


def _bounds(value: _Schema) -> str:
    signs = (("≥", value.minimum), (">", value.above), ("≤", value.maximum))
    found = ", ".join(f"{sign} {number:,g}" for sign, number in signs if number is not None)
    return f" {found}" if found else ""
