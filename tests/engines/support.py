"""Helpers of the engines' tests."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import NamedTuple, Self, TypeVar

import numpy as np
from pydantic import JsonValue

from stagemesh.common.process.stage_process import StageConfig
from stagemesh.connectors.packets import Packet
from stagemesh.services.engines.abilities import AdapterControl, CacheControl, SleepControl
from stagemesh.services.engines.base import Emission, Engine, EngineEvent, Task, TokenLogprobs, Usage
from stagemesh.services.engines.controls import Profiles
from stagemesh.services.engines.prompts import Conversation, Prompt, RawPrompt

EngineType = TypeVar("EngineType", bound=Engine)


def stage_config(
    engine: str,
    *,
    function: str | None = None,
    model: str | None = None,
    options: Mapping[str, JsonValue] | None = None,
) -> StageConfig:
    """Returns the config of a stage named "tested"."""
    return StageConfig(
        pipeline="p",
        generation="1",
        stage="tested",
        replica="tested-0",
        engine=engine,
        listen="127.0.0.1:0",
        function=function,
        model=model,
        options=options or {},
    )


@asynccontextmanager
async def started(engine: EngineType) -> AsyncGenerator[EngineType]:
    """Starts an engine, and closes it at the end."""
    try:
        await engine.start(lambda _line: None)
        yield engine
    finally:
        await engine.close()


class Controls(NamedTuple):
    """The controls of an engine that has all of them."""

    adapters: AdapterControl
    sleep: SleepControl
    profiles: Profiles
    caches: CacheControl


def controls_of(engine: Engine) -> Controls:
    """Looks up the controls of an engine that has all of them."""
    abilities = engine.abilities
    assert abilities.adapters is not None
    assert abilities.sleep is not None
    assert abilities.profiles is not None
    assert abilities.caches is not None
    return Controls(abilities.adapters, abilities.sleep, abilities.profiles, abilities.caches)


async def flow(packets: Iterable[Packet]) -> AsyncIterator[Packet]:
    """Yields packets as an edge does."""
    for packet in packets:
        yield packet


class OpenEdge:
    """An incoming edge whose packets a test sends."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[Packet | Exception | None] = asyncio.Queue()
        self.read = 0
        """The number of packets that have been read. The end counts as one."""

    def send(self, packet: Packet) -> None:
        """Sends a packet."""
        self._queue.put_nowait(packet)

    def end(self, error: Exception | None = None) -> None:
        """Ends the edge, with an error if it is given."""
        self._queue.put_nowait(error)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Packet:
        got = await self._queue.get()
        self.read += 1
        if got is None:
            raise StopAsyncIteration
        if isinstance(got, Exception):
            raise got
        return got


def stream(*values: Iterable[float]) -> AsyncIterator[Packet]:
    """Yields packets with the float32 tensor "x"."""
    return flow(Packet({"x": np.array(value, np.float32)}) for value in values)


def text_stream(*texts: str) -> AsyncIterator[Packet]:
    """Yields packets with the tensor "text"."""
    return flow(Packet({"text": np.frombuffer(text.encode(), np.uint8)}) for text in texts)


def numbers_task(request_id: str, *values: Iterable[float], seed: int = 0, **options: float) -> Task:
    """Returns a task that receives numbers over the edge "in"."""
    return Task(request_id, seed, inlets={"in": stream(*values)}, options=options)


async def collect(events: AsyncIterator[EngineEvent]) -> list[EngineEvent]:
    """Returns all events of a task."""
    return [event async for event in events]


def packets(events: Iterable[EngineEvent]) -> list[Packet]:
    """Returns the emitted packets."""
    return [event.packet for event in events if isinstance(event, Emission)]


def text_of(events: Iterable[EngineEvent]) -> str:
    """Returns the emitted text."""
    return b"".join(packet.tensors["text"].tobytes() for packet in packets(events)).decode()


def tokens_of(events: Iterable[EngineEvent]) -> list[int]:
    """Returns the emitted tokens."""
    made = [packet.tensors["token_ids"] for packet in packets(events) if "token_ids" in packet.tensors]
    return [int(token) for tokens in made for token in tokens.view(np.int32)]


def text_logprobs_of(events: Iterable[EngineEvent]) -> list[TokenLogprobs]:
    """Returns the log-probabilities of the emitted text."""
    return [each for event in events if isinstance(event, Emission) for each in event.text_logprobs]


def usage_of(events: Sequence[EngineEvent]) -> Usage:
    """Returns the last event of a task that has finished."""
    assert isinstance(events[-1], Usage)
    return events[-1]


async def sampled_tokens(engine: Engine, task: Task) -> list[int]:
    """Runs a task, and returns the emitted tokens."""
    return tokens_of(await collect(engine.submit(task)))


def as_prompt(prompt: Prompt | Sequence[int]) -> Prompt:
    """Returns a prompt of token ids for a sequence of numbers, and any other prompt unchanged."""
    return prompt if isinstance(prompt, str | Conversation | RawPrompt) else RawPrompt(tuple(prompt))
