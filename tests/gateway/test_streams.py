"""Streams of events: what is sent before the first output, and how a stream ends."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from stagemesh.common.errors import InvalidRequestError, OverloadedError
from stagemesh.gateway import answers
from stagemesh.v1.orchestrator_pb2 import GenerateResponse
from stagemesh.v1.request_pb2 import FINISH_REASON_CANCELLED, FINISH_REASON_FAILED, Finish, FinishReason, Output
from tests.client.scripted import ScriptedOrchestrator, admitted, audio, ended, finished, queued, text
from tests.gateway.attacks import attacked, post
from tests.gateway.making import describe, error_of

STREAMS: Mapping[str, dict[str, Any]] = {
    "chat/completions": {"messages": [{"role": "user", "content": "x"}]},
    "completions": {"prompt": "x"},
    "audio/speech": {"input": "x", "stream_format": "sse", "response_format": "pcm"},
    "images/generations": {"prompt": "x"},
}
TOO_LONG = InvalidRequestError("the prompt has 9 tokens", reason="PROMPT_TOO_LONG")
BUSY = OverloadedError("later", reason="CALL_LIMIT", retry_after_s=2.5)


async def _post(address: str, path: str, **fields: Any) -> Any:
    streams = {} if "speech" in path else {"stream": True}
    return await post(address, path, json.dumps({"model": "p", **STREAMS[path], **streams, **fields}).encode())


def _ended(reason: "FinishReason.ValueType") -> GenerateResponse:
    return GenerateResponse(output=Output(name="text", finish=Finish(reason=reason)))


def _play(orchestrator: ScriptedOrchestrator, *script: Any) -> None:
    describe(orchestrator, "text", "audio", "image")
    orchestrator.scripts.append(script)


def _events(body: str) -> Sequence[str]:
    """Returns the data of the events of a stream, and its comments."""
    return [each.removeprefix("data: ") for each in body.split("\n\n") if each]


@pytest.mark.parametrize("path", STREAMS)
@pytest.mark.parametrize(("error", "status", "retry_after"), [(TOO_LONG, 400, None), (BUSY, 429, "3")])
async def test_an_error_before_the_first_output_has_its_status(
    path: str, error: InvalidRequestError, status: int, retry_after: str | None
) -> None:
    async with attacked() as (orchestrator, address):
        _play(orchestrator, queued(1), admitted(), _ended(FINISH_REASON_FAILED), error)
        answer = await _post(address, path)
        assert error_of(answer, status)["reason"] == error.reason
        assert answer.headers.get("retry-after") == retry_after


@pytest.mark.parametrize("path", STREAMS)
async def test_a_stream_that_waits_has_comments_and_then_the_error(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "HEARTBEAT_S", 0.0)
    async with attacked() as (orchestrator, address):
        _play(orchestrator, admitted(), BUSY)
        comment, *_, error, done = _events((await _post(address, path)).text)
        assert (comment, done) == (": waiting", "[DONE]")
        assert json.loads(error)["error"]["code"] == "rate_limit_exceeded"


async def test_a_role_is_sent_with_the_first_output_of_its_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "HEARTBEAT_S", 0.0)
    async with attacked() as (orchestrator, address):
        parts = [text("so"), text("so", index=1), text("on")]
        _play(orchestrator, admitted(choices=2), *parts, *(ended(), finished(choices=2)))
        events = [each for each in _events((await _post(address, "chat/completions", n=2)).text) if each[0] == "{"]
    choices = [choice for each in events for choice in json.loads(each)["choices"]]
    shown = [(each["index"], each["delta"].get("role"), each["delta"].get("content")) for each in choices]
    assert shown[:5] == [(0, "assistant", ""), (0, None, "so"), (1, "assistant", ""), (1, None, "so"), (0, None, "on")]


@pytest.mark.parametrize("path", ["chat/completions", "completions", "audio/speech"])
async def test_an_error_after_an_output_has_no_finish_reason_and_ends_the_stream(path: str) -> None:
    async with attacked() as (orchestrator, address):
        first = audio([0.5] * 4800) if "speech" in path else text("so")
        _play(orchestrator, admitted(), first, _ended(FINISH_REASON_FAILED), BUSY)
        *outputs, error, done = _events((await _post(address, path)).text)
        assert outputs
        assert not any(choice["finish_reason"] for each in outputs for choice in json.loads(each).get("choices", ()))
        fields = {"message": "later", "type": "rate_limit_error", "param": None, "code": "rate_limit_exceeded"}
        assert json.loads(error) == {"error": {**fields, "reason": "CALL_LIMIT"}}
        assert done == "[DONE]"


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("path", ["chat/completions", "completions"])
async def test_finish_reasons_are_those_of_openai(path: str, stream: bool) -> None:
    async with attacked() as (orchestrator, address):
        for name, reason in FinishReason.items():
            if reason in {FINISH_REASON_FAILED, FINISH_REASON_CANCELLED}:
                continue
            orchestrator.scripts.clear()
            _play(orchestrator, admitted(), text("so"), _ended(reason), finished())
            answer = (await _post(address, path, stream=stream)).text
            bodies = _events(answer)[:-1] if stream else [answer]
            expected = "length" if name.removeprefix("FINISH_REASON_") in {"LENGTH", "LIMIT"} else "stop"
            assert json.loads(bodies[-1])["choices"][0]["finish_reason"] == expected, name
