"""What every way is given to do."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

from pydantic import JsonValue

PROMPT_TOKENS, OUTPUT_TOKENS = 32, 64
SEED = 3
OPTIONS: Mapping[str, JsonValue] = {"load_format": "dummy", "kv_cache_memory_bytes": 64 << 20, "max_num_seqs": 64}
"""What a stage is told of its engine, and the engine called directly too."""


@dataclass(frozen=True)
class Outcome:
    """A turn: so many tokens, in so many messages, in so long."""

    tokens: int
    messages: int
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        """Of all streams together."""
        return self.tokens / self.seconds


def prompt_of(stream: int, request: int) -> list[int]:
    """Another for each request."""
    return [(stream * 131 + request * 17 + place) % 1000 for place in range(PROMPT_TOKENS)]


async def run_streams(
    ask: Callable[[str, list[int]], Awaitable[int]], *, streams: int, requests: int, turn: int
) -> Outcome:
    """Streams at once, each with one request after the other.

    `ask` takes a request's id and prompt, and returns how many messages it heard; all
    tokens must have come.
    """

    async def stream(number: int) -> int:
        heard = 0
        for request in range(requests):
            heard += await ask(f"t{turn}-s{number}-r{request}", prompt_of(number, request))
        return heard

    began_s = time.perf_counter()
    messages = sum(await asyncio.gather(*(stream(number) for number in range(streams))))
    seconds = time.perf_counter() - began_s
    return Outcome(streams * requests * OUTPUT_TOKENS, messages, seconds)
