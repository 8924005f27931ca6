"""The pipeline of a soak, its requests, and their expected outputs unit by unit. A unit is the part of an output that
one step of the source becomes. All units of a request differ, so that missing, repeated and misplaced units can be
distinguished.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

from pydantic import JsonValue

from stagemesh.fake_engine.options import SeededRandom, fake_options
from stagemesh.fake_engine.outputs import compute_output, resize_text, source_text
from stagemesh.services.engines.base import Task

OUTPUT_OF = {"source": "text", "frames": "frames", "sound": "audio"}
"""The output of each stage, by stage."""

CHECKPOINT_STEPS = 8
_SIZES: JsonValue = {"one_of": [24, 100, 1000]}
_PIPELINE = """\
pipeline: soaked
stages:
  source:
    engine: fake
    function: source
    replicas: {replicas}
    options: {{step_s: {step_s}, size_bytes: {{one_of: [24, 100, 1000]}}, checkpoint_steps: {checkpoint_steps}}}
  frames: {{engine: fake, function: frames, replicas: {replicas}, options: {{checkpoint_steps: {checkpoint_steps}}}}}
  sound: {{engine: fake, function: sound, replicas: {replicas}, options: {{checkpoint_steps: {checkpoint_steps}}}}}
edges:
  - {{from: source, to: frames}}
  - {{from: frames, to: sound, chunk: {{frames: 64, initial_frames: 16}}}}
outputs: {{text: source, frames: frames, audio: sound}}
"""


def write_pipeline(folder: Path, *, replicas: int, step_s: float) -> Path:
    """Writes a pipeline file with three stages, which have fake engines. Returns its path."""
    path = folder / "soaked.yaml"
    path.write_text(_PIPELINE.format(replicas=replicas, step_s=step_s, checkpoint_steps=CHECKPOINT_STEPS))
    return path


@dataclass(frozen=True)
class Request:
    """One request. Equal requests have equal outputs."""

    prompt: str
    seed: int
    steps: int


def requests(seed: int, *, count: int, steps: tuple[int, int]) -> list[Request]:
    """Returns `count` different requests whose numbers of steps lie between two bounds."""
    random = Random(seed)
    return [Request(f"prompt {n}", random.randrange(1 << 31), random.randint(*steps)) for n in range(count)]


def units(request: Request) -> Mapping[str, Sequence[bytes]]:
    """Returns the expected units of each output: the results of the stages' functions called one after the other."""
    dice, size = SeededRandom(request.seed, "source"), fake_options({"size_bytes": _SIZES}).size_bytes
    task = Task("r", request.seed, request.prompt)
    texts = [resize_text(source_text(task, step), dice.count(size, "size", step)) for step in range(request.steps)]
    frames = [compute_output("frames", {"text": text})["frames"] for text in texts]
    audio = [compute_output("sound", {"frames": each})["audio"] for each in frames]
    made = {"text": texts, "frames": frames, "audio": audio}
    return {output: [each.tobytes() for each in parts] for output, parts in made.items()}
