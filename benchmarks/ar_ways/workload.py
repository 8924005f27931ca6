"""The requests that every way runs."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass

PROMPT_TOKENS, OUTPUT_TOKENS = 8, 64
SEED = 3


@dataclass(frozen=True)
class Turn:
    """Concurrent streams, each with several requests one after the other."""

    name: str
    """The name of the turn, which is different for each."""
    streams: int
    requests: int = 1

    @property
    def tokens(self) -> int:
        """The number of tokens that all requests generate."""
        return self.requests * self.streams * OUTPUT_TOKENS

    def request_ids(self, stream: int) -> Iterator[str]:
        """Returns the requests of a stream."""
        return (f"{self.name}-s{stream}-r{request}" for request in range(self.requests))


@dataclass(frozen=True)
class Outcome:
    """The result of a turn."""

    tokens: int
    messages: int
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        """The tokens per second of all streams together."""
        return self.tokens / self.seconds


async def run_streams(ask: Callable[[str, list[int], int], Awaitable[int]], turn: Turn) -> Outcome:
    """Runs a turn.

    `ask` is called with a request's id, its prompt and its number of tokens. It returns the number of messages when all
    tokens have arrived.
    """

    async def run(stream: int) -> int:
        heard = 0
        for number, request_id in enumerate(turn.request_ids(stream)):
            heard += await ask(request_id, _prompt(stream, number), OUTPUT_TOKENS)
        return heard

    began_s = time.perf_counter()
    messages = sum(await asyncio.gather(*(run(stream) for stream in range(turn.streams))))
    return Outcome(turn.tokens, messages, time.perf_counter() - began_s)


def _prompt(stream: int, number: int) -> list[int]:
    return [(stream * 131 + number * 17 + place) % 1000 for place in range(PROMPT_TOKENS)]
