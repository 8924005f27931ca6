"""Conversations with a fake pipeline, whose answers show the conversation that the pipeline has received."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from stagemesh.fake_engine.outputs import compute_output, source_text
from stagemesh.services.engines.base import Task
from stagemesh.services.engines.prompts import ChatMessage, Conversation
from tests.system.pipelines import pipeline_file

TALK = """\
pipeline: talk
stages:
  source:
    engine: fake
    function: source
    replicas: {replicas}
    options: {{steps: {steps}, step_s: {step_s}, checkpoint_steps: 8}}
  frames: {{engine: fake, function: frames, replicas: {replicas}, options: {{checkpoint_steps: 8}}}}
  sound: {{engine: fake, function: sound, replicas: {replicas}, options: {{checkpoint_steps: 8}}}}
edges:
  - {{from: source, to: frames, when: {{input: stream, given: false}}}}
  - {{from: "@input", to: frames}}
  - {{from: frames, to: sound, chunk: {{frames: 64, initial_frames: 16}}}}
outputs: {{text: source, audio: sound}}
sessions: {{park_s: {park_s}}}
"""


def talking(folder: Path, *, steps: int = 20, step_s: float = 0.02, replicas: int = 1, park_s: float = 60) -> Path:
    """Writes a pipeline file whose answers are text and audio. Returns its path."""
    return pipeline_file(folder, TALK.format(steps=steps, step_s=step_s, replicas=replicas, park_s=park_s))


class ExpectedConversation:
    """The messages of a conversation as its user knows them, and the answers that follow from them.

    An answer of the fake source depends on the seed and on every message before it. An answer that is as expected
    therefore shows that the pipeline has received exactly these messages.
    """

    def __init__(self, seed: int, *, steps: int) -> None:
        self._seed, self._steps = seed, steps
        self._messages: list[ChatMessage] = []
        self._turns = 0

    def add(self, said: str, *, heard: str) -> None:
        """Adds a turn: what the user said, and what the user heard of the answer."""
        self._messages += [ChatMessage("user", said), ChatMessage("assistant", heard)]
        self._turns += 1

    def answer(self, said: str) -> str:
        """Returns the whole answer to the next turn."""
        prompt = Conversation((*self._messages, ChatMessage("user", said)))
        task = Task("r", self._seed + self._turns, prompt)
        return "".join(source_text(task, step).tobytes().decode() for step in range(self._steps))


def sound_of(text: str) -> npt.NDArray[np.float32]:
    """Returns the samples that the fake pipeline makes of a text."""
    frames = compute_output("frames", {"text": np.frombuffer(text.encode(), np.uint8)})
    return compute_output("sound", frames)["audio"].view(np.float32)


def joined(chunks: Sequence[npt.NDArray[np.float32]]) -> npt.NDArray[np.float32]:
    """Returns audio chunks as one array."""
    return np.concatenate([np.empty(0, np.float32), *chunks])
