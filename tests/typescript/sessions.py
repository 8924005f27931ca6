"""Sessions of the client in TypeScript, which a test controls by commands."""

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from tests.client.scripted import ScriptedOrchestrator
from tests.typescript.nodes import node

_PROGRAM = Path(__file__).with_name("session_commands.mjs")


class SessionFailure(Exception):  # noqa: N818 - the error of a StagemeshError in TypeScript
    """The error of a method. `reason` is that of the error catalogue."""

    def __init__(self, error: dict[str, Any]) -> None:
        super().__init__(error["message"])
        self.reason = error.get("reason")


class RunningSession:
    """A session in TypeScript."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process = process
        self.events: list[dict[str, Any]] = []
        """The events that the program has read."""

    async def do(self, method: str, *arguments: object) -> Any:
        """Calls a method of the session and returns its result. Raises SessionFailure if it throws."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([method, *arguments]).encode() + b"\n")
        return await self.outcome()

    async def outcome(self) -> Any:
        """Waits for the outcome of a call. Raises SessionFailure if it throws."""
        assert self._process.stdout is not None
        async with asyncio.timeout(20):
            while True:
                line = await self._process.stdout.readline()
                assert line, "the program ended"
                printed = json.loads(line)
                if "event" in printed:
                    self.events.append(printed["event"])
                elif "error" in printed:
                    raise SessionFailure(printed["error"])
                else:
                    return printed["result"]

    async def say(self, line: str) -> str:
        """Says a line, and returns the text of the answer."""
        await self.do("append", line)
        await self.do("commit")
        before = len(self.events)
        await self.do("answer")
        return self.text(self.events[before:])

    @staticmethod
    def text(events: list[dict[str, Any]]) -> str:
        """Returns the text of events."""
        outputs = (event["value"].get("content", {}) for event in events if event["$case"] == "output")
        return "".join(content["value"] for content in outputs if content.get("$case") == "text")

    @property
    def kinds(self) -> list[str]:
        """The kinds of the events that the program has read."""
        return [event["$case"] for event in self.events]


@asynccontextmanager
async def session(*endpoints: ScriptedOrchestrator | str, **fields: object) -> AsyncGenerator[RunningSession]:
    """Opens a session with fields of SessionOpen, and closes it. Raises SessionFailure if it cannot be opened."""
    addresses = [each if isinstance(each, str) else each.endpoint for each in endpoints]
    process = await asyncio.create_subprocess_exec(
        *(node(), str(_PROGRAM), ",".join(addresses), json.dumps(fields)),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=16 << 20,
    )
    opened = RunningSession(process)
    try:
        await opened.outcome()
        yield opened
        await opened.do("close")
        async with asyncio.timeout(10):
            await process.communicate(b"")
        assert process.returncode == 0
    finally:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
