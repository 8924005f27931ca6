"""What every way is given to do."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass

PROMPT_TOKENS, OUTPUT_TOKENS = 8, 64
SEED = 3


@dataclass(frozen=True)
class Turn:
    """So many streams at once, each with so many requests one after the other."""

    name: str
    """Another for each turn of a way."""
    streams: int
    requests: int = 1

    @property
    def tokens(self) -> int:
        """That come of it."""
        return self.requests * self.streams * OUTPUT_TOKENS

    def request_ids(self, stream: int) -> Iterator[str]:
        """A stream's requests."""
        return (f"{self.name}-s{stream}-r{request}" for request in range(self.requests))


@dataclass(frozen=True)
class Outcome:
    """How a turn went."""

    tokens: int
    messages: int
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        """Of all streams together."""
        return self.tokens / self.seconds


async def run_streams(ask: Callable[[str, list[int], int], Awaitable[int]], turn: Turn) -> Outcome:
    """Runs a turn.

    `ask` takes a request's id, its prompt and how many tokens it asks for, which must have come when it returns how
    many messages it heard.
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
