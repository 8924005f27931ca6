"""Checks the structure of a pipeline file against the schema. Reports pydantic's errors with a line and a remedy."""

from collections.abc import Collection, Mapping
from copy import deepcopy
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, cast

from pydantic import ValidationError

from stagemesh.orchestrator.spec.schema import (
    Bounds,
    DataPlaneEntry,
    EdgeEntry,
    ExternalStageEntry,
    FramesEntry,
    InputTerm,
    Limits,
    MediaEntry,
    OptionEntry,
    OptionTerm,
    OutputEntry,
    OutputTerm,
    PipelineFile,
    SessionsEntry,
    SplitEntry,
    StageEntry,
)
from stagemesh.orchestrator.spec.signature_schema import (
    AcceptedEntry,
    EmittedEntry,
    SignatureEntry,
    StageOptionEntry,
)
from stagemesh.orchestrator.spec.source.document import Document
from stagemesh.orchestrator.spec.source.problem_lines import KeyPath, Origin, dotted, suggest

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

_ITEMS: Mapping[str, Any] = {
    "edges": EdgeEntry,
    "outputs": OutputEntry,
    "options": OptionEntry,
}
"""The types of the items of the file's lists and mappings other than stages, by key."""
_TERMS = {"(option)": OptionTerm, "(input)": InputTerm, "(output)": OutputTerm}
_STAGE_ENTRIES: Mapping[str, Any] = {
    "(started)": StageEntry,
    "(started).data_plane": DataPlaneEntry,
    "(started).split": SplitEntry,
    "(external)": ExternalStageEntry,
    "(external).signature": SignatureEntry,
    "(external).signature.accepts": AcceptedEntry,
    "(external).signature.emits": EmittedEntry,
    "(external).signature.options": StageOptionEntry,
}
_TAGS = frozenset({*_TERMS, "(frames)", "(names)", "(sizes)", "(word)", "(started)", "(external)"})
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
    entry: Any = PipelineFile
    match path:
        case ("stages", _, *keys) if "when" not in keys:
            entry = _STAGE_ENTRIES[".".join(str(key) for key in keys[:3])]
        case (str() as section, _) if section in _ITEMS:
            entry = _ITEMS[section]
        case ("edges", _, "chunk", "(frames)"):
            entry = FramesEntry
        case ("stages", _, _, "when", _, str() as tag) | ("edges", _, "when", _, str() as tag):
            entry = _TERMS[tag]
        case ("limits",):
            entry = Limits
        case ("limits", "per_caller"):
            entry = Bounds
        case ("sessions",):
            entry = SessionsEntry
        case ("media",):
            entry = MediaEntry
        case _:
            pass
    fields = entry.__pydantic_fields__
    return {field.validation_alias or name for name, field in fields.items()}
