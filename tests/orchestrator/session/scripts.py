"""Pipelines of sessions, and scripts of their stages."""

import asyncio
from collections.abc import AsyncIterator

from stagemesh.v1 import orchestrator_pb2, stage_pb2
from tests.orchestrator.scripted_stage import ACCEPTED, FINISHED, Response, ScriptedStage, tensors_of, text_output

ECHO = """
pipeline: echo
stages:
  a: {engine: fake, function: source}
outputs: {text: a}
"""
"""A pipeline with one stage, which emits text."""

SPEAK = """
pipeline: speak
stages:
  writer: {engine: fake, function: source}
  speaker: {engine: fake, function: relay}
edges:
  - {from: writer, to: speaker, when: {input: stream, given: false}}
  - {from: "@input", to: speaker}
outputs: {text: speaker}
"""
"""A pipeline that accepts streamed text."""

LISTEN = """
pipeline: listen
stages:
  thinker: {engine: fake, function: look}
  ears:
    engine: external
    signature:
      accepts: {audio: "float32[samples]"}
      emits: {speech: "float64[events, 2]"}
      options: {silence_ms: {default: 500, minimum: 20, maximum: 10000}}
edges:
  - {from: "@input", to: ears}
outputs: {text: thinker}
sessions: {turn_detection: ears}
"""
"""A pipeline whose stage `ears` detects turns."""

STREAM = orchestrator_pb2.INPUT_MODE_STREAM


class Steered:
    """A script that emits texts when the test says so."""

    def __init__(self) -> None:
        self._texts: asyncio.Queue[str] = asyncio.Queue()

    async def __call__(self, stage: ScriptedStage, request: stage_pb2.ExecuteStepRequest) -> AsyncIterator[Response]:
        """Emits the texts, and finishes after an empty one."""
        yield ACCEPTED
        while text := await self._texts.get():
            for tensor in tensors_of(request):
                yield text_output(tensor, text)
        yield FINISHED

    def emit(self, *texts: str, last: bool = False) -> None:
        """Lets the running step emit texts, and finish if they are the last ones."""
        for text in (*texts, *([""] if last else [])):
            self._texts.put_nowait(text)
