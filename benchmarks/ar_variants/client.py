"""The client of the stage: a process that runs all steps over one stream, as an orchestrator does."""

import asyncio
import itertools
from collections import Counter
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
    _stream: "grpc.aio.StreamStreamCall[bytes, bytes]"
    _reading: asyncio.Task[None]

    async def open(self) -> None:
        """Does nothing: `connect` opens the channel."""

    async def connect(self, endpoint: str) -> None:
        """Opens a channel to a stage, and the stream that all steps share."""
        self._channel = grpc.aio.insecure_channel(endpoint, options=CHANNEL_OPTIONS)
        execute: grpc.aio.StreamStreamMultiCallable[bytes, bytes] = self._channel.stream_stream(
            "/stagemesh.v1.StageService/ExecuteSteps"
        )
        self._stream = execute()
        self._writing, self._numbers = asyncio.Lock(), itertools.count(1)
        self._running: dict[int, asyncio.Future[int]] = {}
        """The number of generated tokens of each running step, by the number of its call."""
        self._messages = Counter[int]()
        """The number of messages whose first part belongs to a step, by the number of its call."""
        self._reading = asyncio.create_task(self._read())

    async def close(self) -> None:
        """Closes the channel."""
        if self._channel is not None:
            await self._channel.close()
            await asyncio.wait([self._reading])

    async def run(self, trial: Trial, consumer: Consumer | None) -> Outcome:
        """Runs one trial. Hidden states go to the consumer, if there is one."""

        async def ask(request_id: str, prompt: list[int], wanted: int) -> int:
            number = next(self._numbers)
            running = self._running[number] = asyncio.get_running_loop().create_future()
            start = stage_pb2.StartStep(step=_request(request_id, prompt, wanted, consumer))
            async with self._writing:
                await self._stream.write(stage_pb2.ExecuteStepsRequest(call=number, start=start).SerializeToString())
            tokens = await running
            del self._running[number]
            assert tokens == wanted, f"{tokens} tokens arrived of {wanted}"
            return self._messages.pop(number, 0)

        return await run_streams(ask, trial)

    async def _read(self) -> None:
        try:
            async for data in self._stream:
                response = stage_pb2.ExecuteStepsResponse.FromString(data)
                self._messages[response.messages[0].call] += 1
                for message in response.messages:
                    if message.event.HasField("finished"):
                        self._running[message.call].set_result(message.event.finished.usage.output_tokens)
                    elif message.ended.HasField("error"):
                        self._running[message.call].set_exception(RuntimeError(str(message.ended.error)))
        except (grpc.aio.AioRpcError, asyncio.CancelledError):
            # The channel was closed, or the stage ended; a step that runs gets no answer.
            for running in self._running.values():
                running.cancel()


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
        attempt=1,
    )
