"""Requests whose input is streamed, at an orchestrator in the process of the test, over the stages of a deployment."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

import numpy as np

from stagemesh.common.errors import StagemeshError
from stagemesh.conformance import until
from stagemesh.connectors.packets import Packet
from stagemesh.orchestrator.config import ReplicaAddress
from stagemesh.orchestrator.fleet.fleet import Fleet
from stagemesh.orchestrator.fleet.membership import StaticSource
from stagemesh.orchestrator.orchestrator import Orchestrator
from stagemesh.orchestrator.request.streamed_input import StreamedInput
from stagemesh.orchestrator.request.validation import validate
from stagemesh.pipeline import load_pipeline
from stagemesh.rpc.channels import open_channel
from stagemesh.v1 import orchestrator_pb2, orchestrator_pb2_grpc
from tests.deployment import Deployment

READY_S, END_S = 20.0, 30.0


@asynccontextmanager
async def orchestrating(file: Path, up: Deployment) -> AsyncGenerator[Orchestrator]:
    """Runs a second orchestrator over the replicas of a deployment. `file` is the deployment's pipeline file."""
    pipeline = load_pipeline(str(file))
    async with open_channel(up.endpoint) as channel:
        stub = orchestrator_pb2_grpc.OrchestratorServiceStub(channel)
        described = await stub.DescribePipeline(orchestrator_pb2.DescribePipelineRequest(), timeout=10)
    replicas = {
        stage.name: tuple(ReplicaAddress(replica.name, replica.endpoint) for replica in stage.replicas)
        for stage in described.stages
    }
    fleet, changed = Fleet(pipeline, [StaticSource(replicas)]), asyncio.Event()
    orchestrator = Orchestrator(pipeline, fleet, max_request_s=END_S, drain_s=0.1)
    async with fleet.watched(on_change=changed.set), orchestrator.running():
        async with asyncio.timeout(READY_S):
            while not fleet.ready:
                await changed.wait()
                changed.clear()
        yield orchestrator


class Turn:
    """A running request whose input is streamed."""

    def __init__(self, orchestrator: Orchestrator, request_id: str, *outputs: str) -> None:
        self.consumed_bytes = 0
        self.stream = StreamedInput(self._consume)
        self.texts: dict[str, str] = {}
        """The text of each output so far."""
        request = orchestrator_pb2.GenerateRequest(request_id=request_id, outputs=outputs)
        valid = validate(request, orchestrator.pipeline, stream=self.stream)
        self.known = orchestrator.start(valid, content=b"", time_left_s=None)
        self._following = asyncio.ensure_future(self._follow())

    def say(self, *texts: str) -> None:
        """Appends pieces of text to the input."""
        for text in texts:
            self.stream.append(Packet({"text": np.frombuffer(text.encode(), np.uint8)}))

    async def until_heard(self, output: str, text: str) -> None:
        """Waits until an output contains this text."""
        await until(lambda: text in self.texts.get(output, ""), timeout_s=END_S)

    async def until_consumed(self, size_bytes: int) -> None:
        """Waits until all stages have consumed this number of bytes."""
        await until(lambda: self.consumed_bytes >= size_bytes, timeout_s=END_S)

    async def result(self) -> dict[str, str]:
        """Ends the input, and returns the text of each output."""
        self.stream.end()
        async with asyncio.timeout(END_S):
            await self._following
        return self.texts

    async def failure(self) -> StagemeshError:
        """Waits for the end of the request, and returns the error with which it failed."""
        try:
            async with asyncio.timeout(END_S):
                await self._following
        except StagemeshError as exc:
            return exc
        raise AssertionError("the request succeeded")

    @property
    def attempts(self) -> Sequence[tuple[str, int]]:
        """The stage and the number of each attempt, in the order in which they began."""
        return [(step.stage, step.attempt) for step in self.known.record.timeline.steps]

    def replica_of(self, stage: str) -> str:
        """Returns the name of the replica that runs the newest attempt of a stage."""
        return next(step.replica for step in reversed(self.known.record.timeline.steps) if step.stage == stage)

    def _consume(self, size_bytes: int) -> None:
        self.consumed_bytes += size_bytes

    async def _follow(self) -> None:
        async with aclosing(self.known.record.follow(next_positions={})) as events:
            async for data in events:
                event = orchestrator_pb2.GenerateResponse.FromString(data)
                if event.HasField("output"):
                    output = event.output
                    self.texts[output.name] = self.texts.get(output.name, "") + output.text
