"""An orchestrator that follows scripts: a real gRPC service without a pipeline."""

import asyncio
from collections import Counter, deque
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from enum import Enum, auto
from typing import Any, TypeAlias

import grpc
import numpy as np

from stagemesh.common.errors import NotFoundError, StagemeshError
from stagemesh.common.requests.output_position import OutputKey, length_of
from stagemesh.common.wire.tensors import inline_tensor
from stagemesh.common.wire.versions import own_protocol
from stagemesh.rpc.authentication import TokenChecker
from stagemesh.rpc.call_limits import Messages
from stagemesh.rpc.callers import caller_of
from stagemesh.rpc.handlers import Context, answering, streaming
from stagemesh.rpc.server import Server
from stagemesh.v1 import chunk_pb2
from stagemesh.v1.orchestrator_pb2 import (
    AdmittedChoice,
    CancelRequestRequest,
    CancelRequestResponse,
    ConverseRequest,
    ConverseResponse,
    DescribePipelineRequest,
    DescribePipelineResponse,
    FinishedChoice,
    GenerateRequest,
    GenerateResponse,
    RequestAdmitted,
    RequestFinished,
    RequestProgress,
    RequestQueued,
)
from stagemesh.v1.orchestrator_pb2_grpc import OrchestratorServiceServicer, add_OrchestratorServiceServicer_to_server
from stagemesh.v1.request_pb2 import (
    FINISH_REASON_END,
    Audio,
    Finish,
    FinishReason,
    MessageDelta,
    Output,
    Timings,
    ToolCallDelta,
    Usage,
)
from stagemesh.v1.stage_pb2 import StepFinished, StepProgress


class Pause(Enum):
    """The items of a script that are neither a response nor an error."""

    FOREVER = auto()
    BREAK = auto()
    """The call ends as if its connection broke."""
    STOP = auto()
    """The call ends as if the server's end began before the server accepted the call."""


Script: TypeAlias = Sequence[GenerateResponse | StagemeshError | Pause]
TalkItem: TypeAlias = ConverseResponse | StagemeshError | Pause | str
Talk: TypeAlias = Sequence[TalkItem]
"""The script of a call of Converse. A text is a kind of event: the script continues when the next one has arrived."""


class ScriptedOrchestrator(OrchestratorServiceServicer):
    """Follows one script per call. The last script is repeated."""

    def __init__(self) -> None:
        self.endpoint = ""
        self.scripts: deque[Script] = deque()
        self.requests: list[GenerateRequest] = []
        self.talks: deque[Talk] = deque()
        self.events: list[list[ConverseRequest]] = []
        """The events of each call of Converse."""
        self.cancels: list[CancelRequestRequest] = []
        self.deadlines_s: list[float | None] = []
        self.hung_up = asyncio.Event()
        self.description = DescribePipelineResponse(protocol=own_protocol())

    @streaming
    async def Generate(self, request: GenerateRequest, context: Context) -> AsyncIterator[GenerateResponse]:
        async with answering(context):
            self.requests.append(request)
            self.deadlines_s.append(context.time_remaining())
            positions = Counter[OutputKey]({(each.name, each.index): each.position for each in request.next_positions})
            for item in self.script_of(request):
                if isinstance(item, StagemeshError):
                    raise item
                if item is Pause.BREAK:
                    await context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")
                elif item is Pause.STOP:
                    await context.abort(grpc.StatusCode.CANCELLED, "CANCELLED")
                elif isinstance(item, Pause):
                    await self._pause()
                else:
                    yield _placed(item, positions)

    def script_of(self, request: GenerateRequest) -> Script:
        """Returns the script of a call of Generate."""
        return self.scripts.popleft() if len(self.scripts) > 1 else self.scripts[0]

    @streaming
    async def Converse(  # type: ignore[override]
        self, requests: Messages, context: Context
    ) -> AsyncIterator[ConverseResponse]:
        async with answering(context):
            events = list[ConverseRequest]()
            self.events.append(events)
            for item in self.talks.popleft() if len(self.talks) > 1 else self.talks[0]:
                if isinstance(item, StagemeshError):
                    raise item
                if isinstance(item, ConverseResponse):
                    yield item
                elif isinstance(item, str):
                    events += await _events_until(item, requests)
                elif item is Pause.BREAK:
                    await context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")
                else:
                    await self._pause()

    async def CancelRequest(self, request: CancelRequestRequest, context: Context) -> CancelRequestResponse:
        async with answering(context):
            self.cancels.append(request)
            if all(known.request_id != request.request_id for known in self.requests):
                raise NotFoundError(f"no request {request.request_id!r} runs", reason="UNKNOWN_REQUEST")
        return CancelRequestResponse()

    async def DescribePipeline(self, _request: DescribePipelineRequest, _context: Context) -> DescribePipelineResponse:
        described = DescribePipelineResponse(caller=caller_of(claimed=""))
        described.MergeFrom(self.description)
        return described

    async def _pause(self) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            self.hung_up.set()


@asynccontextmanager
async def served(
    service: ScriptedOrchestrator | None = None, *, tokens: TokenChecker | None = None
) -> AsyncGenerator[ScriptedOrchestrator]:
    """Serves a scripted orchestrator on a free port, by default a new one. With `tokens`, clients need one of them."""
    service = service or ScriptedOrchestrator()
    server = Server("127.0.0.1:0", tokens=tokens)
    add_OrchestratorServiceServicer_to_server(service, server.grpc)
    service.endpoint = f"127.0.0.1:{await server.start()}"
    yield service
    await server.stop(grace_s=0)


async def _events_until(kind: str, requests: Messages) -> list[ConverseRequest]:
    """Reads events up to the next one of a kind. Reads forever if the caller leaves."""
    events = list[ConverseRequest]()
    while not events or events[-1].WhichOneof("event") != kind:
        event: ConverseRequest | None = await anext(requests, None)
        if event is None:
            await asyncio.Event().wait()
            continue
        events.append(event)
    return events


def _placed(event: GenerateResponse, positions: Counter[OutputKey]) -> GenerateResponse:
    """Returns the event. If it is an output, it continues at the output's position."""
    if event.HasField("output"):
        placed = GenerateResponse()
        placed.CopyFrom(event)
        key = event.output.name, event.output.index
        placed.output.position = positions[key]
        positions[key] += length_of(event.output)
        return placed
    return event


def admitted(request_id: str = "r", *, seed: int = 7, choices: int = 1, generation: str = "g") -> GenerateResponse:
    """Returns the first event of a request."""
    placed = [AdmittedChoice(replicas={"thinker": "thinker-0"})] * choices
    message = RequestAdmitted(request_id=request_id, seed=seed, choices=placed, generation=generation)
    return GenerateResponse(admitted=message)


def queued(position: int, *, expected_wait_s: float = 1.5) -> GenerateResponse:
    """Returns the event of a queued request."""
    return GenerateResponse(queued=RequestQueued(request_id="r", position=position, expected_wait_s=expected_wait_s))


def progress(stage: str, *, steps: int, index: int = 0) -> GenerateResponse:
    """Returns the progress of a stage."""
    return GenerateResponse(
        progress=RequestProgress(stage=stage, index=index, progress=StepProgress(engine_steps=steps))
    )


def text(delta: str, *, output: str = "text", index: int = 0) -> GenerateResponse:
    """Returns a part of a text output."""
    return GenerateResponse(output=Output(name=output, text=delta, index=index))


def message(**delta: Any) -> GenerateResponse:
    """Returns a part of a message."""
    return GenerateResponse(output=Output(name="text", message=MessageDelta(**delta)))


def called(name: str, arguments: str, *, call: int = 0) -> GenerateResponse:
    """Returns a part of a tool call with the index `call`."""
    return message(tool_call=ToolCallDelta(index=call, id=f"call_{call}", name=name, arguments=arguments))


def ended(output: str = "text", *, index: int = 0) -> GenerateResponse:
    """Returns the last part of an output."""
    return GenerateResponse(output=Output(name=output, index=index, finish=Finish(reason=FINISH_REASON_END)))


def audio(samples: Sequence[float], *, sample_rate_hz: int = 24000, index: int = 0) -> GenerateResponse:
    """Returns a part of an audio output."""
    content = Audio(samples=inline_tensor("samples", np.array(samples, np.float32)), sample_rate_hz=sample_rate_hz)
    return GenerateResponse(output=Output(name="audio", index=index, audio=content))


def finished(choices: int = 1, *, talker: "FinishReason.ValueType | None" = None) -> GenerateResponse:
    """Returns the last event of a request. `talker` is why a second stage ended. None omits this stage."""
    stage = StepFinished(usage=Usage(prompt_tokens=5, output_tokens=2, engine_steps=2), timings=Timings(finished_s=0.5))
    stage.edges.add(edge="thinker->vocoder", connector=chunk_pb2.CONNECTOR_SHM, chunks=3, size_bytes=300)
    choice = FinishedChoice(stages={"thinker": stage})
    if talker is not None:
        choice.stages["talker"].CopyFrom(StepFinished(finish=Finish(reason=talker)))
    return GenerateResponse(finished=RequestFinished(choices=[choice] * choices, timings=Timings(finished_s=0.6)))
