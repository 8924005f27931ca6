"""Finds the turns of a user in audio, by a session of the pipeline that detects turns without answering them."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TypeAlias

from stagemesh.client import AsyncSession, AudioSamples, SpeechDetected, TurnCommitted, TurnDetection, TurnEnded
from stagemesh.common.errors import StagemeshError
from stagemesh.gateway.catalog import Model

Heard: TypeAlias = SpeechDetected | TurnCommitted | StagemeshError
"""Speech that begins or ends, a complete turn, or the error that has ended the listener."""


class Listener:
    """One session that detects turns. Reports its events one after the other."""

    def __init__(self, session: AsyncSession, *, begin_s: float, on_event: Callable[[Heard], Awaitable[None]]) -> None:
        self._session, self._begin_s, self._on_event = session, begin_s, on_event
        self._task = asyncio.create_task(self._run())

    @classmethod
    async def open(
        cls, model: Model, detection: TurnDetection, *, begin_s: float, on_event: Callable[[Heard], Awaitable[None]]
    ) -> "Listener":
        """Opens the session. Raises its error if the pipeline rejects it.

        `begin_s` is the time of the first audio of the session, which is added to the times of its events. `on_event`
        is called with each of them.
        """
        session = model.client.converse(
            pipeline=model.description.pipeline, outputs=[model.require_output("text")], turn_detection=detection
        )
        return cls(await session.__aenter__(), begin_s=begin_s, on_event=on_event)

    async def append(self, samples: AudioSamples) -> None:
        """Appends audio. Waits until the session accepts it."""
        await self._session.append(samples)

    async def close(self) -> None:
        """Ends the session. No report follows."""
        self._task.cancel()
        await asyncio.wait([self._task])
        await self._session.close()

    async def _run(self) -> None:
        try:
            async for event in self._session:
                match event:
                    case SpeechDetected():
                        await self._on_event(replace(event, at_s=event.at_s + self._begin_s))
                    case TurnCommitted():
                        await self._on_event(replace(event, audio_end_s=event.audio_end_s + self._begin_s))
                    case TurnEnded(error=StagemeshError() as error):
                        raise error
                    case _:
                        pass
        except StagemeshError as exc:
            await self._on_event(exc)
            await self._session.close()
