"""Sessions of the client in TypeScript, which a test controls by commands."""

import asyncio
import base64
import json
import re
from asyncio.subprocess import PIPE
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from stagemesh.client import AudioSamples, ImageFile, Message
from stagemesh.client.content import Part
from stagemesh.rpc.error_mapping import error_from_wire
from stagemesh.v1 import chunk_pb2
from stagemesh.v1.request_pb2 import Role
from tests.children import running_process
from tests.client.scripted import ScriptedOrchestrator
from tests.client.session_drivers import SeenEvent, SessionDriver
from tests.typescript.nodes import node

_PROGRAM = Path(__file__).with_name("session_commands.mjs")
_INPUT_MODES = {"prompt": 1, "stream": 2}


class TypeScriptSession(SessionDriver):
    """A session in TypeScript."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        super().__init__()
        self._process = process

    async def append(self, *content: Part | Message) -> None:
        for piece in content:
            if isinstance(piece, AudioSamples):
                await self._do("audio", base64.b64encode(piece.samples.tobytes()).decode(), piece.sample_rate_hz)
            else:
                await self._do("append", _content(piece))

    async def clear(self) -> None:
        await self._do("clear")

    async def commit(self) -> int:
        turn: int = await self._do("commit")
        return turn

    async def interrupt(self) -> Mapping[str, int]:
        return {each["name"]: each["position"] for each in (await self._do("interrupt"))["positions"]}

    async def truncate(self, *, audio_s: float | None = None, positions: Mapping[str, int] | None = None) -> str:
        heard = {"audioS": audio_s, "positions": positions}
        truncated = await self._do("truncate", {name: value for name, value in heard.items() if value is not None})
        answer: str = truncated["answer"]
        return answer

    async def read_answer(self) -> None:
        await self._do("answer")

    async def read(self, kind: str, count: int = 1) -> None:
        await self._do("read", kind, count)

    async def detached(self) -> None:
        pass

    async def close(self) -> None:
        await self._do("close")

    async def outcome(self) -> Any:
        """Waits for the outcome of a command. Raises StagemeshError if it throws one."""
        assert self._process.stdout is not None
        async with asyncio.timeout(20):
            while True:
                line = await self._process.stdout.readline()
                assert line, "the program ended"
                printed = json.loads(line)
                if "event" in printed:
                    self.events.append(_seen(printed["event"]))
                elif "error" in printed:
                    raise error_from_wire(chunk_pb2.Error(**printed["error"]))
                else:
                    return printed["result"]

    async def _do(self, method: str, *arguments: object) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([method, *arguments]).encode() + b"\n")
        return await self.outcome()


def _content(piece: Part | Message) -> object:
    """Returns a piece as the client in TypeScript takes it."""
    if isinstance(piece, Message):
        role = Role.Value(f"ROLE_{piece.role.upper()}")
        return {"role": role, "content": piece.content, "toolCallId": piece.tool_call_id}
    if isinstance(piece, ImageFile):
        return {"content": {"$case": "image", "value": {"mediaType": piece.media_type}}}
    assert isinstance(piece, str)
    return piece


def _seen(event: Mapping[str, Any]) -> SeenEvent:
    """Returns an event that the program has printed."""
    kind, fields = event["$case"], event["value"]
    if kind == "output":
        content = fields.get("content", {"$case": "finish", "value": ""})
        kind, fields = content["$case"], {"delta": content["value"]}
    return SeenEvent(kind, event["turn"], {_in_snake_case(name): value for name, value in fields.items()})


def _in_snake_case(name: str) -> str:
    return re.sub("[A-Z]", lambda found: f"_{found[0].lower()}", name)


def _in_camel_case(name: str) -> str:
    return re.sub("_([a-z])", lambda found: found[1].upper(), name)


@asynccontextmanager
async def typescript(
    *endpoints: ScriptedOrchestrator | str, input_mode: str = "prompt", **fields: object
) -> AsyncGenerator[TypeScriptSession]:
    """Opens a session with fields of SessionOpen, and closes it. Raises StagemeshError if it cannot be opened."""
    addresses = [each if isinstance(each, str) else each.endpoint for each in endpoints]
    opening = {_in_camel_case(name): value for name, value in fields.items()}
    opening["inputMode"] = _INPUT_MODES[input_mode]
    command = (node(), str(_PROGRAM), ",".join(addresses), json.dumps(opening))
    async with running_process(*command, stdin=PIPE, stdout=PIPE, limit=16 << 20) as process:
        session = TypeScriptSession(process)
        await session.outcome()
        yield session
        await session.close()
        async with asyncio.timeout(10):
            await process.communicate(b"")
        assert process.returncode == 0
