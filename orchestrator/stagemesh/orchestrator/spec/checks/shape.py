"""Turns what pydantic finds into problems with a line and a remedy."""

from typing import TYPE_CHECKING

from pydantic import BaseModel, ValidationError

from stagemesh.orchestrator.spec.checks.problems import suggest
from stagemesh.orchestrator.spec.schema import (
    CallerLimitsShape,
    EdgeShape,
    FramesShape,
    LimitsShape,
    OptionShape,
    PipelineShape,
    StageShape,
    TermShape,
)
from stagemesh.orchestrator.spec.source.document import Document
from stagemesh.orchestrator.spec.source.origins import KeyPath, dotted

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails


def check_shape(document: Document) -> PipelineShape:
    """The document as a typed value; raises InvalidPipelineError with every problem found so far."""
    try:
        shape = PipelineShape.model_validate(document.values)
    except ValidationError as exc:
        for error in exc.errors(include_url=False):
            path = tuple(part for part in error["loc"] if part not in ("(frames)", "(names)", "(word)"))
            if not document.problems.has(path):
                document.problems.add(path, _describe(error, path))
        document.problems.raise_any()
        raise AssertionError("every validation error is a problem") from exc
    document.problems.raise_any()
    return shape


def _describe(error: "ErrorDetails", path: KeyPath) -> str:
    parent = path[:-1]
    if error["type"] == "extra_forbidden":
        return f"unknown key {dotted(path)!r}; {suggest(str(path[-1]), _known_keys(parent))}"
    if error["type"] == "missing":
        return f"{dotted(parent) or 'the file'} has no {str(path[-1])!r}; add it"
    if path and path[-1] == "[key]":
        return f"{dotted(parent)!r} is no valid name; use small letters, digits and '-', a letter first"
    if error["type"] == "string_pattern_mismatch":
        return f"{dotted(path)} is {error['input']!r}; use small letters, digits and '-', a letter first"
    if error["type"] == "too_short":
        return f"{dotted(path)} is empty; name at least one"
    return f"{dotted(path)} is {error['input']!r}; {_lower_first(error['msg'])}"


def _known_keys(path: KeyPath) -> set[str]:
    return {field.alias or name for name, field in _shape_at(path).model_fields.items()}


def _shape_at(path: KeyPath) -> type[BaseModel]:
    shape: type[BaseModel] = PipelineShape
    match path:
        case ("stages", _):
            shape = StageShape
        case ("edges", _):
            shape = EdgeShape
        case ("edges", _, "chunk"):
            shape = FramesShape
        case ("stages" | "edges", _, "when", _):
            shape = TermShape
        case ("options", _):
            shape = OptionShape
        case ("limits",):
            shape = LimitsShape
        case ("limits", "per_caller"):
            shape = CallerLimitsShape
        case _:
            pass
    return shape


def _lower_first(text: str) -> str:
    return text[:1].lower() + text[1:]
