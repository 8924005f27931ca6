"""The chart's schema of the value `pipeline` accepts what the schema of pipeline files accepts, with the same keys."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from pydantic import TypeAdapter

from stagemesh.pipeline import load_pipeline, schema
from stagemesh.pipeline.signature_schema import AcceptedEntry, EmittedEntry, SignatureEntry, StageOptionEntry
from tests.k8s.helm import CHART, read_values
from tests.k8s.manifests import walk
from tests.repository.commands import ROOT

CHART_SCHEMA: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text())
DEFINITIONS: dict[str, Any] = CHART_SCHEMA["definitions"]
FILES = sorted(
    path
    for path in (*ROOT.glob("pipeline/stagemesh/pipeline/built_in/*.yaml"), *ROOT.glob("examples/**/*.yaml"))
    if "\npipeline:" in f"\n{path.read_text()}"
)


def keys_of(entry: Any) -> set[str]:
    """Returns the keys of a mapping in a pipeline file, from the type of the mapping."""
    names: dict[str, Any] | None = getattr(entry, "model_fields", None)
    if names is None:
        return set(entry.__dataclass_fields__)
    return {field.validation_alias or name for name, field in names.items()}


def chart_keys(*path: str) -> set[str]:
    """Returns the keys that the chart allows for a mapping, whose schema is at a path below the definitions."""
    found: Any = DEFINITIONS
    for part in path:
        found = found[part]
    for each in found.get("anyOf", [found]):
        if each.get("type") == "object":
            found = each
    assert found["additionalProperties"] is False
    return set(found["properties"])


SIGNATURE = ("pipelineSignature", "properties")
TYPES: Mapping[tuple[str, ...], tuple[Any, ...]] = {
    ("pipelineStage",): (schema.StageEntry,),
    ("pipelineStage", "properties", "data_plane"): (schema.DataPlaneEntry,),
    ("pipelineExternalStage",): (schema.ExternalStageEntry,),
    ("pipelineSignature",): (SignatureEntry,),
    (*SIGNATURE, "accepts", "additionalProperties"): (AcceptedEntry,),
    (*SIGNATURE, "emits", "additionalProperties"): (EmittedEntry,),
    (*SIGNATURE, "options", "additionalProperties"): (StageOptionEntry,),
    ("pipelineTerm",): (schema.OptionTerm, schema.InputTerm, schema.OutputTerm),
    ("pipelineEdge",): (schema.EdgeEntry,),
    ("pipelineEdge", "properties", "chunk"): (schema.FramesEntry,),
    ("pipelineOutput",): (schema.OutputEntry,),
    ("pipelineOption",): (schema.OptionEntry,),
    ("pipelineLimits",): (schema.Limits,),
    ("pipelineLimits", "properties", "per_caller"): (schema.Bounds,),
    ("pipelineSessions",): (schema.SessionsEntry,),
}


@pytest.mark.parametrize("path", TYPES, ids=".".join)
def test_a_mapping_has_the_keys_of_pipeline_files(path: tuple[str, ...]) -> None:
    assert chart_keys(*path) == set[str]().union(*(keys_of(entry) for entry in TYPES[path]))


def test_the_pipeline_has_the_keys_of_pipeline_files() -> None:
    pipeline = CHART_SCHEMA["properties"]["pipeline"]
    assert pipeline["additionalProperties"] is False
    assert set(pipeline["properties"]) == keys_of(schema.PipelineFile)
    assert set(DEFINITIONS["pipelineMedia"]["properties"]) == keys_of(schema.MediaEntry)


def test_every_word_of_a_pipeline_file_is_accepted() -> None:
    edge = DEFINITIONS["pipelineEdge"]["properties"]
    words: list[tuple[Any, Any]] = [
        (schema.Join, DEFINITIONS["pipelineJoin"]),
        (schema.Chunk, edge["chunk"]),
        (schema.EdgeEntry.model_fields["tokens"].annotation, edge["tokens"]),
    ]
    for kind, allowed in words:
        assert set(_enums(TypeAdapter[Any](kind).json_schema())) == set(allowed["anyOf"][0]["enum"])


def _enums(found: Any) -> list[str]:
    """Returns the words of a JSON schema's enum, at any depth."""
    return [word for path, words in walk(found) if path.endswith("enum") for word in words]


def errors_of(pipeline: Any) -> list[str]:
    """Returns the errors of the value `pipeline`. Other values are not checked."""
    errors = jsonschema.Draft7Validator(CHART_SCHEMA).iter_errors({"pipeline": pipeline})
    return [f"{error.json_path}: {error.message}" for error in errors if error.absolute_path]


def test_every_form_of_a_value_is_accepted() -> None:
    assert errors_of(read_values(Path(__file__).with_name("every_form.yaml"))) == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_pipeline_files_are_accepted(path: Path) -> None:
    # The content contains the variables, as the values of `stagemesh k8s render` do.
    assert errors_of(load_pipeline(str(path), check_models=False).content) == []
