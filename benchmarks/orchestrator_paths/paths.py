"""The paths of outputs to a client: through the orchestrator, or directly from the stage, with or without a relay."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing
from typing import Protocol, Self

from benchmarks.orchestrator_paths.relay import UPSTREAM
from stagemesh.common.plugins.connectors import number_of
from stagemesh.orchestrator.planning.chunk_policies import policy_to_wire
from stagemesh.pipeline import Pipeline
from stagemesh.rpc.channels import open_channel
from stagemesh.v1 import orchestrator_pb2, orchestrator_pb2_grpc, stage_pb2, stage_pb2_grpc

_CANCEL_S = 10.0


class RequestPath(Protocol):
    """Runs requests. Iterate within `aclosing`, which ends the request."""

    def texts(self, request_id: str, *, outputs: int) -> AsyncGenerator[str]:
        """Yields an empty text when every stage has accepted the request, then the texts of its outputs."""
        ...


class Orchestrated:
    """Runs requests through the orchestrator."""

    def __init__(self, endpoint: str) -> None:
        self._channel = open_channel(endpoint)
        self._stub = orchestrator_pb2_grpc.OrchestratorServiceStub(self._channel)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close()

    async def texts(self, request_id: str, *, outputs: int) -> AsyncGenerator[str]:
        async with aclosing(self.events(request_id, outputs=outputs)) as events:
            async for event in events:
                match event.WhichOneof("event"):
                    case "admitted":
                        yield ""
                    case "output" if event.output.name == "text":
                        yield event.output.text
                    case _:
                        pass

    async def events(self, request_id: str, *, outputs: int) -> AsyncGenerator[orchestrator_pb2.GenerateResponse]:
        """Yields all events of a request. Iterate within `aclosing`, which ends the request."""
        request = orchestrator_pb2.GenerateRequest(request_id=request_id)
        request.input.text = "count"
        request.parameters.sampling.max_tokens = outputs
        call = self._stub.Generate(request)
        try:
            async for event in call:
                yield event
        finally:
            call.cancel()


class Direct:
    """Runs requests at the stages themselves: plans replicas round robin, and receives the first stage's outputs.

    If `relay` is given, the outputs pass through a relay at this address.
    """

    def __init__(
        self, pipeline: Pipeline, replicas: Sequence[orchestrator_pb2.ReplicaStatus], *, relay: str | None = None
    ) -> None:
        self._pipeline = pipeline
        self._replicas = {name: [each for each in replicas if each.stage == name] for name in pipeline.stages}
        self._channels = {each.name: open_channel(each.endpoint) for each in replicas}
        self._stubs = {name: stage_pb2_grpc.StageServiceStub(channel) for name, channel in self._channels.items()}
        self._relay = open_channel(relay) if relay is not None else None
        self._measured_stage = next(iter(pipeline.stages))
        """The stage whose outputs are measured. It is called last."""
        self._turn = 0

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for channel in (*self._channels.values(), *([self._relay] if self._relay is not None else [])):
            await channel.close()

    async def texts(self, request_id: str, *, outputs: int) -> AsyncGenerator[str]:
        self._turn += 1
        chosen = {name: each[self._turn % len(each)] for name, each in self._replicas.items()}
        async with AsyncExitStack() as stack:
            for replica in chosen.values():
                stack.push_async_callback(self._cancel, replica, request_id)
            # Consumers are called first, so that they expect the producer's chunks.
            for name in reversed([name for name in self._replicas if name != self._measured_stage]):
                others = self._execute(name, chosen, request_id=request_id, outputs=outputs)
                await anext(others)
                draining = asyncio.create_task(_drain(others))
                stack.callback(draining.cancel)
            events = self._execute(self._measured_stage, chosen, request_id=request_id, outputs=outputs)
            await anext(events)
            yield ""
            async for event in events:
                if event.WhichOneof("event") == "output":
                    yield event.output.text

    async def _execute(
        self, stage: str, chosen: Mapping[str, orchestrator_pb2.ReplicaStatus], *, request_id: str, outputs: int
    ) -> AsyncGenerator[stage_pb2.ExecuteStepResponse]:
        request = self._request(stage, chosen, request_id=request_id, outputs=outputs)
        replica = chosen[stage]
        if stage == self._measured_stage and self._relay is not None:
            stub = stage_pb2_grpc.StageServiceStub(self._relay)
            call = stub.ExecuteStep(request, metadata=((UPSTREAM, replica.endpoint),))
        else:
            call = self._stubs[replica.name].ExecuteStep(request)
        try:
            async for event in call:
                yield event
        finally:
            call.cancel()

    def _request(
        self, stage: str, chosen: Mapping[str, orchestrator_pb2.ReplicaStatus], *, request_id: str, outputs: int
    ) -> stage_pb2.ExecuteStepRequest:
        incoming, outgoing = self._pipeline.incoming(stage), self._pipeline.outgoing(stage)
        request = stage_pb2.ExecuteStepRequest(
            request_id=request_id,
            step_id=f"{request_id}/{stage}/1",
            attempt=1,
            inputs=[
                stage_pb2.InputBinding(edge=edge.name, producer=chosen[edge.producer].name, attempt=1)
                for edge in incoming
            ],
            outputs=[
                stage_pb2.OutputBinding(
                    edge=edge.name,
                    consumer=chosen[edge.consumer].name,
                    endpoint=chosen[edge.consumer].endpoint,
                    connector=number_of(edge.connector),
                    policy=policy_to_wire(edge.policy),
                    tensors=edge.tensors,
                    tokens=stage_pb2.TOKEN_SELECTION_ALL,
                    attempt=1,
                )
                for edge in outgoing
            ],
            streamed=[stage_pb2.StreamedOutput(tensor="text")],
        )
        if stage == self._measured_stage:
            # The other stages choose no tokens.
            request.parameters.sampling.max_tokens = outputs
        if not incoming:
            request.input.text = "count"
        return request

    async def _cancel(self, replica: orchestrator_pb2.ReplicaStatus, request_id: str) -> None:
        request = stage_pb2.CancelStepRequest(request_id=request_id, attempt=1, reason="the measurement has ended")
        await self._stubs[replica.name].CancelStep(request, timeout=_CANCEL_S)


async def _drain(events: AsyncIterator[stage_pb2.ExecuteStepResponse]) -> None:
    async for _ in events:
        pass
