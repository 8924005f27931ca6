"""Sends random bodies and events to a gateway, and judges the answers."""

import asyncio
import base64
import json
import random
from collections.abc import Mapping, Sequence
from copy import deepcopy
from typing import Any, Self
from urllib.parse import quote

import httpx
import websockets
from PIL import Image

from tests.fuzz.messages import mutated
from tests.fuzz.rpcs import Findings
from tests.gateway.sounds import tone, wav
from tests.pictures import encoded_image

_CALL_S = 2.0
"""The time after which a call that still runs is cancelled, in seconds."""
_EVENTS = 6
"""The maximum number of events of a WebSocket."""
_DRAIN_S = 0.02
_HOSTS = [f"127.0.0.{number}" for number in range(2, 66)]
"""The hosts that send. A gateway rejects all requests of a host after too much of what it sent was rejected."""
_DEEP, _DEPTH = "@deep", 20_000
"""The text that stands for lists in lists, and their number, which Python's encoder cannot write."""
_UNEXPECTED = 1011
"""The code with which a server closes a WebSocket after an exception."""

PNG = encoded_image(Image.new("RGB", (1, 1)))
WAV = wav(tone(0.05))
_PCM = base64.b64encode(bytes(4800)).decode()
_IMAGE_URL = "data:image/png;base64," + base64.b64encode(PNG).decode()
_AUDIO = base64.b64encode(WAV).decode()
_TOOL: dict[str, Any] = {"name": "clock", "description": "d", "parameters": {"type": "object"}}
_COMMON: dict[str, Any] = {"model": "p", "seed": 1, "user": "u", "options": {"voice": "a"}, "priority": 1}
_SAMPLING: dict[str, Any] = {"temperature": 0.5, "top_p": 0.9, "top_k": 3, "stop": ["x"], "n": 2, "bad_words": ["y"]}
_PARTS: list[Any] = [
    {"type": "text", "text": "hi"},
    {"type": "image_url", "image_url": {"url": _IMAGE_URL}},
    {"type": "input_audio", "input_audio": {"data": _AUDIO, "format": "wav"}},
]
_CALL: dict[str, Any] = {"id": "1", "type": "function", "function": {"name": "clock", "arguments": "{}"}}
_MESSAGES: list[Any] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": _PARTS},
    {"role": "assistant", "content": "x", "tool_calls": [_CALL]},
    {"role": "tool", "content": "noon", "tool_call_id": "1"},
]
_CHAT: dict[str, Any] = {"model": "p", "messages": [{"role": "user", "content": "hi"}]}
JSON_SEEDS: Mapping[str, Sequence[dict[str, Any]]] = {
    "/v1/chat/completions": [
        _CHAT,
        {**_CHAT, "stream": True, "stream_options": {"include_usage": True}},
        {**_CHAT, **_COMMON, **_SAMPLING, "messages": _MESSAGES, "logprobs": True, "top_logprobs": 1},
        {**_CHAT, "tools": [{"type": "function", "function": _TOOL}], "tool_choice": "required"},
        {**_CHAT, "modalities": ["text", "audio"], "audio": {"format": "wav", "voice": "a"}},
        {**_CHAT, "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": {}}}},
        {**_CHAT, "structured_outputs": {"choice": ["a", "b"]}, "max_tokens": 5, "chat_template_kwargs": {"a": 1}},
    ],
    "/v1/completions": [{**_COMMON, **_SAMPLING, "prompt": "hi"}, {"model": "p", "prompt": [1, 2], "stream": True}],
    "/v1/audio/speech": [
        {"model": "p", "input": "hi", "response_format": "wav"},
        {**_COMMON, "input": "hi", "voice": "a", "speed": 2, "ref_audio": f"data:audio/wav;base64,{_AUDIO}"},
        {"model": "p", "input": "hi", "stream_format": "sse", "response_format": "pcm"},
    ],
    "/v1/images/generations": [{**_COMMON, "prompt": "hi", "n": 1, "size": "8x8"}, {"model": "p", "prompt": "hi"}],
    "/v1/videos": [{**_COMMON, "prompt": "hi", "seconds": 1, "size": "8x8"}],
}
_FORM: dict[str, Any] = {"model": "p", "prompt": "hi", "response_format": "verbose_json", "language": "en"}
FORM_SEEDS: Mapping[str, Sequence[tuple[dict[str, Any], str, bytes]]] = {
    "/v1/audio/transcriptions": [(_FORM, "file", WAV), ({"model": "p", "stream": "true"}, "file", WAV)],
    "/v1/audio/voices": [({"name": "ada", "consent": "c", "ref_text": "t"}, "audio_sample", WAV)],
    "/v1/images/edits": [({"model": "p", "prompt": "hi", "n": "1"}, "image", PNG)],
}
PATHS = ("/v1/models/", "/v1/audio/voices/", "/v1/videos/", "/v1/stagemesh/pipelines/", "/v1/videos?limit=", "/assets/")
_ITEM: dict[str, Any] = {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "hi"}]}
_BETA_SETTINGS: dict[str, Any] = {
    "modalities": ["text"],
    "input_audio_format": "g711_ulaw",
    "voice": "ash",
    "turn_detection": {"type": "semantic_vad"},
}
_SETTINGS: dict[str, Any] = {"type": "realtime", "instructions": "Be brief.", "output_modalities": ["text"]}
EVENT_SEEDS: Mapping[str, Sequence[dict[str, Any]]] = {
    "/v1/realtime?model=p": [
        {"type": "session.update", "session": {**_SETTINGS, "tools": [{"type": "function", **_TOOL}]}},
        {"type": "session.update", "session": {**_BETA_SETTINGS, "tracing": "auto"}},
        {"type": "input_audio_buffer.append", "audio": _PCM},
        {"type": "input_audio_buffer.commit"},
        {"type": "input_audio_buffer.clear"},
        {"type": "conversation.item.create", "item": {**_ITEM, "id": "i"}},
        {"type": "conversation.item.create", "item": _ITEM, "previous_item_id": "i"},
        {"type": "conversation.item.retrieve", "item_id": "i"},
        {"type": "conversation.item.truncate", "item_id": "i", "content_index": 0, "audio_end_ms": 5},
        {"type": "conversation.item.delete", "item_id": "i"},
        {"type": "response.create", "event_id": "e"},
        {"type": "response.create", "response": {"conversation": "none", "input": [_ITEM], "metadata": {"a": "b"}}},
        {"type": "response.cancel"},
    ],
    "/v1/audio/speech/stream?model=p&voice=a": [
        {"type": "input.text", "text": "hi"},
        {"type": "input.done"},
        {"type": "input.clear"},
    ],
}


class JsonFuzzer:
    """Makes random JSON out of valid documents. The same seed makes the same documents."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)

    def data(self, seeds: Sequence[Any]) -> bytes:
        """Returns a document with a few changes as text. A tenth is mutated, and may then not be JSON any more."""
        data = json.dumps(self.document(seeds)).encode()
        data = data.replace(json.dumps(_DEEP).encode(), b"[" * _DEPTH + b"]" * _DEPTH)
        return mutated([data], self.random) if self.random.random() < 0.1 else data

    def document(self, seeds: Sequence[Any]) -> Any:
        """Returns one of the documents after up to four changes."""
        changed = deepcopy(self.random.choice(seeds))
        for _ in range(self.random.choice((0, 0, 1, 1, 2, 4))):
            changed = self._change(changed)
        return changed

    def value(self) -> Any:
        """Returns an extreme value."""
        rng = self.random
        nested: Any = {}
        for _ in range(rng.choice((2, 50))):
            nested = [nested] if rng.random() < 0.5 else {"a": nested}
        values: tuple[Any, ...] = (
            *(None, True, False, 0, -1, 1, 2, 16, 1 << 31, 1 << 63, 10**40, 0.5, -1e300, float("nan"), float("inf")),
            *("", "a", "p", "text", "audio", "\x00", "\ud800", "é" * 40, "x" * 20_000, "../../etc/passwd", "%s%n"),
            *("data:image/png;base64,!", "data:,", "http://127.0.0.1:1/", "file:///etc/passwd", "memory://x", _PCM),
            *([], {}, [None], [0] * 3000, [{}] * 3000, ["x"] * 3000, {str(n): n for n in range(300)}, nested, _DEEP),
        )
        return rng.choice(values)

    def _change(self, node: Any) -> Any:
        rng = self.random
        if isinstance(node, dict | list) and node and rng.random() < 0.75:
            key = rng.choice(list(node) if isinstance(node, dict) else range(len(node)))
            action = rng.random()
            if action < 0.1:
                del node[key]
            elif action < 0.2 and isinstance(node, list):
                node.extend([node[key]] * rng.choice((1, 100, 2000)))
            elif action < 0.25 and isinstance(node, dict):
                node[rng.choice((*_COMMON, *_SAMPLING, "type", "id", "unknown"))] = self.value()
            else:
                node[key] = self._change(node[key])
            return node
        return self.value()


class GatewayFuzzer:
    """Sends random requests to a gateway at `address`, "host:port"."""

    def __init__(self, address: str, seed: int) -> None:
        self.findings = Findings()
        self._address, self._json = address, JsonFuzzer(seed)
        self._random = self._json.random
        transports = [httpx.AsyncHTTPTransport(local_address=host) for host in _HOSTS]
        self._https = [httpx.AsyncClient(base_url=f"http://{address}", timeout=60, transport=t) for t in transports]
        self._targets = [
            *((self._post_json, path) for path in JSON_SEEDS),
            *((self._post_form, path) for path in FORM_SEEDS),
            *((self._talk, path) for path in EVENT_SEEDS),
            (self._get, "/v1/models"),
        ]

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        for http in self._https:
            await http.aclose()

    async def send(self, messages: int, *, at_once: int = 16) -> None:
        """Sends at least this number of bodies and events, to all endpoints in turn."""
        until = self.findings.sent.total() + messages

        async def work(turn: int) -> None:
            while self.findings.sent.total() < until:
                call, path = self._targets[turn % len(self._targets)]
                try:
                    async with asyncio.timeout(_CALL_S):
                        await call(path)
                except TimeoutError:
                    self.findings.codes["still running"] += 1
                turn += at_once

        await asyncio.gather(*(work(turn) for turn in range(at_once)))

    async def _post_json(self, path: str) -> None:
        kind = "text/plain" if self._random.random() < 0.02 else "application/json"
        await self._request("POST", path, self._json.data(JSON_SEEDS[path]), kind)

    async def _post_form(self, path: str) -> None:
        fields, name, content = self._random.choice(FORM_SEEDS[path])
        fields = self._json.document([fields])
        if not isinstance(fields, dict):
            fields = {"model": fields}
        file = mutated([content], self._random) if self._random.random() < 0.5 else content
        parts = [(f'name="{key}"', json.dumps(value).strip('"').encode()) for key, value in fields.items()]
        parts.append((f'name="{name}"; filename="f"', file))
        head = b"--b\r\nContent-Disposition: form-data; "
        body = b"".join(head + begin.encode() + b"\r\n\r\n" + data + b"\r\n" for begin, data in parts) + b"--b--\r\n"
        if self._random.random() < 0.1:
            body = mutated([body], self._random)
        await self._request("POST", path, body, "multipart/form-data; boundary=b")

    async def _get(self, _path: str) -> None:
        text = str(self._json.value())[:200].encode("utf-8", "replace")
        path = self._random.choice(PATHS) + quote(text, safe="")
        await self._request(self._random.choice(("GET", "DELETE", "POST")), path, b"", "text/plain")

    async def _request(self, method: str, path: str, body: bytes, kind: str) -> None:
        self.findings.sent[path] += 1
        try:
            http = self._random.choice(self._https)
            answer = await http.request(method, path, content=body, headers={"content-type": kind})
        except httpx.TransportError as exc:
            self.findings.codes[type(exc).__name__] += 1
            self.findings.defects.append(f"{path}: {exc!r}; {body[:2000]!r}")
            return
        self.findings.codes[str(answer.status_code)] += 1
        if answer.status_code == httpx.codes.INTERNAL_SERVER_ERROR:
            self.findings.defects.append(f"{path}: {answer.text[:500]}\n{body[:2000]!r}")

    async def _talk(self, path: str) -> None:
        self.findings.sent[path] += 1
        sent = [self._json.data(EVENT_SEEDS[path]) for _ in range(self._random.randint(1, _EVENTS))]
        try:
            source = (self._random.choice(_HOSTS), 0)
            async with websockets.connect(f"ws://{self._address}{path}", max_size=None, local_addr=source) as socket:
                for data in sent:
                    self.findings.sent[path] += 1
                    # A binary frame, or one of text.
                    await socket.send(data if self._random.random() < 0.05 else data.decode("utf-8", "replace"))
                    await self._drain(socket)
            code = socket.close_code or 0
        except websockets.ConnectionClosed as exc:
            code = exc.rcvd.code if exc.rcvd is not None else _UNEXPECTED
        except websockets.InvalidStatus as exc:
            code = exc.response.status_code
        self.findings.codes[str(code)] += 1
        if code in (_UNEXPECTED, 500):
            self.findings.defects.append(f"{path}: {sent!r:.2000}")

    async def _drain(self, socket: websockets.ClientConnection) -> None:
        try:
            async with asyncio.timeout(_DRAIN_S):
                while True:
                    await socket.recv()
        except TimeoutError:
            return
