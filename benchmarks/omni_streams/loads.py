"""Closed loads, with a constant number of requests, and open loads, whose requests arrive at random times."""

import asyncio
import itertools
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.omni_streams.playout import Chunk
from stagemesh.client import AsyncClient, AudioChunk, EdgeUsage, Finished, Text
from stagemesh.client.requests import StageArguments

TEXT_TOKENS, CODEC_TOKENS, PROMPT_TOKENS = 32, 64, 12
_DIGITS = "0123456789"
_LATE_S = 120.0
_seeds = itertools.count(1)


@dataclass
class Stream:
    """The measurements of one request. Times are in seconds since it was sent."""

    seed: int
    first_text_s: float = 0.0
    chunks: list[Chunk] = field(default_factory=list[Chunk])
    total_s: float = 0.0
    edges: Sequence[EdgeUsage] = ()

    @property
    def first_audio_s(self) -> float:
        """The arrival of the first chunk of audio."""
        return self.chunks[0].arrival_s

    @property
    def audio_s(self) -> float:
        """The playing time of all audio."""
        return sum(chunk.duration_s for chunk in self.chunks)


@dataclass(frozen=True)
class Load:
    """Requests of one load, and the time from the first one's start to the last one's end."""

    streams: Sequence[Stream]
    seconds: float

    @property
    def requests_per_s(self) -> float:
        """Finished requests a second."""
        return len(self.streams) / self.seconds

    @property
    def tokens_per_s(self) -> float:
        """Text and codec tokens a second, of all requests together."""
        return self.requests_per_s * (TEXT_TOKENS + CODEC_TOKENS)

    @property
    def seeds(self) -> Sequence[int]:
        """The seeds of all requests."""
        return [stream.seed for stream in self.streams]


async def ask(client: AsyncClient, *, whole: bool = False) -> Stream:
    """Runs one request with a prompt of 12 tokens, 32 text tokens and 64 codec tokens, and a seed of its own.

    `whole` says whether the vocoder receives all frames in one chunk.
    """
    stream = Stream(next(_seeds))
    generator = random.Random(stream.seed)
    # Each digit is a token, and the chat template adds eight.
    prompt = "".join(generator.choices(_DIGITS, k=PROMPT_TOKENS - 8))
    thinker = StageArguments(max_tokens=TEXT_TOKENS, ignore_eos=True, temperature=0.0)
    talker = StageArguments(max_tokens=CODEC_TOKENS, min_tokens=CODEC_TOKENS, temperature=0.0)
    stages = {"thinker": thinker, "talker": talker}
    if whole:
        stages["code2wav"] = StageArguments(chunk="whole")
    began_s = time.monotonic()
    async for event in client.generate(prompt, seed=stream.seed, stages=stages):
        now_s = time.monotonic() - began_s
        match event:
            case Text():
                stream.first_text_s = stream.first_text_s or now_s
            case AudioChunk():
                stream.chunks.append(Chunk(now_s, event.duration_s))
            case Finished():
                stream.total_s, stream.edges = now_s, event.edges
                _check(event)
            case _:
                pass
    return stream


def _check(finished: Finished) -> None:
    usage = finished.usage
    sizes = usage["thinker"].prompt_tokens, usage["thinker"].output_tokens, usage["talker"].output_tokens
    assert sizes == (PROMPT_TOKENS, TEXT_TOKENS, CODEC_TOKENS), f"the request has other sizes: {sizes}"


async def closed(client: AsyncClient, *, concurrent: int, each: int, whole: bool = False) -> Load:
    """Runs `concurrent` callers at once, each of which sends `each` requests, one after the other."""

    async def call() -> list[Stream]:
        return [await ask(client, whole=whole) for _ in range(each)]

    began_s = time.monotonic()
    streams = await asyncio.gather(*(call() for _ in range(concurrent)))
    return Load(list(itertools.chain.from_iterable(streams)), time.monotonic() - began_s)


async def opened(client: AsyncClient, *, per_s: float, requests: int, seed: int) -> Load:
    """Sends `requests` requests at random times, `per_s` a second on average. `seed` determines the times."""
    random_times, loop = random.Random(seed), asyncio.get_running_loop()
    tasks: list[asyncio.Task[Stream]] = []
    began_s = due_s = loop.time()
    async with asyncio.timeout(requests / per_s + _LATE_S), asyncio.TaskGroup() as group:
        for _ in range(requests):
            due_s += random_times.expovariate(per_s)
            await asyncio.sleep(max(0.0, due_s - loop.time()))
            tasks.append(group.create_task(ask(client)))
    return Load([task.result() for task in tasks], loop.time() - began_s)
