"""A StageService that runs a script for each step and records the requests."""

import asyncio
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing
from copy import copy
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from stagemesh.common.errors import NotFoundError, StagemeshError
from stagemesh.common.notification import Journal
from stagemesh.common.requests.output_position import length_of
from stagemesh.common.wire.versions import own_protocol
from stagemesh.rpc.handlers import answering, streaming
from stagemesh.services.stage.servicer import StepSession
from stagemesh.v1 import chunk_pb2, control_pb2, control_pb2_grpc, request_pb2, stage_pb2, stage_pb2_grpc


def journal_of(events: AsyncGenerator[stage_pb2.ExecuteStepResponse]) -> Journal[bytes]:
    """Returns a journal of the events that a generator yields. Closes the generator when the journal's last
    reader stops."""
    journal = Journal[bytes]()
    writing = asyncio.create_task(_write(events, journal))
    journal.on_abandoned = lambda: _cancel(writing)
    return journal


async def _write(events: AsyncGenerator[stage_pb2.ExecuteStepResponse], journal: Journal[bytes]) -> None:
    error: Exception | None = None
    try:
        async with aclosing(events):
            async for event in events:
                journal.append(event.SerializeToString())
    except Exception as exc:  # noqa: BLE001
        error = exc
    # An error may be of any kind here, because the caller must receive the error of a defect, too.
    journal.close(cast("Any", error))


def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()


if TYPE_CHECKING:
    import grpc

Response: TypeAlias = stage_pb2.ExecuteStepResponse
Context: TypeAlias = "grpc.aio.ServicerContext[stage_pb2.ExecuteStepRequest, Response]"
Probed: TypeAlias = stage_pb2.ProbeEdgeResponse | StagemeshError
Script: TypeAlias = Callable[["ScriptedStage", stage_pb2.ExecuteStepRequest], AsyncIterator[Response]]

ACCEPTED = Response(accepted=stage_pb2.StepAccepted())
FINISHED = Response(finished=stage_pb2.StepFinished(usage=request_pb2.Usage(output_tokens=2, engine_steps=3)))


def text_output(tensor: str, text: str) -> Response:
    """Returns an output event with a text."""
    return Response(output=request_pb2.Output(name=tensor, text=text))


def tensors_of(request: stage_pb2.ExecuteStepRequest) -> list[str]:
    """Returns the names of the tensors that the caller receives."""
    return [output.tensor for output in request.streamed]


async def say_hello(stage: "ScriptedStage", request: stage_pb2.ExecuteStepRequest) -> AsyncIterator[Response]:
    """Streams two pieces of each requested text, with the stage's name, once the producers have started."""
    yield ACCEPTED
    await stage.until_fed(request)
    yield Response(progress=stage_pb2.StepProgress(engine_steps=1))
    for tensor in [each.tensor for each in request.streamed if each.tensor == "text" and not each.uri]:
        yield text_output(tensor, f"{stage.name} ")
        yield text_output(tensor, "done")
    yield FINISHED


async def hang(stage: "ScriptedStage", request: stage_pb2.ExecuteStepRequest) -> AsyncIterator[Response]:
    """Accepts, sends one output, and never ends."""
    yield ACCEPTED
    for tensor in tensors_of(request):
        yield text_output(tensor, f"{stage.name} ")
    await asyncio.Event().wait()


def failing(error: StagemeshError) -> Script:
    """Returns a script that accepts, and fails once the producers have started."""

    async def fail(stage: "ScriptedStage", request: stage_pb2.ExecuteStepRequest) -> AsyncIterator[Response]:
        yield ACCEPTED
        await stage.until_fed(request)
        raise error

    return fail


def after(gate: asyncio.Event, script: Script = say_hello) -> Script:
    """Returns a script that waits until the gate is open, and then runs another one."""

    async def wait(stage: "ScriptedStage", request: stage_pb2.ExecuteStepRequest) -> AsyncIterator[Response]:
        stage.started.set()
        await gate.wait()
        async for response in script(stage, request):
            yield response

    return wait


class ScriptedControls(control_pb2_grpc.StageControlServiceServicer):
    """Some of a replica's controls. A drain changes the description."""

    def __init__(self, stage: "ScriptedStage") -> None:
        self._stage = stage
        self.slept: list[control_pb2.SleepRequest] = []
        self.reports: list[control_pb2.StepReport] = []
        """The answer of ListSteps."""
        self.adapters: dict[str, control_pb2.Adapter] = {}
        self.adapter_error: StagemeshError | None = None
        """The error with which LoadAdapter and UnloadAdapter fail."""

    async def LoadAdapter(
        self, request: control_pb2.LoadAdapterRequest, context: Any
    ) -> control_pb2.LoadAdapterResponse:
        adapter = control_pb2.Adapter(name=request.name, path=request.path, rank=8)
        async with answering(context):
            if self.adapter_error is not None:
                raise copy(self.adapter_error)
            self.adapters[request.name] = adapter
        return control_pb2.LoadAdapterResponse(adapter=adapter)

    async def UnloadAdapter(
        self, request: control_pb2.UnloadAdapterRequest, context: Any
    ) -> control_pb2.UnloadAdapterResponse:
        async with answering(context):
            if request.name not in self.adapters:
                raise NotFoundError("no such adapter", reason="UNKNOWN_ADAPTER")
            if self.adapter_error is not None:
                raise copy(self.adapter_error)
            del self.adapters[request.name]
        return control_pb2.UnloadAdapterResponse()

    async def ListAdapters(
        self, request: control_pb2.ListAdaptersRequest, context: object
    ) -> control_pb2.ListAdaptersResponse:
        return control_pb2.ListAdaptersResponse(adapters=self.adapters.values())

    async def Drain(self, request: control_pb2.DrainRequest, context: object) -> control_pb2.DrainResponse:
        self._stage.description.state = stage_pb2.REPLICA_STATE_DRAINING
        return control_pb2.DrainResponse(running=self._stage.running)

    async def Resume(self, request: control_pb2.ResumeRequest, context: object) -> control_pb2.ResumeResponse:
        self._stage.description.state = stage_pb2.REPLICA_STATE_READY
        return control_pb2.ResumeResponse()

    async def Sleep(self, request: control_pb2.SleepRequest, context: object) -> control_pb2.SleepResponse:
        self.slept.append(request)
        return control_pb2.SleepResponse(asleep=["weights"])

    async def ListSteps(self, request: control_pb2.ListStepsRequest, context: object) -> control_pb2.ListStepsResponse:
        return control_pb2.ListStepsResponse(steps=self.reports)


class ScriptedStage(stage_pb2_grpc.StageServiceServicer):
    """One replica. Numbers the outputs that its script does not number."""

    def __init__(self, name: str, *, script: Script = say_hello) -> None:
        self.name = name
        self.script = script
        self.description = stage_pb2.DescribeResponse(
            stage=name,
            state=stage_pb2.REPLICA_STATE_READY,
            protocol=own_protocol(),
            incarnation=f"{name}-first",
            host="host",
            zone="zone",
        )
        self.requests: list[stage_pb2.ExecuteStepRequest] = []
        self.cancels: list[stage_pb2.CancelStepRequest] = []
        self.released: dict[str, asyncio.Event] = {}
        """When the stage answers CancelStep, by request id. At once for other requests."""
        self.rebinds: list[stage_pb2.RebindStepRequest] = []
        self.probes: list[stage_pb2.ProbeEdgeRequest] = []
        self.probed: list[Probed] = [stage_pb2.ProbeEdgeResponse()]
        """The answers of ProbeEdge, of which the last one repeats. An answer without a connector stands for the
        requested one, or shm for auto.
        """
        self.controls = ScriptedControls(self)  # type: ignore[abstract]
        self.started_steps: dict[str, asyncio.Event] = defaultdict(asyncio.Event)
        """The event that is set once a request's step has started, by request."""
        self.peers: Mapping[str, ScriptedStage] = {}
        """The stages whose `started_steps` it can wait for, by replica name."""
        self.streams = self.open_streams = 0
        """The numbers of ExecuteSteps streams that were opened, and that are open."""
        self.closing = asyncio.Event()
        """If set, the streams end once their calls have ended."""
        self.tells_load = True
        self.running = 0
        self.time_left_s = 0.0
        self.idle = asyncio.Event()
        self.started = asyncio.Event()

    async def until_fed(self, request: stage_pb2.ExecuteStepRequest) -> None:
        """Waits until the producers have started."""
        for binding in request.inputs:
            if binding.producer in self.peers:
                await self.peers[binding.producer].started_steps[request.request_id].wait()

    @streaming
    async def ExecuteStep(self, request: stage_pb2.ExecuteStepRequest, context: Context) -> AsyncIterator[Response]:
        async with (
            answering(context, stage=self.name),
            aclosing(self._execute(request, context.time_remaining())) as responses,
        ):
            async for response in responses:
                yield response

    @streaming
    async def ExecuteSteps(  # type: ignore[override]
        self, request_iterator: AsyncIterator[bytes], context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> AsyncIterator[bytes]:
        self.streams += 1
        self.open_streams += 1
        try:
            async with answering(context, stage=self.name):
                session = StepSession(self._attach, closing=self.closing, where={"stage": self.name})
                async with aclosing(session.serve(request_iterator)) as messages:
                    async for message in messages:
                        yield message
        finally:
            self.open_streams -= 1

    def _attach(self, request: stage_pb2.ExecuteStepRequest, time_left_s: float | None) -> Journal[bytes]:
        return journal_of(self._execute(request, time_left_s))

    async def _execute(
        self, request: stage_pb2.ExecuteStepRequest, time_left_s: float | None
    ) -> AsyncGenerator[Response]:
        self.requests.append(request)
        self.started_steps[request.request_id].set()
        self.time_left_s = time_left_s or 0.0
        self.running += 1
        self.idle.clear()
        try:
            positions = Counter[str]()
            async for response in self.script(self, request):
                if response.HasField("output"):
                    name = response.output.name
                    response.output.position = response.output.position or positions[name]
                    positions[name] += length_of(response.output)
                yield response
                self.started.set()
        finally:
            self.running -= 1
            if not self.running:
                self.idle.set()

    async def CancelStep(self, request: stage_pb2.CancelStepRequest, context: object) -> stage_pb2.CancelStepResponse:
        self.cancels.append(request)
        if request.request_id in self.released:
            await self.released[request.request_id].wait()
        return stage_pb2.CancelStepResponse(stopped=self.running)

    async def RebindStep(self, request: stage_pb2.RebindStepRequest, context: object) -> stage_pb2.RebindStepResponse:
        self.rebinds.append(request)
        return stage_pb2.RebindStepResponse()

    async def ProbeEdge(
        self, request: stage_pb2.ProbeEdgeRequest, context: "grpc.aio.ServicerContext[Any, Any]"
    ) -> stage_pb2.ProbeEdgeResponse:
        self.probes.append(request)
        answer = self.probed.pop(0) if len(self.probed) > 1 else self.probed[0]
        async with answering(context, stage=self.name):
            if isinstance(answer, StagemeshError):
                raise copy(answer)
        if answer.connector:
            return answer
        fixed = request.connector != chunk_pb2.CONNECTOR_AUTO
        return stage_pb2.ProbeEdgeResponse(connector=request.connector if fixed else chunk_pb2.CONNECTOR_SHM)

    async def WatchLoad(
        self, request: stage_pb2.WatchLoadRequest, context: object
    ) -> AsyncIterator[stage_pb2.WatchLoadResponse]:
        if self.tells_load:
            yield stage_pb2.WatchLoadResponse(adapters=sorted(self.controls.adapters))

    async def PutChunk(  # type: ignore[override]
        self, request_iterator: AsyncIterator[bytes], context: object
    ) -> AsyncIterator[bytes]:
        async for _ in request_iterator:
            yield b""

    async def GetChunk(
        self, request: stage_pb2.GetChunkRequest, context: object
    ) -> AsyncIterator[stage_pb2.GetChunkResponse]:
        yield stage_pb2.GetChunkResponse()

    async def Describe(self, request: stage_pb2.DescribeRequest, context: object) -> stage_pb2.DescribeResponse:
        return self.description
