"""Says what each value of a pipeline is and where it came from."""

import json
from collections.abc import Iterator
from typing import cast

from stagemesh.orchestrator.spec.model import ExplainedValue, Pipeline
from stagemesh.orchestrator.spec.schema import PipelineShape
from stagemesh.orchestrator.spec.source.origins import KeyPath, Origins, dotted


def explain(pipeline: Pipeline) -> tuple[ExplainedValue, ...]:
    """Every value of the pipeline, in the file's order, with its origin."""
    return pipeline.explanation


def explain_shape(shape: PipelineShape, origins: Origins) -> tuple[ExplainedValue, ...]:
    """The rows for a file's values and the defaults that fill them up."""
    rows: list[ExplainedValue] = []
    for path, value in _leaves(shape.model_dump(mode="json", by_alias=True), ()):
        if value is not None:
            rows.append(ExplainedValue(dotted(path), _show(value), _label(path, origins)))
    return tuple(rows)


def _label(path: KeyPath, origins: Origins) -> str:
    # A value set as a whole (--set chunk='{frames: 9}') has its origin above its parts; a default has none at all.
    for end in range(len(path), 0, -1):
        origin = origins.get(path[:end])
        if origin is not None and (end == len(path) or origin.line == 0):
            return origin.label
    return "default"


def _leaves(value: object, path: KeyPath) -> Iterator[tuple[KeyPath, object]]:
    if isinstance(value, dict) and value:
        for key, item in cast("dict[str, object]", value).items():
            yield from _leaves(item, (*path, key))
    elif isinstance(value, list) and value and path == ("edges",):
        for index, item in enumerate(cast("list[object]", value)):
            yield from _leaves(item, (*path, index))
    else:
        yield path, value


def _show(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
