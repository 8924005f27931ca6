"""Realtime conversations for tests: a client, the scripts of its orchestrator, and what the orchestrator received."""

import base64
import io
import wave
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import openai
from openai.resources.realtime.realtime import AsyncRealtimeConnection

from stagemesh.v1 import request_pb2
from stagemesh.v1.orchestrator_pb2 import GenerateResponse
from tests.client.scripted import (
    Script,
    ScriptedOrchestrator,
    Talk,
    admitted,
    audio,
    called,
    ended,
    finished,
    served,
    text,
)
from tests.gateway.making import describe, serving

RATE_HZ = 24_000
TOOL = {"type": "function", "name": "read_clock", "parameters": {"type": "object"}}
CALL = called("read_clock", '{"zone": '), called("", '"Asia/Tokyo"}')


class Talker:
    """A realtime client, and the events that it has received."""

    def __init__(self, connection: AsyncRealtimeConnection) -> None:
        self._connection = connection
        self.received: list[dict[str, Any]] = []

    async def send(self, kind: str, **fields: Any) -> None:
        event: Any = {"type": kind, **fields}
        await self._connection.send(event)

    async def until(self, *kinds: str) -> dict[str, Any]:
        """Returns the next event of one of these types."""
        while True:
            event = (await self._connection.recv()).to_dict()
            self.received.append(event)
            if event["type"] in kinds:
                return event
            assert event["type"] != "error", event

    async def say(self, words: str, **fields: Any) -> dict[str, Any]:
        """Adds a user message. Returns its item."""
        content = [{"type": "input_text", "text": words}]
        item = {"type": "message", "role": "user", "content": content, **fields}
        await self.send("conversation.item.create", item=item)
        done = await self.until("conversation.item.done", "conversation.item.created")
        added: dict[str, Any] = done["item"]
        return added

    async def update(self, **settings: Any) -> None:
        """Changes settings of the session."""
        await self.send("session.update", session={"type": "realtime", **settings})
        await self.until("session.updated")

    async def respond(self, **settings: Any) -> dict[str, Any]:
        """Asks for a response, and returns it when it has ended."""
        await self.send("response.create", response=settings)
        done: dict[str, Any] = (await self.until("response.done"))["response"]
        return done

    async def error(self) -> dict[str, Any]:
        """Returns the next error."""
        error: dict[str, Any] = (await self.until("error"))["error"]
        return error

    def texts(self, kind: str) -> str:
        """Returns the joined deltas of the events of a type."""
        return "".join(event["delta"] for event in self.received if event["type"] == kind)

    def audio(self, kind: str) -> bytes:
        """Returns the joined audio of the events of a type."""
        return b"".join(base64.b64decode(event["delta"]) for event in self.received if event["type"] == kind)


@asynccontextmanager
async def talking(*scripts: Script, talks: Sequence[Talk] = ()) -> AsyncGenerator[tuple[ScriptedOrchestrator, Talker]]:
    """Yields an orchestrator with a text and an audio output, and a client whose conversation has begun."""
    async with (
        served() as orchestrator,
        conversing(orchestrator, *scripts, talks=talks) as url,
        connected(url) as talker,
    ):
        yield orchestrator, talker


@asynccontextmanager
async def connected(url: str, *, model: str = "p") -> AsyncGenerator[Talker]:
    """Yields a client whose conversation has begun at a gateway."""
    ai = openai.AsyncOpenAI(base_url=f"http://{url}/v1", api_key="none")
    async with ai, ai.realtime.connect(model=model) as connection:
        talker = Talker(connection)
        await talker.until("session.created")
        yield talker


@asynccontextmanager
async def conversing(
    orchestrator: ScriptedOrchestrator, *scripts: Script, talks: Sequence[Talk] = (), **settings: Any
) -> AsyncGenerator[str]:
    """Serves a gateway for the orchestrator. Yields its address. `settings` are settings of its config."""
    describe(orchestrator, "text", "audio", detects_turns=bool(talks))
    orchestrator.scripts.extend(scripts)
    orchestrator.talks.extend(talks)
    async with serving(orchestrator.endpoint, **settings) as url:
        yield url


def spoken(*words: str | GenerateResponse) -> Script:
    """Returns a script that says each word, or sends each part, with a tenth of a second of audio for each."""
    return [admitted(), *said(*words), ended("text"), ended("audio"), finished()]


def written(words: str) -> Script:
    """Returns a script that answers with these words as text alone."""
    return [admitted(), text(words), ended("text"), finished()]


def said(*words: str | GenerateResponse) -> Iterator[Any]:
    """Yields a part of the text and of the audio for each word."""
    for word in words:
        yield text(word) if isinstance(word, str) else word
        yield audio([0.25] * (RATE_HZ // 10))


def messages(orchestrator: ScriptedOrchestrator, request: int = -1) -> list[tuple[str, str]]:
    """Returns the roles and texts of the prompt of a request."""
    found = orchestrator.requests[request].input.conversation.messages
    names = {request_pb2.ROLE_USER: "user", request_pb2.ROLE_ASSISTANT: "assistant", request_pb2.ROLE_SYSTEM: "system"}
    return [(names.get(each.role, "tool"), each.content or "".join(part.text for part in each.parts)) for each in found]


def pcm(samples: npt.NDArray[np.int16]) -> str:
    """Returns samples as a client sends them."""
    return base64.b64encode(samples.tobytes()).decode()


def wav_samples(part: request_pb2.Part) -> npt.NDArray[np.int16]:
    """Returns the samples of a WAV file in a prompt."""
    with wave.open(io.BytesIO(part.audio_file.data)) as file:
        assert (file.getframerate(), file.getnchannels()) == (RATE_HZ, 1)
        return np.frombuffer(file.readframes(1 << 24), np.int16)
