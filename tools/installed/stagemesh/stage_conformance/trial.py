"""The stage under test, and a trial: what one case has started, which ends with the case."""

import asyncio
import contextlib
import itertools
import secrets
import struct
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Self

import grpc

from stagemesh.common.errors import StagemeshError
from stagemesh.rpc.channels import open_channel
from stagemesh.rpc.error_mapping import from_rpc_error
from stagemesh.stage_conformance.cases import (
    PEER,
    MismatchError,
    Needs,
    NotApplicableError,
    Observed,
    answer_of,
    brief,
    expect,
    expect_error,
)
from stagemesh.stage_conformance.content import PROTOCOL, Inputs
from stagemesh.stage_conformance.played_consumer import Consumer
from stagemesh.stage_conformance.played_producer import Flow, Producer, Stream
from stagemesh.v1 import chunk_pb2, request_pb2, signature_pb2, stage_pb2, stage_pb2_grpc

Change = Callable[[stage_pb2.ExecuteStepRequest], object]
ROWS, CHUNKS = 24, 3
"""The rows of a chunk and the number of chunks that a played producer sends."""
FRAMES = 16
"""The rows of a chunk that the stage sends, if its output can be cut."""
_ENDING_S = 5.0
_LOGGED = 12
"""The number of lines of each log that a failed case reports."""


@dataclass
class Stage:
    """The stage under test: its address, what it says about itself, and how requests to it are made."""

    endpoint: str
    channel: grpc.aio.Channel
    described: stage_pb2.DescribeResponse
    inputs: Inputs
    prompt: str = ""
    max_tokens: int = 0
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    has_output: bool = True
    host: str = "127.0.0.1"
    """The host at which the stage reaches this process."""
    reference: "Good | None" = None
    """The result of the first good request."""

    def __post_init__(self) -> None:
        self.stub = stage_pb2_grpc.StageServiceStub(self.channel)
        self.numbers = itertools.count(1)
        self.run_id = secrets.token_hex(4)

    @property
    def emits(self) -> Sequence[signature_pb2.EmittedTensor]:
        """The tensors that the stage emits, without tickets. Empty if it does not report a signature."""
        return [each for each in self.described.signature.emits if not each.spec.ticket_kind]

    @property
    def cut_tensor(self) -> str:
        """The emitted tensor that the played consumers receive cut by rows, or "" if none has rows."""
        return next((each.spec.name for each in self.emits if each.spec.shape and not each.spec.shape[0].isdigit()), "")

    def offers(self, needed: Needs) -> bool:
        """Returns whether a case with this need can be played."""
        return bool(self.inputs.tensors) if needed is Needs.INPUT else self.has_output


@dataclass(frozen=True)
class Good:
    """The result of a request that succeeded."""

    events: Sequence[stage_pb2.ExecuteStepResponse]
    contents: Mapping[str, bytes]
    """The bytes of each tensor on the outgoing edge, and of each streamed output after "output "."""
    chunks: int
    """The number of data chunks on the outgoing edge."""


class Step(Observed):
    """A call of ExecuteStep, whose events are collected."""

    def __init__(self, request: stage_pb2.ExecuteStepRequest, call: Any) -> None:
        super().__init__()
        self.request, self.call = request, call
        self.events: list[stage_pb2.ExecuteStepResponse] = []
        self.error: StagemeshError | None = None
        self.is_over = False
        self.task = asyncio.create_task(self._read())

    async def _read(self) -> None:
        try:
            async for event in self.call:
                self.events.append(event)
                self.note(brief(event))
        except grpc.aio.AioRpcError as exc:
            self.error = from_rpc_error(exc, peer=PEER)
            self.note(f"{self.error.code.name} {self.error.reason}: {self.error.message}")
        except asyncio.CancelledError:
            self.note("the call was cancelled by this tool")
        self.is_over = True
        self.note("the call ended")

    def kinds(self) -> list[str]:
        """Returns the kinds of the events."""
        return [str(each.WhichOneof("event")) for each in self.events]

    async def accepted(self) -> Self:
        """Waits until the step is accepted, which must be the first event."""
        await self.until(lambda: self.events or self.is_over, "`accepted` as the first event", within_s=5.0)
        expect(self.kinds()[:1] == ["accepted"], "`accepted` as the first event", self.came)
        return self

    async def finished(self, *, within_s: float = 15.0) -> stage_pb2.StepFinished:
        """Waits until the step has finished, and the call has ended without an error."""
        await self.until(lambda: self.is_over, "`finished`", within_s=within_s)
        expect(self.error is None and self.kinds()[-1:] == ["finished"], "`finished` as the last event", self.came)
        return self.events[-1].finished

    async def failed(self, code: Any = None, *reasons: str, within_s: float = 8.0) -> StagemeshError:
        """Waits until the step has failed with this error, and returns the error."""
        wanted = f"the step fails: {code.name if code else 'an error'} {' or '.join(reasons)}".strip()
        await self.until(lambda: self.is_over, wanted, within_s=within_s)
        if self.error is None:
            raise MismatchError(wanted, self.came)
        expect_error(self.error, code, *reasons)
        return self.error

    def outputs(self) -> Mapping[str, list[request_pb2.Output]]:
        """Returns the parts of each output, by name."""
        parts: dict[str, list[request_pb2.Output]] = {}
        for each in self.events:
            if each.HasField("output"):
                parts.setdefault(each.output.name, []).append(each.output)
        return parts


class Trial:
    """The steps, streams and servers that one case has started. Its end cancels and closes them."""

    def __init__(self, stage: Stage) -> None:
        self.stage, self.stub, self.inputs = stage, stage.stub, stage.inputs
        number = next(stage.numbers)
        self.request_id = f"conformance-{stage.run_id}-{number}"
        self._name = f"conformance.{stage.run_id}.{number}"
        self.stack = AsyncExitStack()
        self._steps: list[Step] = []
        self._observed: list[tuple[str, Observed]] = []
        self._ids = set[str]()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for step in self._steps:
            step.task.cancel()
            step.call.cancel()
        for each in self._ids:
            with contextlib.suppress(grpc.aio.AioRpcError, TimeoutError):
                await self.stub.CancelStep(stage_pb2.CancelStepRequest(request_id=each), timeout=_ENDING_S)
        await asyncio.gather(*(step.task for step in self._steps), return_exceptions=True)
        await self.stack.aclose()

    def observe(self, kind: str, observed: Observed) -> None:
        """Adds the log of something that the case has started to `logs`."""
        number = sum(name.startswith(kind) for name, _ in self._observed) + 1
        self._observed.append((f"{kind} {number}", observed))

    def logs(self) -> Mapping[str, Sequence[str]]:
        """Returns the last lines of each log."""
        return {name: observed.log[-_LOGGED:] for name, observed in self._observed}

    # -- peers

    def peer_name(self, role: str) -> str:
        """Returns the name of a played replica of this trial, which begins with "conformance"."""
        return f"{self._name}.{role}"

    async def consumer(self, **settings: Any) -> Consumer:
        """Starts a played consumer. `settings` are its attributes."""
        consumer = self.silent_consumer()
        for name, value in settings.items():
            setattr(consumer, name, value)
        await consumer.start()
        self.observe("consumer", consumer)
        self.stack.push_async_callback(consumer.stop)
        return consumer

    def silent_consumer(self) -> Consumer:
        """Returns a played consumer that does not listen."""
        return Consumer(self.peer_name("consumer"), self.stage.host, self.stage.described.incarnation)

    def producer(self, *, incarnation: str = "first") -> Producer:
        """Returns a played producer, which opens streams to the stage."""
        return Producer(self.peer_name("producer"), f"{self._name}.{incarnation}", self)

    async def stream(self, *, incarnation: str = "first") -> Stream:
        """Opens a stream of a played producer, and waits for Welcome."""
        return await self.producer(incarnation=incarnation).stream()

    @asynccontextmanager
    async def own_channel(self, options: Mapping[str, Any] | None = None) -> AsyncGenerator[grpc.aio.Channel]:
        """Opens another connection to the stage. `options` are arguments of `open_channel`."""
        async with open_channel(self.stage.endpoint, **(options or {})) as channel:
            yield channel

    # -- steps

    @property
    def edge_in(self) -> str:
        """The name of the incoming edge."""
        return f"conformance->{self.stage.described.stage}"

    @property
    def edge_out(self) -> str:
        """The name of the outgoing edge."""
        return f"{self.stage.described.stage}->conformance"

    def key_in(self, attempt: int = 1, request_id: str = "") -> chunk_pb2.EdgeKey:
        """Returns the key of the incoming flow."""
        return chunk_pb2.EdgeKey(request_id=request_id or self.request_id, edge=self.edge_in, attempt=attempt)

    def request(
        self, consumer: Consumer | None = None, *, request_id: str = "", attempt: int = 1, is_cut: bool = True
    ) -> stage_pb2.ExecuteStepRequest:
        """Returns the request of a step, whose edges are bound to the played peers.

        Without a consumer, no edge leaves the stage, and its outputs are streamed.
        """
        stage, request_id = self.stage, request_id or self.request_id
        step = stage_pb2.ExecuteStepRequest(
            request_id=request_id, step_id=f"{request_id}/{stage.described.stage}/{attempt}", attempt=attempt, seed=7
        )
        for name, value in stage.options.items():
            step.parameters.options[name].CopyFrom(value)
        if stage.max_tokens and stage.described.signature.sampling:
            step.parameters.sampling.max_tokens = stage.max_tokens
        if stage.inputs.tensors:
            step.inputs.add(edge=self.edge_in, producer=self.peer_name("producer"), attempt=attempt)
        else:
            step.input.text = stage.prompt
        if consumer is not None:
            self.bind(step.outputs.add(), consumer, attempt=attempt, is_cut=is_cut)
        else:
            for each in stage.emits:
                step.streamed.add(tensor=each.spec.name)
        return step

    def bind(self, binding: Any, consumer: Consumer, *, attempt: int = 1, is_cut: bool = True) -> None:
        """Fills the binding of the outgoing edge to a played consumer."""
        binding.edge, binding.consumer, binding.endpoint = self.edge_out, consumer.name, consumer.endpoint
        binding.connector, binding.attempt = chunk_pb2.CONNECTOR_GRPC, attempt
        if is_cut and self.stage.cut_tensor:
            binding.tensors.append(self.stage.cut_tensor)
            binding.policy.frames.frames = FRAMES

    def call(self, request: stage_pb2.ExecuteStepRequest, *, timeout_s: float | None = None) -> Step:
        """Calls ExecuteStep."""
        step = Step(request, self.stub.ExecuteStep(request, timeout=timeout_s))
        self._steps.append(step)
        self.observe("step", step)
        self._ids.add(request.request_id)
        return step

    async def start(
        self, *, request_id: str = "", attempt: int = 1, is_cut: bool = True, **settings: Any
    ) -> tuple[Step, Consumer | None]:
        """Starts a step with a played consumer, if an edge leaves the stage, and waits until it is accepted."""
        consumer = await self.consumer(**settings) if self.stage.has_output else None
        request = self.request(consumer, request_id=request_id, attempt=attempt, is_cut=is_cut)
        return await self.call(request).accepted(), consumer

    async def supply(self, *, key: Any = None) -> None:
        """Sends the whole input on a new stream, if an edge enters the stage."""
        if self.inputs.tensors:
            await self.feed(await self.stream(), key=key)

    def repeated(self, **changes: Any) -> stage_pb2.ExecuteStepRequest:
        """Returns the request of the last call, with other values of some fields."""
        again = stage_pb2.ExecuteStepRequest()
        again.CopyFrom(self._steps[-1].request)
        for name, value in changes.items():
            setattr(again, name, value)
        return again

    async def refused(self, request: stage_pb2.ExecuteStepRequest, code: Any, *reasons: str) -> StagemeshError:
        """Calls ExecuteStep, which must fail with this error before anything is accepted. Returns the error."""
        step = self.call(request)
        error = await step.failed(code, *reasons)
        expect(not step.events, "no event of a step that is refused", step.came)
        return error

    async def require_rebinding(self) -> None:
        """Raises NotServedError if the stage does not serve RebindStep, and so waits for none."""
        with contextlib.suppress(MismatchError):
            await answer_of(
                self.stub.RebindStep(stage_pb2.RebindStepRequest(request_id="none", step_id="none"), timeout=5)
            )

    async def feed(self, stream: Stream, *, chunks: int = CHUNKS, rows: int = ROWS, key: Any = None) -> Flow:
        """Opens the incoming flow, and sends all of its chunks and its end. Does not wait for the commit."""
        flow = await stream.open(key or self.key_in())
        for number in range(chunks):
            await flow.send(self.inputs.chunk(number, rows))
        await flow.end()
        return flow

    async def good(
        self, request_id: str = "", *, change: Change | None = None, rows: int = ROWS, chunks: int = CHUNKS
    ) -> Good:
        """Runs a request, which must succeed, with this number of chunks and of rows in each. Returns its result."""
        request_id = request_id or f"{self.request_id}.{len(self._ids)}"
        consumer = await self.consumer() if self.stage.has_output else None
        request = self.request(consumer, request_id=request_id)
        if change is not None:
            change(request)
        step = await self.call(request).accepted()
        if self.inputs.tensors:
            flow = await self.feed(
                await self.stream(), key=self.key_in(request_id=request_id), chunks=chunks, rows=rows
            )
            await flow.committed()
        await step.finished()
        return self.result(step, consumer)

    def result(self, step: Step, consumer: Consumer | None) -> Good:
        """Returns the result of a step that has finished. Checks what its consumer received."""
        contents: dict[str, bytes] = {}
        chunks = 0
        if consumer is not None:
            consumer.check()
            chunks = sum(len(flow.chunks) for flow in consumer.flows.values())
            contents |= consumer.contents(step.request.request_id)
        for name, parts in step.outputs().items():
            contents[f"output {name}"] = b"".join(content_of(part) for part in parts)
        return Good(step.events, contents, chunks)

    def require_chunks(self) -> None:
        """Raises NotApplicableError if the stage sends its output as a single chunk."""
        reference = self.stage.reference
        require(reference is None or reference.chunks > 1, "the output is a single chunk")

    def expect_same(self, good: Good) -> None:
        """Checks that a request has the same result as the first good one."""
        reference = self.stage.reference
        if reference is not None:
            expect_contents("the result of the first good request", reference.contents, good.contents)

    async def expect_survival(self) -> None:
        """Checks that the stage is healthy and still runs a request right."""
        from grpc_health.v1 import health_pb2, health_pb2_grpc

        async with self.own_channel() as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            call = stub.Watch(health_pb2.HealthCheckRequest(), timeout=5)
            status = (await call.read()).status
            call.cancel()
            expect(status == health_pb2.HealthCheckResponse.SERVING, "the health SERVING afterwards", status)
            again: stage_pb2.DescribeResponse = await stage_pb2_grpc.StageServiceStub(channel).Describe(
                stage_pb2.DescribeRequest(protocol=PROTOCOL), timeout=5
            )
        expect(again.incarnation == self.stage.described.incarnation, "the same incarnation", "another one")
        self.expect_same(await self.good())


def content_of(part: request_pb2.Output) -> bytes:
    """Returns the content of a part of an output as bytes."""
    if part.HasField("token_ids"):
        return struct.pack(f"<{len(part.token_ids.ids)}I", *part.token_ids.ids)
    # At most one of these is set.
    encoded = (part.text.encode(), part.image.data, part.media.data)
    return b"".join((*encoded, part.audio.samples.inline, part.tensor.inline))


def expect_contents(what: str, wanted: Mapping[str, bytes], found: Mapping[str, bytes]) -> None:
    """Raises MismatchError, with the sizes of the contents, if they differ."""
    sizes = [{name: len(each) for name, each in contents.items()} for contents in (wanted, found)]
    expect(found == wanted, f"{what}, {sizes[0]} bytes", f"another one, {sizes[1]}")


def require(condition: object, why: str) -> None:
    """Raises NotApplicableError with this text if the condition does not hold."""
    if not condition:
        raise NotApplicableError(why)
