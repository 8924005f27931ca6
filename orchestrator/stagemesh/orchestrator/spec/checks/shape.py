"""Checks the structure of a pipeline file. Converts pydantic's errors to problems with a line and a remedy."""

from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from stagemesh.orchestrator.spec import schema
from stagemesh.orchestrator.spec.schema import PipelineFile
from stagemesh.orchestrator.spec.source.document import Document
from stagemesh.orchestrator.spec.source.problem_lines import KeyPath, dotted, suggest

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails

_TERMS = {"(option)": schema.OptionTerm, "(input)": schema.InputTerm, "(output)": schema.OutputTerm}
_TAGS = frozenset({*_TERMS, "(frames)", "(names)", "(word)"})
_NAME_REMEDY = "use lower-case letters, digits and '-', a letter first"


def check_shape(document: Document) -> PipelineFile:
    """Validates the document against the schema, and returns the typed pipeline file.

    Raises InvalidPipelineError with all problems found so far if the document is invalid.
    """
    file = None
    try:
        file = PipelineFile.model_validate(document.values, by_alias=True, by_name=False)
    except ValidationError as exc:
        for error in exc.errors(include_url=False):
            path = tuple(part for part in error["loc"] if part not in _TAGS)
            if not document.problems.has(path):
                document.problems.add(path, _describe(error, path))
    document.problems.raise_any()
    assert file is not None, "every validation error is a problem"
    return file


def _describe(error: "ErrorDetails", path: KeyPath) -> str:
    parent = path[:-1]
    match error["type"]:
        case "extra_forbidden" | "unexpected_keyword_argument":
            return f"unknown key {dotted(path)!r}; {suggest(str(path[-1]), _known_keys(error['loc'][:-1]))}"
        case "missing":
            return f"{dotted(parent) or 'the file'} has no {str(path[-1])!r}; add it"
        case "string_pattern_mismatch" if path[-1] == "[key]":
            return f"{dotted(parent)!r} is not a valid name; {_NAME_REMEDY}"
        case "string_pattern_mismatch":
            return f"{dotted(path)} is {error['input']!r}; {_NAME_REMEDY}"
        case "too_short":
            return f"{dotted(path)} is empty; add at least one item"
        case _:
            message = error["msg"]
            return f"{dotted(path)} is {error['input']!r}; {message[:1].lower()}{message[1:]}"


def _known_keys(path: KeyPath) -> set[str]:
    entry: Any = PipelineFile
    match path:
        case ("stages", _):
            entry = schema.StageEntry
        case ("stages", _, "data_plane"):
            entry = schema.DataPlaneEntry
        case ("edges", _):
            entry = schema.EdgeEntry
        case ("edges", _, "chunk", "(frames)"):
            entry = schema.FramesEntry
        case ("stages" | "edges", _, "when", _, str() as tag):
            entry = _TERMS[tag]
        case ("options", _):
            entry = schema.OptionEntry
        case ("limits",):
            entry = schema.Limits
        case ("limits", "per_caller"):
            entry = schema.Bounds
        case _:
            pass
    fields = entry.__pydantic_fields__
    return {field.validation_alias or name for name, field in fields.items()}
