"""Text that a client appends to a session of the real speech pipeline is spoken sentence by sentence."""

import asyncio
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import grpc
import numpy as np
import numpy.typing as npt
import pytest

from stagemesh.common.tensors import read_inline
from stagemesh.rpc.channels import CHANNEL_OPTIONS
from stagemesh.v1 import orchestrator_pb2, orchestrator_pb2_grpc
from tests.deployment import Deployment, deployed
from tests.orchestrator.session.talk import Talk, talking

pytestmark = [pytest.mark.speech, pytest.mark.timeout(300)]

TEXT = (
    "The sea was calm this morning. Dr. Smith saw three boats, etc. and a gull on the pier. Nobody spoke! "
    "Was it the light? At noon the wind rose."
)
TOKENS = re.findall(r"\s*\S+", TEXT)
TOKEN_S = 0.05
STREAM = orchestrator_pb2.INPUT_MODE_STREAM


@dataclass
class Spoken:
    """What a client heard of a turn, and when. Times are in seconds on one clock."""

    audio: npt.NDArray[np.float32]
    first_audio_s: float
    appended_s: list[float] = field(default_factory=list[float])
    committed_s: float = 0.0


@pytest.fixture(scope="module")
def speech() -> Iterator[Deployment]:
    with deployed("speech") as up:
        yield up


def _speak(up: Deployment, pieces: Sequence[str], *, interval_s: float = 0.0) -> Spoken:
    return asyncio.run(_spoken(up, pieces, interval_s=interval_s))


async def _spoken(up: Deployment, pieces: Sequence[str], *, interval_s: float) -> Spoken:
    async with grpc.aio.insecure_channel(up.endpoint, options=CHANNEL_OPTIONS) as channel:
        stub = orchestrator_pb2_grpc.OrchestratorServiceStub(channel)
        async with talking(stub, outputs=["audio"], input_mode=STREAM, parameters={"seed": 7}) as talk:
            appending = asyncio.create_task(_append(talk, pieces, interval_s=interval_s))
            spoken = await _hear(talk)
            *spoken.appended_s, spoken.committed_s = await appending
    return spoken


async def _append(talk: Talk, pieces: Sequence[str], *, interval_s: float) -> list[float]:
    """Returns the times at which each piece was appended, and at which the turn was committed."""
    times_s = []
    for piece in pieces:
        times_s.append(time.monotonic())
        await talk.say(piece)
        await asyncio.sleep(interval_s)
    times_s.append(time.monotonic())
    await talk.commit()
    return times_s


async def _hear(talk: Talk) -> Spoken:
    chunks, first_s = list[npt.NDArray[np.float32]](), 0.0
    while (event := await talk.call.read()).WhichOneof("event") != "ended":
        if event.generated.output.HasField("audio"):
            chunks.append(read_inline(event.generated.output.audio.samples).astype(np.float32))
            first_s = first_s or time.monotonic()
    assert not event.ended.HasField("error")
    return Spoken(np.concatenate(chunks), first_s)


def test_audio_begins_before_the_turn_is_committed(speech: Deployment) -> None:
    spoken = _speak(speech, TOKENS, interval_s=TOKEN_S)
    assert len(spoken.audio) > 5 * 24_000
    assert spoken.first_audio_s < spoken.committed_s


def test_the_audio_does_not_depend_on_how_the_text_is_appended(speech: Deployment) -> None:
    whole = _speak(speech, [TEXT]).audio
    np.testing.assert_array_equal(_speak(speech, TOKENS, interval_s=TOKEN_S).audio, whole)
    np.testing.assert_array_equal(_speak(speech, list(TEXT)).audio, whole)
