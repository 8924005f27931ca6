"""Scripts of stages for sessions."""

import asyncio
from collections.abc import AsyncIterator

from stagemesh.common.errors import InvalidRequestError
from stagemesh.v1 import stage_pb2
from tests.orchestrator.scripted_stage import ACCEPTED, FINISHED, Response, ScriptedStage, tensors_of, text_output

ECHO = """
pipeline: echo
stages:
  a: {engine: fake, function: source}
outputs: {text: a}
"""
"""A pipeline with one stage, which emits text."""


async def fail(stage: ScriptedStage, request: stage_pb2.ExecuteStepRequest) -> AsyncIterator[Response]:
    """Accepts, and fails."""
    yield ACCEPTED
    raise InvalidRequestError(f"stage {stage.name} does not accept {request.request_id}")


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

    def emit(self, *texts: str) -> None:
        """Lets the running step emit texts."""
        for text in texts:
            self._texts.put_nowait(text)

    def finish(self) -> None:
        """Lets the running step finish."""
        self._texts.put_nowait("")
