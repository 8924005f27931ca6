"""The job of `stagemesh verify`: stages, requests, the reference implementation to run, and the report."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Literal, TypeAlias

from pydantic import JsonValue

from stagemesh.common.wire.tensors import Value

PROMPTS = ("Describe the sea in one sentence.", "What is 12 times 17?", "Wie heißt die Hauptstadt von Frankreich?")
"""The prompts that are verified by default."""


@dataclass(frozen=True)
class DeployedStage:
    """The facts about a stage by which its reference implementation is chosen."""

    name: str
    engine: str
    function: str
    model: Path
    options: Mapping[str, JsonValue]
    """The options of the stage in the pipeline file."""
    request_options: Mapping[str, Value]
    """The values of the options that a request may set and that the requests omit."""
    accepts: frozenset[str]
    """The names of the tensors that the stage accepts. Empty if it receives the prompt."""
    emits: frozenset[str]


@dataclass(frozen=True)
class VerifiedStage:
    """A stage that a reference implementation verifies.

    - `role` is the name of the stage's part in the model, as the reference implementation names it.
    - `outputs` are the names of the stage's tensors that are compared.
    - `samples` is what the stage chooses: tokens of text, frames of audio, or nothing.
    """

    role: str
    stage: DeployedStage
    outputs: tuple[str, ...]
    samples: Literal["tokens", "frames"] | None = None


@dataclass(frozen=True)
class ReferenceDescriptor:
    """A description of a reference implementation.

    - `description` says what it verifies, for people.
    - `find` returns the groups of stages that it verifies. The stages of a group share one model folder.
    - `media` are the kinds of files that requests may have: "image" and "audio".
    - `factory` is the "module:callable" that returns the `Reference`. Its arguments are the group of stages, by role,
      and the device: "auto", "cpu" or "cuda".
    """

    description: str
    find: Callable[[Sequence[DeployedStage]], Sequence[Sequence[VerifiedStage]]]
    factory: str
    media: frozenset[str] = frozenset()


@dataclass(frozen=True)
class VerificationRequest:
    """A request that the pipeline has answered.

    - `media` are the paths of the files that precede the prompt.
    - `max_tokens` and `max_frames` are the limits on the tokens of each text and on the frames of the audio.
    """

    prompt: str
    media: tuple[Path, ...] = ()
    seed: int = 0
    max_tokens: int = 32
    max_frames: int = 32


@dataclass(frozen=True)
class VerificationJob:
    """The work of the process that runs a reference implementation.

    `outputs` is the path of a file in NumPy's npz format with the tensors of the pipeline. The name of a tensor is
    "REQUEST/STAGE.TENSOR", where REQUEST counts from 0. `report` is the path of the file to write.
    """

    reference: str
    stages: tuple[VerifiedStage, ...]
    requests: tuple[VerificationRequest, ...]
    device: Literal["auto", "cpu", "cuda"]
    outputs: Path
    report: Path


Verdict: TypeAlias = Literal["equal", "ties", "differs", "skipped"]


@dataclass(frozen=True)
class Comparison:
    """The result of the comparison of one output of a stage for one request.

    `verdict` is "equal", "ties" (the outputs differ only where the reference rates both nearly alike), "differs", or
    "skipped" if the output was not compared. `compared` and `differing` are numbers of values. `difference` is the
    largest difference and `limit` the largest one allowed, in the unit that `detail` or docs/verifying.md states.
    """

    request: int
    stage: str
    output: str
    verdict: Verdict
    compared: int = 0
    differing: int = 0
    difference: float = 0.0
    limit: float = 0.0
    detail: str = ""


@dataclass(frozen=True)
class VerificationReport:
    """The comparisons of a job, or the error that ended it: its code, its reason and its message."""

    comparisons: tuple[Comparison, ...] = ()
    code: int = 0
    reason: str = ""
    message: str = ""


def reference_descriptors() -> Mapping[str, ReferenceDescriptor]:
    """Returns the descriptors of all reference implementations, by name."""
    return {entry.name: entry.load() for entry in entry_points(group="stagemesh.references")}
