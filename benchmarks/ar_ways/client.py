"""The client of the stage: a process that reads every message and parses only the last one."""

from dataclasses import dataclass

import grpc

from benchmarks.ar_ways.workload import SEED, Outcome, Turn, run_streams
from benchmarks.edge_ways.worker import End
from stagemesh.rpc.channels import CHANNEL_OPTIONS
from stagemesh.v1 import chunk_pb2, request_pb2, stage_pb2

EDGE = "ar->taker"
STATES = "hidden_states"


@dataclass(frozen=True)
class Taker:
    """The replica that receives the hidden states of every token."""

    replica: str
    endpoint: str


class StageClient(End):
    """Calls a stage."""

    _channel: grpc.aio.Channel | None = None

    async def open(self) -> None:
        """Does nothing: `connect` names the stage."""

    async def connect(self, endpoint: str) -> None:
        """Connects to a stage."""
        self._channel = grpc.aio.insecure_channel(endpoint, options=CHANNEL_OPTIONS)

    async def close(self) -> None:
        """Closes the channel."""
        if self._channel is not None:
            await self._channel.close()

    async def run(self, turn: Turn, taker: Taker | None) -> Outcome:
        """Runs one turn. Hidden states go to the consumer, if there is one."""
        assert self._channel is not None, "connect comes first"
        execute: grpc.aio.UnaryStreamMultiCallable[stage_pb2.ExecuteStepRequest, bytes] = self._channel.unary_stream(
            "/stagemesh.v1.StageService/ExecuteStep", request_serializer=stage_pb2.ExecuteStepRequest.SerializeToString
        )

        async def ask(request_id: str, prompt: list[int], wanted: int) -> int:
            messages, last = 0, b""
            async for data in execute(_request(request_id, prompt, wanted, taker)):
                messages, last = messages + 1, data
            tokens = stage_pb2.ExecuteStepResponse.FromString(last).finished.usage.output_tokens
            assert tokens == wanted, f"{tokens} tokens came of {wanted}"
            return messages

        return await run_streams(ask, turn)


def _request(request_id: str, prompt: list[int], wanted: int, taker: Taker | None) -> stage_pb2.ExecuteStepRequest:
    return stage_pb2.ExecuteStepRequest(
        request_id=request_id,
        step_id=request_id,
        attempt=1,
        input=request_pb2.Input(token_ids=request_pb2.TokenIds(ids=prompt)),
        parameters=request_pb2.Parameters(seed=SEED, sampling=request_pb2.Sampling(max_tokens=wanted, temperature=0.0)),
        streamed=["text"],
        outputs=[_binding(taker)] if taker is not None else [],
    )


def _binding(taker: Taker) -> stage_pb2.OutputBinding:
    return stage_pb2.OutputBinding(
        edge=EDGE,
        consumer=taker.replica,
        endpoint=taker.endpoint,
        connector=chunk_pb2.CONNECTOR_SHM,
        tensors=[STATES],
        tokens=stage_pb2.TOKEN_SELECTION_ALL,
    )
