"""`/v1/responses` by OpenAI's client: the answers of chat completions in the form of the Responses API."""

import asyncio
import base64
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, cast

import httpx
import openai
import pytest
import websockets
from pydantic import BaseModel

from stagemesh.common.errors import CancelledRequestError, OverloadedError
from stagemesh.gateway.config import GatewayConfig
from stagemesh.gateway.responses.store import ResponseStore, StoredResponse
from stagemesh.v1.orchestrator_pb2 import GenerateResponse
from stagemesh.v1.request_pb2 import FINISH_REASON_LENGTH, Finish, Output, TokenLogprob, TokenLogprobs
from tests.client.scripted import Pause, admitted, called, ended, finished, message, served, text
from tests.gateway.attacks import attacked
from tests.gateway.making import asking, served_with_tokens
from tests.gateway.talking import messages

HELLO = (admitted(), text("\n"), text("Good "), text("day."), ended(), finished())
CALLING = (
    *(admitted(), message(reasoning="It is "), message(reasoning="far."), message(text="Wait.")),
    *(
        called("find", '{"city": '),
        called("", '"Rome"}'),
        text("\n"),
        called("stop", "{}", call=1),
        ended(),
        finished(),
    ),
)
TOOL = {"type": "function", "name": "find", "parameters": {"type": "object"}}
ENDS = ["content_part.done", "output_item.done"]
MESSAGE_EVENTS = ["output_item.added", "content_part.added", "output_text.delta", "output_text.done", *ENDS]
REASONING = ["reasoning_text.delta", "reasoning_text.delta", "reasoning_text.done"]
REASONING_EVENTS = [*MESSAGE_EVENTS[:2], *REASONING, *ENDS]
CALL_EVENTS = ["output_item.added", "function_call_arguments.delta", "function_call_arguments.done", "output_item.done"]
PNG = "data:image/png;base64," + base64.b64encode(b"png").decode()


async def respond(ai: openai.AsyncOpenAI, **arguments: Any) -> Any:
    """Sends "hello", or another `input`, to the model "p". Returns its response."""
    create: Any = ai.responses.create
    return await create(**{"model": "p", "input": "hello", **arguments})


async def events_of(stream: Any) -> list[Any]:
    """Returns the events of a stream. They have all fields that OpenAI's types require, and are numbered."""
    events = list[Any]()
    async for event in stream:
        kind = cast("Any", type(event))
        events.append(kind.model_validate(event.to_dict()))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    return events


@pytest.mark.parametrize(
    ("script", "expected", "output"),
    [
        (HELLO, [*MESSAGE_EVENTS[:3], "output_text.delta", *MESSAGE_EVENTS[2:]], [("message", "\nGood day.")]),
        (
            CALLING,
            [*REASONING_EVENTS, *MESSAGE_EVENTS, *CALL_EVENTS[:2], *CALL_EVENTS[1:], *CALL_EVENTS],
            [
                *(("reasoning", "It is far."), ("message", "Wait.")),
                *(("function_call", '{"city": "Rome"}'), ("function_call", "{}")),
            ],
        ),
        ((admitted(), ended(), finished()), [*MESSAGE_EVENTS[:2], *MESSAGE_EVENTS[3:]], [("message", "")]),
    ],
    ids=["text", "call", "nothing"],
)
async def test_a_stream_has_the_events_and_the_response_of_openai(script: Any, expected: Any, output: Any) -> None:
    async with served() as orchestrator, asking(orchestrator) as ai:
        orchestrator.scripts.append(script)
        whole = await respond(ai, tools=[TOOL])
        events = await events_of(await respond(ai, tools=[TOOL], stream=True))
        names = ["created", "in_progress", *expected, "completed"]
        assert [event.type.removeprefix("response.") for event in events] == names
        assert [each.output for each in (events[0].response, events[1].response)] == [[], []]
        for response in (whole, events[-1].response):
            type(response).model_validate(response.to_dict())
            parts = [
                each.arguments if each.type == "function_call" else each.content[0].text for each in response.output
            ]
            assert list(zip([each.type for each in response.output], parts, strict=True)) == output
            assert (response.status, response.usage.total_tokens) == ("completed", 7)
        assert [event.item.status for event in events if event.type == "response.output_item.added"] == [
            "in_progress" for _ in output
        ]


def _continued(response: Any) -> Mapping[str, Any]:
    return {"previous_response_id": response.id, "input": []}


def _echoed(response: Any) -> Mapping[str, Any]:
    return {"input": [{"role": "user", "content": "hello"}, *(item.model_dump() for item in response.output)]}


def _referred(response: Any) -> Mapping[str, Any]:
    references = [{"type": "item_reference", "id": item.id} for item in response.output]
    return {"input": [{"role": "user", "content": "hello"}, *references]}


@pytest.mark.parametrize("form", [_continued, _echoed, _referred])
@pytest.mark.parametrize("stream", [False, True])
async def test_a_tool_is_called_and_its_result_continues(form: Callable[[Any], Any], stream: bool) -> None:
    async with served() as orchestrator, asking(orchestrator) as ai:
        orchestrator.scripts.extend([CALLING, HELLO])
        answer = await respond(ai, tools=[TOOL], stream=stream, instructions="Be kind.")
        response = (await events_of(answer))[-1].response if stream else answer
        fields = form(response)
        calls = [item.call_id for item in response.output if item.type == "function_call"]
        results = [{"type": "function_call_output", "call_id": each, "output": "far"} for each in calls]
        await respond(ai, **{**fields, "input": [*fields["input"], *results]})
        expected = [("user", "hello"), ("assistant", "Wait."), ("tool", "far"), ("tool", "far")]
        assert messages(orchestrator, 0) == [("system", "Be kind."), ("user", "hello")]
        # The instructions apply to one response alone.
        assert messages(orchestrator, 1) == expected
        sent = orchestrator.requests[1].input.conversation.messages
        assert [(each.name, each.id) for each in sent[1].tool_calls] == [("find", calls[0]), ("stop", calls[1])]
        assert [each.tool_call_id for each in sent[2:]] == calls
        assert sent[1].reasoning == "It is far."


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("hi", [("user", "hi")]),
        ([{"role": "system", "content": "a"}, {"role": "user", "content": "b"}], [("system", "a"), ("user", "b")]),
        (
            [
                {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "a"}], "status": None},
                {
                    "type": "reasoning",
                    "id": "rs_1",
                    "summary": [{"type": "summary_text", "text": "?"}],
                    "encrypted_content": None,
                },
                {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}], "phase": "final_answer"},
                {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}", "id": None, "caller": None},
                {"type": "function_call", "call_id": "2", "name": "g", "arguments": "{}"},
                {"type": "function_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "b"}]},
            ],
            [("user", "a"), ("assistant", "no"), ("tool", "b")],
        ),
        (
            [
                {
                    "role": "user",
                    "content": [
                        {"type": "input_text", "text": "see"},
                        {"type": "input_image", "image_url": PNG, "detail": "auto", "file_id": None},
                        {"type": "input_audio", "input_audio": {"data": "d2F2", "format": "wav"}},
                    ],
                }
            ],
            [("user", "see")],
        ),
    ],
    ids=["text", "roles", "items", "media"],
)
async def test_items_are_messages_of_a_chat(given: Any, expected: list[tuple[str, str]]) -> None:
    async with served() as orchestrator, asking(orchestrator) as ai:
        orchestrator.scripts.append(HELLO)
        await respond(ai, input=given)
        assert messages(orchestrator) == expected
        (*_, last) = orchestrator.requests[-1].input.conversation.messages
        assert [part.WhichOneof("content") for part in last.parts][1:] == (
            ["image", "audio_file"] if expected == [("user", "see")] else []
        )


class City(BaseModel):
    """The structure of a text."""

    name: str


async def test_parameters_are_those_of_a_chat() -> None:
    scored = TokenLogprobs(sampled=TokenLogprob(id=1, text="{", logprob=-0.5))
    script = [admitted(), GenerateResponse(output=Output(name="text", text='{"name": "Rome"}', logprobs=[scored]))]
    async with served() as orchestrator, asking(orchestrator) as ai:
        orchestrator.scripts.append([*script, ended(), finished()])
        arguments: Any = {"max_output_tokens": 9, "temperature": 0, "include": ["message.output_text.logprobs"]}
        ignored: Any = {"reasoning": {"effort": "low"}, "truncation": "auto", "metadata": {"a": "b"}}
        parsed = await ai.responses.parse(model="p", input="x", text_format=City, **arguments, **ignored)
        assert parsed.output_parsed == City(name="Rome")
        assert (parsed.metadata, parsed.max_output_tokens) == ({"a": "b"}, 9)
        written: Any = parsed.output[0]
        assert written.content[0].logprobs[0].logprob == -0.5
        sampling = orchestrator.requests[0].parameters.sampling
        assert (sampling.max_tokens, sampling.temperature) == (9, 0)
        assert json.loads(sampling.json_schema)["required"] == ["name"]
        choice: Any = {"type": "function", "name": "find"}
        orchestrator.scripts.append([admitted(), called("find", "{}"), ended(), finished()])
        orchestrator.scripts.popleft()
        async with ai.responses.stream(model="p", input="x", tools=[TOOL], tool_choice=choice) as stream:  # type: ignore[list-item]
            final = await stream.get_final_response()
        assert [(each.type, getattr(each, "arguments", None)) for each in final.output] == [("function_call", "{}")]
        assert final.to_dict()["tool_choice"] == choice


BAD_PART = [{"role": "user", "content": [{"type": "input_image", "image_url": "https://x/y.png"}]}]


@pytest.mark.parametrize(
    ("given", "param", "message"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools.0.type", "no tool 'web_search'"),
        ({"tools": [TOOL, {"type": "mcp", "server_label": "x"}]}, "tools.1.type", "no tool 'mcp'"),
        ({"tools": [{"type": "function"}]}, "tools.0.name", "required"),
        ({"tool_choice": "required"}, "tools", "needs tools"),
        ({"background": True}, "background", "not supported"),
        ({"extra_body": {"conversation": "conv_1"}}, "conversation", "not supported"),
        ({"input": []}, "input", "at least 1 item"),
        ({"input": [{"type": "web_search_call"}]}, "input.0.type", "'web_search_call' is not supported"),
        ({"input": [{"role": "user", "content": 5}]}, "input.0.content", "should be"),
        ({"input": [{"role": "user", "content": "x", "tool_calls": 5}]}, "input.0.tool_calls", "list"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_file"}]}]},
            "input.0.content.0",
            "types: 'input_text'",
        ),
        ({"instructions": "x", "input": BAD_PART}, "input.0.content.0.image_url", "fetches nothing"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input.0.id", "no stored response has an item"),
        ({"max_output_tokens": "x"}, "max_output_tokens", "integer"),
        ({"extra_body": {"n": 2}}, "n", "less than or equal to 1"),
        ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema", "required"),
        ({"include": ["typo"]}, "include.0", "pattern"),
        ({"extra_body": {"temprature": 1}}, "temprature", "did you mean temperature"),
        ({"previous_response_id": "resp_1"}, "previous_response_id", "not stored"),
    ],
    ids=lambda value: "" if isinstance(value, str) else "-".join(value),
)
async def test_what_cannot_be_answered_is_named(given: Any, param: str, message: str) -> None:
    async with served() as orchestrator, asking(orchestrator) as ai:
        with pytest.raises(openai.BadRequestError, match=message) as caught:
            await respond(ai, **given)
        assert caught.value.param == param
        assert (caught.value.code == "previous_response_not_found") == (param == "previous_response_id")
        assert not orchestrator.requests


async def test_a_response_is_stored_until_it_is_deleted() -> None:
    async with served() as orchestrator, asking(orchestrator) as ai:
        orchestrator.scripts.append(HELLO)
        first = await respond(ai, input=[{"role": "user", "content": "hello", "id": "msg_mine"}])
        second = await respond(ai, input="again", previous_response_id=first.id)
        assert await ai.responses.retrieve(second.id) == second
        items = [item async for item in ai.responses.input_items.list(second.id, order="asc", limit=2)]
        assert [getattr(item, "role", None) for item in items] == ["user", "assistant", "user"]
        assert (items[0].id, items[1].id) == ("msg_mine", first.output[0].id)
        await ai.responses.delete(first.id)
        for call in (ai.responses.retrieve, ai.responses.delete, ai.responses.cancel):
            with pytest.raises(openai.NotFoundError):
                await call(first.id)
        with pytest.raises(openai.BadRequestError, match="ended"):
            await ai.responses.cancel(second.id)
        with pytest.raises(openai.BadRequestError, match="stream"):
            await ai.responses.retrieve(second.id, stream=True)
        with pytest.raises(openai.BadRequestError, match="one before it"):
            await respond(ai, previous_response_id=second.id)
        unstored = await respond(ai, store=False)
        with pytest.raises(openai.NotFoundError):
            await ai.responses.retrieve(unstored.id)


async def test_a_caller_sees_its_own_responses_alone(tmp_path: Path) -> None:
    callers = {"of-ada": "ada", "next-of-ada": "ada", "of-bob": "bob"}
    async with (
        served_with_tokens(tmp_path, callers) as (orchestrator, clients),
        asking(orchestrator, key="of-ada", tls=clients) as ada,
    ):
        orchestrator.scripts.append(HELLO)
        response = await respond(ada)
        assert await ada.with_options(api_key="next-of-ada").responses.retrieve(response.id) == response
        bob = ada.with_options(api_key="of-bob")
        for call in (bob.responses.retrieve, bob.responses.cancel, bob.responses.delete):
            with pytest.raises(openai.NotFoundError):
                await call(response.id)
        for form in (_continued, _referred):
            with pytest.raises(openai.BadRequestError, match="stored"):
                await respond(bob, **form(response))


def test_a_store_has_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    monkeypatch.setattr("stagemesh.gateway.responses.store.time.monotonic", lambda: now_s)
    config = GatewayConfig("127.0.0.1:0", [["127.0.0.1:1"]], max_responses_bytes=20_000, response_ttl_s=10)
    store = ResponseStore(config)
    for place in range(3):
        previous = "0" if place else None
        assert store.add("ada", str(place), StoredResponse(b"x" * 2_400, (), {f"m{place}": b"y"}, previous))
    assert [store.find("ada", each) is not None for each in "012"] == [False, True, True]
    assert [store.find_item("ada", each) for each in ("m0", "m1")] == [None, b"y"]
    assert store.context("ada", "2") is None
    assert store.find("bob", "2") is None
    assert not store.add("bob", "large", StoredResponse(b"x" * 20_000, (), {}, None))
    now_s = 9.0
    assert store.add("ada", "3", StoredResponse(b"z", (b"z",), {}, None))
    assert store.add("ada", "4", StoredResponse(b"z", (b"a",), {"b": b"b"}, "3"))
    now_s = 18.0
    assert store.find("ada", "2") is None
    assert [each.items for each in store.context("ada", "4") or ()] == [[b"z"], [b"a", b"b"]]
    now_s = 27.0
    assert store.find("ada", "3") is not None
    now_s = 28.0
    assert store.find("ada", "4") is None
    assert store.add("bob", "1", StoredResponse(b"x" * 9_000, (), {}, None))


async def test_the_token_limit_makes_a_response_incomplete() -> None:
    limit = GenerateResponse(output=Output(name="text", finish=Finish(reason=FINISH_REASON_LENGTH)))
    async with served() as orchestrator, asking(orchestrator) as ai:
        orchestrator.scripts.append([admitted(), text("so"), limit, finished()])
        response = (await events_of(await respond(ai, stream=True)))[-1].response
        assert (response.status, response.incomplete_details.reason) == ("incomplete", "max_output_tokens")
        assert (response.output_text, response.output[0].status) == ("so", "incomplete")


async def test_an_error_fails_the_response() -> None:
    async with served() as orchestrator, asking(orchestrator) as ai:
        orchestrator.scripts.append([admitted(), text("so"), OverloadedError("too slow", reason="CLIENT_TOO_SLOW")])
        events = list[Any]()
        with pytest.raises(openai.APIError, match="too slow") as caught:
            async for event in await respond(ai, stream=True):
                events.append(event)
        assert caught.value.code == "client_too_slow"
        assert (events[-1].type, events[-1].response.error.message) == ("response.failed", "too slow")
        assert events[-1].response.output_text == "so"
        with pytest.raises(openai.RateLimitError, match="too slow"):
            await respond(ai)


async def test_a_running_stream_can_be_cancelled() -> None:
    async with attacked() as (orchestrator, address):
        orchestrator.scripts.extend(
            [[admitted(), text("so"), Pause.FOREVER], [admitted(), text("so"), CancelledRequestError("x")]]
        )
        async with openai.AsyncOpenAI(base_url=f"http://{address}/v1", api_key="none", max_retries=0) as ai:
            stream = await respond(ai, stream=True)
            created = await anext(stream)
            assert (await ai.responses.cancel(created.response.id)).status == "cancelled"
            assert [f"resp_{each.request_id}" for each in orchestrator.cancels] == [created.response.id]
            await stream.close()
            async with asyncio.timeout(10):
                await orchestrator.hung_up.wait()
            ended_events = await events_of(await respond(ai, stream=True))
            assert (ended_events[-1].type, ended_events[-1].response.status) == ("response.incomplete", "cancelled")


def connected(address: str) -> websockets.connect:
    """Connects to a gateway for responses over a WebSocket."""
    return websockets.connect(f"ws://{address}/v1/responses?model=p")


async def send(socket: websockets.ClientConnection, **event: Any) -> None:
    """Asks the model "p" for a response to "hello", or sends another event."""
    await socket.send(json.dumps({"type": "response.create", "model": "p", "input": "hello", **event}))


async def response_of(socket: websockets.ClientConnection) -> Any:
    """Returns the next response when it has ended, or the error that is the next event."""
    events = list[Any]()
    async with asyncio.timeout(10):
        while not events or events[-1]["type"].rpartition(".")[2] not in {"completed", "failed", "incomplete"}:
            events.append(json.loads(await socket.recv()))
            if events[-1]["type"] == "error":
                return events[-1]["error"]
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events[-1]["response"]


async def test_responses_over_a_websocket_continue_each_other() -> None:
    async with attacked() as (orchestrator, address), connected(address) as socket:
        orchestrator.scripts.append(HELLO)
        await send(socket, store=False, reasoning={"effort": "low"})
        first = await response_of(socket)
        assert (first["store"], len(first["warnings"])) == (False, 1)
        options = {"include_obfuscation": False}
        await send(socket, input="why?", previous_response_id=first["id"], stream_options=options)
        second = await response_of(socket)
        assert messages(orchestrator) == [("user", "hello"), ("assistant", "\nGood day."), ("user", "why?")]
        assert "warnings" not in second
        async with connected(address) as other, httpx.AsyncClient(base_url=f"http://{address}/v1/responses/") as http:
            assert [(await http.get(each["id"])).status_code for each in (first, second)] == [404, 200]
            await send(other, input="go on", previous_response_id=second["id"])
            assert (await response_of(other))["status"] == "completed"
            await socket.close()
            await send(other, previous_response_id=first["id"])
            assert (await response_of(other))["code"] == "previous_response_not_found"


@pytest.mark.parametrize(
    ("given", "param", "message"),
    [
        ({"type": "response.steer"}, "type", "'response.steer' is unknown"),
        ({"type": "response.cancel", "response_id": "resp_1"}, None, "no stored response"),
        ({"temprature": 1}, "temprature", "did you mean temperature"),
        ({"model": "q"}, "model", "does not exist"),
        ({"generate": False}, "generate", "not supported"),
    ],
)
async def test_a_bad_event_of_a_websocket_is_an_error(given: Any, param: str, message: str) -> None:
    async with attacked() as (orchestrator, address), connected(address) as socket:
        orchestrator.scripts.append(HELLO)
        await send(socket, **given)
        await send(socket)
        error = await response_of(socket)
        assert error["param"] == param
        assert message in error["message"]
        assert (await response_of(socket))["status"] == "completed"


async def test_a_response_over_a_websocket_ends_once() -> None:
    slow, so = OverloadedError("too slow", reason="CLIENT_TOO_SLOW"), (admitted(), text("so"))
    ends: list[Any] = [slow, CancelledRequestError("x"), Pause.FOREVER]
    scripts: list[list[Any]] = [[admitted(), slow], *([*so, end] for end in ends)]
    async with attacked() as (orchestrator, address), connected(address) as socket:
        orchestrator.scripts.extend(scripts)
        for _ in scripts:
            await send(socket)
        assert (await response_of(socket))["code"] == "client_too_slow"
        assert [(await response_of(socket))["status"] for _ in range(2)] == ["failed", "cancelled"]
        running = json.loads(await socket.recv())["response"]["id"]
        await send(socket, type="response.cancel", response_id=running)
        for _ in range(17):
            await send(socket)
        assert (await response_of(socket))["code"] == "rate_limit_exceeded"
        assert [f"resp_{each.request_id}" for each in orchestrator.cancels] == [running]
        await socket.close()
        async with asyncio.timeout(10):
            await orchestrator.hung_up.wait()
