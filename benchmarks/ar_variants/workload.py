"""The work that every variant does."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass

PROMPT_TOKENS, OUTPUT_TOKENS = 8, 64
SEED = 3


@dataclass(frozen=True)
class Trial:
    """Concurrent streams, each of which runs its requests one after the other."""

    name: str
    """Unique among a variant's trials."""
    streams: int
    requests: int = 1

    @property
    def tokens(self) -> int:
        """The number of tokens that the trial generates."""
        return self.requests * self.streams * OUTPUT_TOKENS

    def request_ids(self, stream: int) -> Iterator[str]:
        """Returns the ids of a stream's requests."""
        return (f"{self.name}-s{stream}-r{request}" for request in range(self.requests))


@dataclass(frozen=True)
class Outcome:
    """The result of a trial."""

    tokens: int
    messages: int
    seconds: float

    @property
    def tokens_per_s(self) -> float:
        """The rate of all streams together."""
        return self.tokens / self.seconds


async def run_streams(ask: Callable[[str, list[int], int], Awaitable[int]], trial: Trial) -> Outcome:
    """Runs a trial.

    `ask` runs one request, given its id, its prompt and its number of tokens. It returns the number of messages once
    all tokens have arrived.
    """

    async def run(stream: int) -> int:
        received = 0
        for number, request_id in enumerate(trial.request_ids(stream)):
            received += await ask(request_id, _prompt(stream, number), OUTPUT_TOKENS)
        return received

    began_s = time.perf_counter()
    messages = sum(await asyncio.gather(*(run(stream) for stream in range(trial.streams))))
    return Outcome(trial.tokens, messages, time.perf_counter() - began_s)


def _prompt(stream: int, number: int) -> list[int]:
    return [(stream * 131 + number * 17 + position) % 1000 for position in range(PROMPT_TOKENS)]
