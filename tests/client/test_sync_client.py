import asyncio
from typing import Any

import pytest

from stagemesh.client import Client, Text
from stagemesh.common.errors import InvalidRequestError, NotFoundError
from tests.client.scripted import Pause, ScriptedOrchestrator, admitted, audio, finished, text


def _first_text(endpoint: str) -> str | None:
    with Client(endpoint) as client:
        for event in client.generate("hello"):
            if isinstance(event, Text):
                return event.delta
    return None


async def test_result_joins_text_and_audio(orchestrator: ScriptedOrchestrator) -> None:
    orchestrator.scripts.append([admitted(), text("Hi "), audio([0.5]), text("you"), finished()])
    with Client(orchestrator.endpoint) as client:
        result = await asyncio.to_thread(client.generate("hello").result)
    assert (result.text, result.audio.tolist(), result.sample_rate_hz) == ("Hi you", [0.5], 24000)


async def test_leaving_the_loop_cancels_the_request(orchestrator: ScriptedOrchestrator) -> None:
    orchestrator.scripts.append([admitted(), text("Hi"), Pause.FOREVER])
    assert await asyncio.to_thread(_first_text, orchestrator.endpoint) == "Hi"
    await asyncio.wait_for(orchestrator.hung_up.wait(), 5)
    assert [each.when_left for each in orchestrator.cancels] == [True]


async def test_a_generation_is_iterated_once(orchestrator: ScriptedOrchestrator) -> None:
    orchestrator.scripts.append([admitted(), text("Hi"), finished()])
    with Client(orchestrator.endpoint) as client:
        events = client.generate("hello")
        assert (await asyncio.to_thread(events.result)).text == "Hi"
        with pytest.raises(RuntimeError, match="call `generate` again"):
            await asyncio.to_thread(events.result)
    assert len(orchestrator.requests) == 1


async def test_describe_and_cancel_work_without_asyncio(orchestrator: ScriptedOrchestrator) -> None:
    orchestrator.description.pipeline = "speech"
    with Client(orchestrator.endpoint) as client:
        assert (await asyncio.to_thread(client.describe)).pipeline == "speech"
        with pytest.raises(NotFoundError):
            await asyncio.to_thread(client.cancel, "nobody")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_token": 5}, "unknown argument: max_token"),
        ({"stages": {"talker": {"speaker": "ethan"}}}, "unknown argument of stage talker: speaker; .*`options`"),
    ],
)
def test_an_unknown_argument_is_rejected_before_the_request_is_sent(arguments: dict[str, Any], message: str) -> None:
    with Client("127.0.0.1:1") as client, pytest.raises(InvalidRequestError, match=message):
        client.generate("hello", **arguments).result()
