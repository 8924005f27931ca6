"""Sessions of the pipeline `speech`: the time to the first audio, and the time to silence after an interruption."""

import asyncio
import random
import statistics
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

from benchmarks.orchestrator_paths.processes import console
from stagemesh.client import AsyncClient, AsyncSession, AudioChunk
from stagemesh.common.errors import NotReadyError

PROMPT = "Explain in four short sentences why the sky is blue."
SEED, MAX_TOKENS = 7, 120
TOKENS = (
    *(
        "The",
        " sky",
        " is",
        " blue",
        " because",
        " the",
        " air",
        " scatters",
        " blue",
        " light",
        " more",
        " than",
        " red",
    ),
    *(" light", ".", " In", " the", " evening", ",", " the", " light", " travels", " a", " longer", " way", "."),
)
"""A text of two sentences, in pieces as a language model emits them."""
_FIRST_END = TOKENS.index(".")
_TOKEN_S = 1 / 20
_TURN_S = 60.0
_LATEST_INTERRUPT_S = 0.6
_TURNS = 20
"""The number of interrupted turns of one session."""


@dataclass(frozen=True)
class FirstAudio:
    """The times to the first audio of one text, in seconds: from the commit, and from the call of Generate."""

    session_s: float
    generate_s: float


async def measure_first_audio(client: AsyncClient, *, repeats: int) -> list[FirstAudio]:
    """Returns the times to the first audio of the same answer in alternation."""
    found: list[FirstAudio] = []
    for number in range(repeats + 1):
        result = await client.generate(PROMPT, seed=SEED, max_tokens=MAX_TOKENS).result()
        assert result.first_audio_s is not None, "the pipeline must give audio"
        async with client.converse(seed=SEED, max_tokens=MAX_TOKENS) as session:
            await session.append(PROMPT)
            began_s = time.monotonic()
            await session.commit()
            session_s = await _first_audio_s(session) - began_s
            async for _ in session.answer():
                pass
        found.append(FirstAudio(session_s, result.first_audio_s))
        console.print(f"repeat {number} of {repeats}{' (warm-up, not counted)' if not number else ''}: {found[-1]}")
    return found[1:]


async def measure_streamed_text(client: AsyncClient, *, repeats: int) -> list[float]:
    """Returns the times from the end of the first sentence to the first audio, in seconds.

    The text is appended token by token, 20 tokens in a second.
    """
    found: list[float] = []
    for _ in range(repeats + 1):
        async with client.converse(input_mode="stream", outputs=["audio"], seed=SEED) as session:
            listening = asyncio.ensure_future(_first_audio_s(session))
            complete_s = 0.0
            async for index in _ticking():
                await session.append(TOKENS[index])
                if index == _FIRST_END:
                    complete_s = time.monotonic()
            await session.commit()
            found.append(await listening - complete_s)
            async for _ in session.answer():
                pass
        console.print(f"first audio {found[-1]:.3f} s after the first sentence")
    return found[1:]


async def measure_interruptions(client: AsyncClient, *, count: int) -> list[float]:
    """Returns the times from interruptions at random moments to their confirmation, in seconds.

    No output of the interrupted answer arrives after the confirmation.
    """
    rng, found = random.Random(SEED), list[float]()
    while len(found) < count:
        # A longer conversation would not fit into the thinker's context.
        async with client.converse(seed=SEED, max_tokens=MAX_TOKENS) as session:
            reading = asyncio.ensure_future(_read_all(session))
            for _ in range(min(_TURNS, count - len(found))):
                found += await _interrupt(session, after_s=rng.uniform(0, _LATEST_INTERRUPT_S))
        await reading
    console.print(f"silence after {statistics.median(found):.4f} s (median), {max(found):.4f} s (maximum)")
    return found


async def _interrupt(session: AsyncSession, *, after_s: float) -> list[float]:
    """Interrupts an answer. Returns the time to the confirmation in seconds, or nothing if the answer ended before."""
    await session.append("Tell me more about the sky.")
    await session.commit()
    await asyncio.sleep(after_s)
    began_s = time.monotonic()
    try:
        await session.interrupt()
    except NotReadyError:
        return []
    silence_s = time.monotonic() - began_s
    await session.truncate(positions={"text": 0})
    return [silence_s]


async def _first_audio_s(session: AsyncSession) -> float:
    async with asyncio.timeout(_TURN_S):
        while (delivery := await session.next_delivery()) is not None:
            if isinstance(delivery.event, AudioChunk):
                return time.monotonic()
    raise AssertionError("the session ended without audio")


async def _read_all(session: AsyncSession) -> None:
    async for _ in session:
        pass


async def _ticking() -> AsyncIterator[int]:
    """Yields the index of each token at its time."""
    began_s = time.monotonic()
    for index in range(len(TOKENS)):
        await asyncio.sleep(max(0.0, began_s + index * _TOKEN_S - time.monotonic()))
        yield index
