"""A WebSocket that speaks text piece by piece, with an orchestrator that follows scripts."""

import json
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager

import numpy as np
import pytest
import websockets
from websockets.asyncio.client import ClientConnection

from stagemesh.common.errors import InternalError, NotReadyError
from stagemesh.v1 import signature_pb2, tensor_pb2
from stagemesh.v1.orchestrator_pb2 import ConverseResponse, EdgeDescription
from tests.client import scripted_sessions
from tests.client.scripted import Pause, ScriptedOrchestrator, Talk, audio, served
from tests.client.scripted_sessions import committed, granted, interrupted, opened, rejected, texts, turn_ended
from tests.gateway.making import describe, rejection, serving

URL = "/v1/audio/speech/stream?model=p"


@asynccontextmanager
async def serving_speech(talk: Talk) -> AsyncGenerator[tuple[ScriptedOrchestrator, str]]:
    """Yields an orchestrator whose stage speaks the text that clients append, and the gateway's address."""
    text = signature_pb2.Signature(accepts=[signature_pb2.AcceptedTensor(spec=tensor_pb2.TensorSpec(name="text"))])
    edge = EdgeDescription(from_stage="@input", to_stage="stage")
    async with served() as orchestrator:
        describe(orchestrator, "audio", signature=text, edges=[edge])
        orchestrator.talks.append(talk)
        async with serving(orchestrator.endpoint) as url:
            yield orchestrator, f"ws://{url}"


def spoken(turn: int, value: float, *, position: int = 0) -> ConverseResponse:
    """Returns a tenth of a second of audio of a turn."""
    event = audio([value] * 2_400)
    event.output.position = position
    return scripted_sessions.generated(turn, event)


async def send(socket: ClientConnection, kind: str, **fields: str) -> None:
    await socket.send(json.dumps({"type": kind, **fields}))


async def until_done(socket: ClientConnection) -> tuple[Sequence[str], bytes]:
    """Returns the types of the events of an utterance, and its audio."""
    kinds, pcm = list[str](), b""
    while "audio.done" not in kinds:
        frame = await socket.recv()
        if isinstance(frame, bytes):
            pcm += frame
        else:
            kinds.append(json.loads(frame)["type"])
    return kinds, pcm


async def test_an_utterance_is_spoken_while_it_is_written() -> None:
    talk: Talk = [
        opened(),
        *("append", spoken(1, 0.25), "append", "commit", committed(1), spoken(1, 0.5, position=2_400), turn_ended(1)),
        *("append", "commit", committed(2), turn_ended(2, error=InternalError("lost"))),
        Pause.FOREVER,
    ]
    async with serving_speech(talk) as (orchestrator, url), websockets.connect(url + URL) as socket:
        await send(socket, "input.text", text="The sea. ")
        assert json.loads(await socket.recv())["type"] == "audio.start"
        first = await socket.recv()
        assert isinstance(first, bytes)
        await send(socket, "input.text", text="Is calm.")
        await send(socket, "input.done")
        kinds, pcm = await until_done(socket)
        assert kinds == ["audio.done"]
        samples = np.frombuffer(first + pcm, np.int16) / 32_768
        np.testing.assert_allclose(samples[[1_000, 4_000]], [0.25, 0.5], atol=0.001)
        assert len(samples) == 4_800
        assert texts(orchestrator.events[0]) == ["The sea. ", "Is calm."]
        await send(socket, "input.text", text="More.")
        await send(socket, "input.done")
        assert (await until_done(socket))[0] == ["error", "audio.done"]


async def test_speech_is_stopped() -> None:
    talk: Talk = [
        opened(),
        *("append", "commit", committed(1), spoken(1, 0.25), "clear", granted(accepted=3), "interrupt"),
        *(interrupted(1, audio=2_400), turn_ended(1), Pause.FOREVER),
    ]
    async with serving_speech(talk) as (_, url), websockets.connect(url + URL) as socket:
        await send(socket, "input.text", text="The sea.")
        await send(socket, "input.done")
        assert json.loads(await socket.recv())["type"] == "audio.start"
        await send(socket, "input.clear")
        assert (await until_done(socket))[0] == ["audio.done"]


async def test_a_rejected_event_is_reported_with_its_id() -> None:
    talk: Talk = [opened(), "commit", rejected(1, NotReadyError("no text", reason="EMPTY_TURN")), Pause.FOREVER]
    async with serving_speech(talk) as (_, url), websockets.connect(url + URL) as socket:
        await send(socket, "input.done", event_id="mine")
        error = json.loads(await socket.recv())["error"]
        assert (error["code"], error["event_id"]) == ("empty_turn", "mine")
        await send(socket, "input.speak")
        assert "input.speak" in json.loads(await socket.recv())["error"]["message"]


@pytest.mark.parametrize(
    ("query", "status", "words"),
    [
        ("", 400, "model"),
        ("?model=q", 404, "does not exist"),
        ("?model=p&loudness=3", 400, "loudness"),
        ("?model=p&voice=alto", 400, "voice"),
    ],
)
async def test_wrong_parameters_are_rejected_with_a_status(query: str, status: int, words: str) -> None:
    async with serving_speech([opened()]) as (_, url):
        response, message = await rejection(f"{url}/v1/audio/speech/stream{query}")
        assert response.status_code == status
        assert words in message
