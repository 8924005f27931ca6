"""Converts a document to the typed pipeline file: checks its structure."""

from collections.abc import Collection
from copy import deepcopy
from difflib import get_close_matches
from types import NoneType
from typing import TYPE_CHECKING, Annotated, Any, cast, get_args, get_origin

from pydantic import Tag, ValidationError

from stagemesh.pipeline.document import Document, KeyPath, Origin, dotted, suggest
from stagemesh.pipeline.schema import ExternalStageEntry, PipelineFile, StageEntry

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails


_TAGS = frozenset(
    {"(option)", "(input)", "(output)", "(frames)", "(names)", "(sizes)", "(word)", "(started)", "(external)"}
)
"""The tags of the schema's unions. Pydantic adds them to the paths of errors."""
_NAME_REMEDY = "use lower-case letters, digits and '-', a letter first"


_UNKNOWN_KEY = ("extra_forbidden", "unexpected_keyword_argument")
"""The types of pydantic's errors for unknown keys."""


def check_shape(document: Document) -> PipelineFile:
    """Validates the document against the schema, and returns the typed pipeline file.

    Reports invalid values, and then continues without them, as if their keys were omitted or spelt correctly. The other
    mistakes in the file are thus found, too. Raises InvalidPipelineError if this is not possible. The message lists all
    problems found so far.
    """
    values = document.values
    try:
        return PipelineFile.model_validate(values, by_alias=True, by_name=False)
    except ValidationError as exc:
        values = deepcopy(values)
        for error in exc.errors(include_url=False):
            path = tuple(part for part in error["loc"] if part not in _TAGS)
            if not document.problems.has(path):
                document.problems.add(path, _describe(error, path))
            known = _known_keys(error["loc"][:-1]) if error["type"] in _UNKNOWN_KEY else ()
            _repair(values, path, known=known, origins=document.problems.origins)
    try:
        file = PipelineFile.model_validate(values, by_alias=True, by_name=False)
    except ValidationError:
        file = None
    # A stage that is divided is read from the document.
    if file is None or any(isinstance(stage, StageEntry) and stage.split for stage in file.stages.values()):
        document.problems.raise_any()
    assert file is not None, "every validation error is a problem"
    return file


def _repair(values: dict[str, Any], path: KeyPath, *, known: Collection[str], origins: dict[KeyPath, Origin]) -> None:
    """Removes the invalid value at `path`, or renames its key if it resembles one of the keys in `known`.

    Does nothing if `path` does not lead to the key of a mapping. Adds the origins of a renamed key to `origins`.
    """
    parent: Any = values
    for part in path[:-1]:
        try:
            parent = parent[part]
        except (KeyError, IndexError, TypeError):
            return
    if not isinstance(parent, dict) or path[-1] not in parent:
        return
    mapping = cast("dict[object, object]", parent)
    value = mapping.pop(path[-1])
    close = get_close_matches(str(path[-1]), known, n=1)
    if close and close[0] not in mapping:
        mapping[close[0]] = value
        renamed = (*path[:-1], close[0])
        origins |= {(*renamed, *at[len(path) :]): origin for at, origin in origins.items() if at[: len(path)] == path}


def _describe(error: "ErrorDetails", path: KeyPath) -> str:
    parent = path[:-1]
    match error["type"]:
        case kind if kind in _UNKNOWN_KEY:
            return _describe_unknown_key(error["loc"], path)
        case "missing":
            return f"{dotted(parent) or 'the file'} has no {str(path[-1])!r}; add it"
        case "string_pattern_mismatch" if path[-1] == "[key]":
            return f"{dotted(parent)!r} is not a valid name; {_NAME_REMEDY}"
        case "string_pattern_mismatch":
            return f"{dotted(path)} is {error['input']!r}; {_NAME_REMEDY}"
        case "too_short":
            return f"{dotted(path)} is empty; add at least one item"
        case _:
            message = error["msg"].removeprefix("Value error, ")
            return f"{dotted(path)} is {error['input']!r}; {message[:1].lower()}{message[1:]}"


def _describe_unknown_key(loc: KeyPath, path: KeyPath) -> str:
    """`loc` is the path with pydantic's tags, and `path` is the path without them."""
    match loc:
        case ("stages", _, "(external)", str() as key) if key in StageEntry.model_fields:
            text = "has no effect, because Stagemesh does not start the replicas of an external stage"
        case ("stages", _, "(started)", str() as key) if key in ExternalStageEntry.model_fields:
            text = "is only for stages with `engine: external`"
        case _:
            return f"unknown key {dotted(path)!r}; {suggest(str(path[-1]), _known_keys(loc[:-1]))}"
    return f"{dotted(path)} {text}; remove it"


def _known_keys(path: KeyPath) -> set[str]:
    """Returns the keys of the entry at a path that contains pydantic's tags."""
    kind: Any = PipelineFile
    for part in path:
        kind = _member(kind, part)
    return set(_types_by_key(kind))


def _member(kind: Any, part: str | int) -> Any:
    """Returns the type of the values that a part of a path selects in a value of the type `kind`.

    The part is a key of an entry, the tag of an alternative, a key of a mapping, or an index.
    """
    found: Any
    if hasattr(kind, "__pydantic_fields__"):
        found = _types_by_key(kind)[str(part)]
    elif part in _TAGS:
        found = next(each for each in get_args(kind) if Tag(str(part)) in each.__metadata__)
    else:
        found = next(each for each in reversed(get_args(kind)) if each is not Ellipsis)
    while get_origin(found) is Annotated or NoneType in get_args(found):
        found = next(each for each in get_args(found) if each is not NoneType)
    return found


def _types_by_key(entry: Any) -> dict[str, Any]:
    return {field.validation_alias or name: field.annotation for name, field in entry.__pydantic_fields__.items()}
