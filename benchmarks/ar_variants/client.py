"""The client of the stage: a process that receives every message and parses only the last one."""

from dataclasses import dataclass

import grpc

from benchmarks.ar_variants.workload import SEED, Outcome, Trial, run_streams
from benchmarks.edge_ways.worker import End
from stagemesh.rpc.channels import CHANNEL_OPTIONS
from stagemesh.v1 import chunk_pb2, request_pb2, stage_pb2

EDGE = "ar->consumer"
STATES = "hidden_states"


@dataclass(frozen=True)
class Consumer:
    """The address of a replica that consumes the hidden states of every token."""

    replica: str
    endpoint: str


class StageClient(End):
    """Calls a stage."""

    _channel: grpc.aio.Channel | None = None

    async def open(self) -> None:
        """Does nothing: `connect` opens the channel."""

    async def connect(self, endpoint: str) -> None:
        """Opens a channel to a stage."""
        self._channel = grpc.aio.insecure_channel(endpoint, options=CHANNEL_OPTIONS)

    async def close(self) -> None:
        """Closes the channel."""
        if self._channel is not None:
            await self._channel.close()

    async def run(self, trial: Trial, consumer: Consumer | None) -> Outcome:
        """Runs one trial. Hidden states go to the consumer, if there is one."""
        assert self._channel is not None, "call connect first"
        execute: grpc.aio.UnaryStreamMultiCallable[stage_pb2.ExecuteStepRequest, bytes] = self._channel.unary_stream(
            "/stagemesh.v1.StageService/ExecuteStep", request_serializer=stage_pb2.ExecuteStepRequest.SerializeToString
        )

        async def ask(request_id: str, prompt: list[int], wanted: int) -> int:
            messages, last = 0, b""
            async for data in execute(_request(request_id, prompt, wanted, consumer)):
                messages, last = messages + 1, data
            tokens = stage_pb2.ExecuteStepResponse.FromString(last).finished.usage.output_tokens
            assert tokens == wanted, f"{tokens} tokens arrived of {wanted}"
            return messages

        return await run_streams(ask, trial)


def _request(
    request_id: str, prompt: list[int], wanted: int, consumer: Consumer | None
) -> stage_pb2.ExecuteStepRequest:
    return stage_pb2.ExecuteStepRequest(
        request_id=request_id,
        step_id=request_id,
        attempt=1,
        input=request_pb2.Input(token_ids=request_pb2.TokenIds(ids=prompt)),
        parameters=request_pb2.StageParameters(sampling=request_pb2.Sampling(max_tokens=wanted, temperature=0.0)),
        seed=SEED,
        streamed=[stage_pb2.StreamedOutput(tensor="text")],
        outputs=[_binding(consumer)] if consumer is not None else [],
    )


def _binding(consumer: Consumer) -> stage_pb2.OutputBinding:
    return stage_pb2.OutputBinding(
        edge=EDGE,
        consumer=consumer.replica,
        endpoint=consumer.endpoint,
        connector=chunk_pb2.CONNECTOR_SHM,
        tensors=[STATES],
        tokens=stage_pb2.TOKEN_SELECTION_ALL,
    )
