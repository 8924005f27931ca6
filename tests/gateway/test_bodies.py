"""Bodies and events that are huge, malformed or of another type."""

import asyncio
import json
import threading
import tracemalloc
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import websockets
from hypothesis import given
from hypothesis import strategies as st

from stagemesh.common.errors import InvalidRequestError
from stagemesh.gateway import body
from stagemesh.gateway.body import decode_json
from stagemesh.gateway.limits import CALLER
from stagemesh.gateway.realtime.events import CLIENT_EVENT
from stagemesh.gateway.realtime.settings import Settings
from stagemesh.gateway.responses.body import ResponseBody
from stagemesh.gateway.routes.chat import ChatBody
from stagemesh.gateway.routes.completions import CompletionBody
from stagemesh.gateway.routes.images import ImageBody
from stagemesh.gateway.routes.speech import SpeechBody
from stagemesh.gateway.routes.transcriptions import TranscriptionBody
from stagemesh.gateway.routes.videos import VideoBody
from stagemesh.gateway.routes.voices import CreateVoiceBody
from tests.client.scripted import admitted, ended, finished
from tests.gateway.attacks import FORM_PATHS, JSON_PATHS, attacked, longest_block_s, post
from tests.gateway.making import error_of
from tests.rpc.call_errors import raises

BODIES = (
    *(ChatBody, CompletionBody, ImageBody, ResponseBody, SpeechBody, TranscriptionBody, VideoBody, CreateVoiceBody),
    Settings,
)


USER = {"role": "user", "content": "hi"}


MANY = 5_000


def _arrays(schema: Any) -> Iterator[Mapping[str, Any]]:
    if isinstance(schema, dict):
        if schema.get("type") == "array":
            yield schema
        for value in schema.values():
            yield from _arrays(value)
    elif isinstance(schema, list):
        for value in schema:
            yield from _arrays(value)


def test_every_list_of_every_body_and_event_has_a_maximum() -> None:
    schemas = [*(each.model_json_schema() for each in BODIES), CLIENT_EVENT.json_schema()]
    found = [array for schema in schemas for array in _arrays(schema)]
    assert len(found) > 20
    assert all(1 <= array["maxItems"] <= body.MAX_TOKEN_IDS for array in found), found


WRONG_LISTS: Mapping[str, tuple[str, Any]] = {
    "messages": ("chat/completions", lambda wrong: {"messages": wrong}),
    "parts": ("chat/completions", lambda wrong: {"messages": [{"role": "user", "content": wrong}]}),
    "calls": ("chat/completions", lambda wrong: {"messages": [{"role": "assistant", "tool_calls": wrong}]}),
    "tools": ("chat/completions", lambda wrong: {"messages": [USER], "tools": wrong}),
    "modalities": ("chat/completions", lambda wrong: {"messages": [USER], "modalities": wrong}),
    "choice": ("chat/completions", lambda wrong: {"messages": [USER], "structured_outputs": {"choice": wrong}}),
    "stop": ("completions", lambda wrong: {"prompt": "x", "stop": wrong}),
    "stop tokens": ("completions", lambda wrong: {"prompt": "x", "stop_token_ids": wrong}),
    "bad words": ("completions", lambda wrong: {"prompt": "x", "bad_words": wrong}),
    "prompt": ("completions", lambda wrong: {"prompt": wrong}),
    "keys": ("completions", lambda wrong: {"prompt": "x", **{f"k{n}": 1 for n, _ in enumerate(wrong)}}),
    "options": (
        "images/generations",
        lambda wrong: {"prompt": "x", "options": {f"k{n}": [] for n in range(len(wrong))}},
    ),
    "stages": ("videos", lambda wrong: {"prompt": "x", "stages": {f"k{n}": 1 for n, _ in enumerate(wrong)}}),
    "voice": ("audio/speech", lambda wrong: {"input": "x", "voice": {f"k{n}": 1 for n, _ in enumerate(wrong)}}),
    "items": ("responses", lambda wrong: {"input": wrong}),
    "parts of items": ("responses", lambda wrong: {"input": [{"role": "user", "content": wrong}]}),
    "tools of a response": ("responses", lambda wrong: {"input": "x", "tools": [{"type": "function", "x": wrong}]}),
    "long names": ("videos", lambda wrong: {"prompt": "x", **{"k" * 9_000 + str(n): 1 for n in range(90)}}),
}


@pytest.mark.parametrize("name", WRONG_LISTS)
@pytest.mark.parametrize("wrong", [{"x": 1}, [], None], ids=["objects", "lists", "nulls"])
async def test_a_list_of_wrong_entries_has_a_short_answer_without_them(name: str, wrong: object) -> None:
    path, make = WRONG_LISTS[name]
    content = json.dumps({"model": "p", **make([wrong] * MANY)}).encode()
    async with attacked() as (orchestrator, address):
        answer = await post(address, path, content)
        message = error_of(answer)["message"]
        assert len(message) <= 4_200
        assert message.count(";") < 20
        assert not orchestrator.requests


@pytest.mark.parametrize("element", [b"{},", b"[],", b'"",', b"1,", b'{"a":', b'\\"{},'])
@pytest.mark.parametrize("path", [*JSON_PATHS, "realtime"])
async def test_a_body_of_tiny_values_takes_little_memory_and_time(path: str, element: bytes) -> None:
    content = b'{"model":"p","type":"response.create","messages":[' + element * (4_000_000 // len(element)) + b"1]}"
    async with attacked() as (_, address):
        tracemalloc.start()
        try:
            async with longest_block_s() as blocks:
                if path == "realtime":
                    async with websockets.connect(f"ws://{address}/v1/realtime?model=p") as socket:
                        await socket.recv()
                        await socket.send(content.decode())
                        error = json.loads(await socket.recv())["error"]
                else:
                    error = (await post(address, path, content)).json()["error"]
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert error["code"] in {"message_too_large", "invalid_request"}
        assert len(error["message"]) < 4_200
        assert peak < 100 << 20
        assert blocks[0] < 1


async def test_a_caller_uses_one_thread_for_large_work() -> None:
    released = threading.Event()

    async def work(caller: str, job: Callable[[], object]) -> None:
        CALLER.set(caller)
        await body.aside(job, size_bytes=1 << 20)

    large = [asyncio.create_task(work("ada", released.wait)) for _ in range(2)]
    other = asyncio.create_task(work("bob", lambda: None))
    done, _ = await asyncio.wait([*large, other], timeout=5, return_when=asyncio.FIRST_COMPLETED)
    released.set()
    await asyncio.gather(*large, other)
    assert done == {other}


@given(
    st.recursive(
        st.none() | st.integers(0, 9) | st.text('"\\,[{é', max_size=9),
        lambda each: st.lists(each) | st.dictionaries(st.text('\\",{', max_size=4), each),
    )
)
def test_values_in_texts_do_not_count(value: object) -> None:
    text = json.dumps(value).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(body, "_COUNTED_BYTES", 5)
        patch.setattr(body, "_MAX_OBJECTS", _objects(value))
        assert decode_json(text) == value
        if _objects(value):
            patch.setattr(body, "_MAX_OBJECTS", _objects(value) - 1)
            with raises(InvalidRequestError, reason="MESSAGE_TOO_LARGE"):
                decode_json(text)


def _objects(value: object) -> int:
    """Returns the number of texts, lists and objects in a JSON value."""
    if isinstance(value, dict):
        return 1 + sum(1 + _objects(each) for each in value.values())
    if isinstance(value, list):
        return 1 + sum(map(_objects, value))
    return int(isinstance(value, str))


async def test_texts_with_many_commas_are_no_attack() -> None:
    async with attacked() as (orchestrator, address):
        orchestrator.scripts.append([admitted(), ended(), finished()])
        content = json.dumps({"model": "p", "prompt": 'a,[{"\\' * 500_000}).encode()
        assert (await post(address, "completions", content)).status_code == 200


BOUNDARY = b"--b\r\nContent-Disposition: form-data; name="


FORMS = {
    "many fields": (BOUNDARY + b'"x"\r\n\r\n\r\n') * 100_000,
    "many files": (BOUNDARY + b'"file"; filename="a"\r\n\r\n\r\n') * 100_000,
    "a long head": BOUNDARY + b'"x"\r\nX: ' + b"x" * 4_000_000 + b"\r\n\r\n\r\n",
    "many headers": BOUNDARY + b'"x"\r\n' + b"X: y\r\n" * 500_000 + b"\r\n\r\n",
    "line ends": BOUNDARY + b'"file"; filename="a"\r\n\r\n' + b"\r\n" * 2_000_000 + b"\r\n",
    "a preamble": b"--\r\n-\r\n" * 500_000,
    "a large field": BOUNDARY + b'"prompt"\r\n\r\n' + b"x" * 3_000_000 + b"\r\n",
    "JSON in a field": BOUNDARY + b'"options"\r\n\r\n' + b"[" + b"{}," * 300_000 + b"1]\r\n",
    "no name": b"--b\r\n\r\n\r\n",
    "nothing": b"",
}


@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("path", FORM_PATHS)
async def test_a_malformed_form_is_rejected_at_once(path: str, name: str, tmp_path: Path) -> None:
    async with attacked(voices=str(tmp_path)) as (_, address):
        async with longest_block_s() as blocks:
            answer = await post(address, path, FORMS[name] + b"--b--\r\n", "multipart/form-data; boundary=b")
        assert len(error_of(answer)["message"]) < 4_200
        assert blocks[0] < 1


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", "", "multipart/form-data"])
@pytest.mark.parametrize("path", [*JSON_PATHS, *FORM_PATHS])
async def test_a_content_type_that_any_page_can_send_is_not_json(path: str, kind: str, tmp_path: Path) -> None:
    async with attacked(voices=str(tmp_path)) as (orchestrator, address):
        error_of(await post(address, path, json.dumps({"model": "p", "prompt": "x", "input": "x"}).encode(), kind))
        assert not orchestrator.requests


@pytest.mark.parametrize("content", [b"\x1f\x8b\x08\x00" * 100, b"[" * 100_000, b'{"a":' * 50_000, b"\xff\xfe{}", b""])
async def test_what_is_not_json_is_an_error_of_the_caller(content: bytes) -> None:
    async with attacked() as (_, address):
        error = error_of(await post(address, "completions", content), 413 if len(content) >= 100_000 else 400)
        assert "JSON" in error["message"]
        answer = await post(address, "completions", content, **{"content-encoding": "gzip"})
        assert "gzip" in error_of(answer)["message"]


async def test_deep_values_are_an_error_of_the_caller() -> None:
    async with attacked() as (orchestrator, address):
        orchestrator.scripts.append([admitted(), ended(), finished()])
        for depth in (100, 500, 900, 960, 980):
            deep = b'{"a":' * depth + b"1" + b"}" * depth
            for field in (b"chat_template_kwargs", b"stages", b"options"):
                content = b'{"model":"p","messages":[{"role":"user","content":"x"}],"%b":%b}' % (field, deep)
                assert (await post(address, "chat/completions", content)).status_code < 500, (depth, field)
            tool = b'{"type":"function","name":"f","parameters":%b}' % deep
            content = b'{"model":"p","input":"x","tools":[%b]}' % tool
            assert (await post(address, "responses", content)).status_code < 500, depth


@pytest.mark.parametrize("kind", ["session.update", "response.cancel", "conversation.item.delete"])
async def test_events_without_media_have_at_most_a_mebibyte(kind: str) -> None:
    long = "x" * (2 << 20)
    item = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": long}]}
    async with (
        attacked() as (_, address),
        websockets.connect(f"ws://{address}/v1/realtime?model=p", max_size=None) as socket,
    ):
        assert socket.response is not None
        assert "permessage-deflate" not in socket.response.headers.get("sec-websocket-extensions", "")
        await socket.recv()
        await socket.send(json.dumps({"type": kind, "session": {"instructions": long}, "item_id": long}))
        assert json.loads(await socket.recv())["error"]["code"] == "message_too_large"
        await socket.send(json.dumps({"type": "conversation.item.create", "item": item}))
        assert json.loads(await socket.recv())["type"] == "conversation.item.added"


@pytest.mark.parametrize("number", ["1.7777777777777777e-322", "1E+100", f"0.{'1' * 30}", "1" * 30])
def test_numbers_that_take_long_are_rejected(number: str) -> None:
    with raises(InvalidRequestError, reason="INVALID_REQUEST", match="number"):
        decode_json(f"[1, {number}]".encode())


def test_numbers_of_programs_are_accepted() -> None:
    values = [0.1, -1e-99, 1.7976931348623157e98, (1 << 63) - 1, -0.1234567890123456]
    assert decode_json(json.dumps([*values, "1e-322", "1" * 30]).encode()) == [*values, "1e-322", "1" * 30]
