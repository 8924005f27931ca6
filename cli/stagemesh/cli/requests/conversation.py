"""A conversation of the command line: its input, its printed answers, and Ctrl-C."""

import asyncio
import os
import signal
import sys
import threading
import time
from collections.abc import AsyncGenerator, Coroutine, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from stagemesh.cli.requests.output_sinks import Sinks
from stagemesh.cli.terminal.error_output import show_error
from stagemesh.cli.terminal.output import print_json, to_json
from stagemesh.client import (
    Admitted,
    AsyncClient,
    AsyncSession,
    AudioChunk,
    AudioSamples,
    ConverseArguments,
    RetryPolicy,
    SessionEvent,
    Text,
    TurnCommitted,
    TurnEnded,
    TurnInterrupted,
    read_wav,
)
from stagemesh.client.responses import RequestEvent
from stagemesh.common.errors import ExitCode, NotReadyError, exit_code
from stagemesh.common.notification import Notifier
from stagemesh.common.tasks import end_tasks

_PIECE_S = 0.1
"""The duration of the pieces in which audio is sent, in seconds."""
_READ_BYTES = 64 << 10


class Conversation:
    """Sends input to a session, and prints the answers.

    Text and audio go to `sinks`. If `as_json` is True, each event is also printed as a JSON object.
    """

    def __init__(self, sinks: Sinks, *, as_json: bool) -> None:
        self._sinks, self._as_json = sinks, as_json
        self._status = 0
        """The exit status of the first turn that failed, or 0."""
        self._answering = 0
        """The turn that is being answered, or 0."""
        self._ended = 0
        """The newest turn whose end was printed."""
        self._times: dict[str, float] = {}
        """The times at which the current turn began, and at which its first text and audio arrived."""
        self._changed = Notifier()
        self._stopping = asyncio.Event()
        """Is set when Ctrl-C ends the conversation."""
        self._interruption: asyncio.Task[None] | None = None

    async def run(
        self, endpoints: Sequence[str], arguments: ConverseArguments, *, microphone: Path | None, reach_s: float
    ) -> int:
        """Converses until the input ends, and returns the exit status. Raises the error of a session that fails.

        `microphone` is the WAV file to send instead of the lines of standard input. `reach_s` is the number of seconds
        during which unreachable orchestrators are called again.
        """
        recording = None if microphone is None else read_wav(microphone)
        policy = RetryPolicy(reach_s=reach_s)
        async with AsyncClient(*endpoints, retry_policy=policy) as client, client.converse(**arguments) as session:
            asyncio.get_running_loop().add_signal_handler(signal.SIGINT, self._on_interrupt, session)
            if recording is not None:
                sending = self._send_audio(session, recording)
            elif arguments.get("input_mode") == "stream":
                sending = self._send_stream(session)
            else:
                sending = self._send_turns(session)
            await self._until_first(self._print(session), sending)
        if not self._as_json:
            self._print_files()
        return ExitCode.INTERRUPTED if self._stopping.is_set() else self._status

    async def _until_first(self, *work: Coroutine[Any, Any, None]) -> None:
        """Runs tasks until the first of them ends, or until Ctrl-C. Raises the error of a task that fails."""
        stopping = asyncio.create_task(self._stopping.wait())
        tasks = [asyncio.create_task(each) for each in work]
        await asyncio.wait([*tasks, stopping], return_when=asyncio.FIRST_COMPLETED)
        ended = [task for task in tasks if task.done()]
        await end_tasks(task for task in (*tasks, stopping, self._interruption) if task is not None)
        for task in ended:
            task.result()

    def _on_interrupt(self, session: AsyncSession) -> None:
        """Handles Ctrl-C: interrupts the answer, or ends the conversation if there is none."""
        turn, self._answering = self._answering, 0
        if turn:
            self._interruption = asyncio.create_task(_interrupt(session, turn))
        else:
            self._stopping.set()

    # Input

    async def _send_turns(self, session: AsyncSession) -> None:
        """Sends each line as a turn, and waits for the answer."""
        async for line in _lines():
            if line.strip():
                await session.append(line.rstrip("\n"))
                await session.commit()
                await self._until_answered(session)

    async def _send_stream(self, session: AsyncSession) -> None:
        """Sends all lines as the pieces of a single turn."""
        async for line in _lines():
            await session.append(line)
        await self._finish(session)

    async def _send_audio(self, session: AsyncSession, recording: AudioSamples) -> None:
        """Sends a recording in real time."""
        loop, rows = asyncio.get_running_loop(), max(1, int(recording.sample_rate_hz * _PIECE_S))
        due_s = loop.time()
        for begin in range(0, len(recording.samples), rows):
            due_s += _PIECE_S
            await asyncio.sleep(due_s - loop.time())
            samples = recording.samples[begin : begin + rows]
            await session.append(AudioSamples(samples, recording.sample_rate_hz))
        await self._finish(session)

    async def _finish(self, session: AsyncSession) -> None:
        """Commits the remaining input, and waits for its answer."""
        while True:
            try:
                await session.commit()
            except NotReadyError as exc:
                if exc.reason == "TURN_RUNNING":
                    await self._until_answered(session)
                    continue
                if exc.reason != "EMPTY_TURN":
                    raise
            break
        await self._until_answered(session)

    async def _until_answered(self, session: AsyncSession) -> None:
        while self._ended < session.turn - 1:
            await self._changed.wait()

    # Output

    async def _print(self, session: AsyncSession) -> None:
        """Prints the events until the session ends."""
        while (delivery := await session.next_delivery()) is not None:
            if self._as_json and delivery.response is not None:
                print_json(to_json(delivery.response))
            if delivery.event is not None:
                self._print_event(delivery.event)
            self._changed.fire()

    def _print_event(self, event: SessionEvent) -> None:
        match event:
            case TurnCommitted() | Admitted() if event.turn > self._ended:
                self._answering = event.turn
                self._times.setdefault("begin", time.monotonic())
            case Text():
                self._times.setdefault("first text", time.monotonic())
            case AudioChunk():
                self._times.setdefault("first audio", time.monotonic())
            case TurnInterrupted():
                self._answering = 0
                self._times.clear()
                self._end_turn(f"turn {event.turn} was interrupted")
            case TurnEnded():
                self._ended, self._answering = event.turn, 0
                self._end_turn(self._timing(event.turn) if event.error is None else "")
                if event.error is not None:
                    self._status = self._status or exit_code(event.error)
                    show_error(event.error, as_json=self._as_json)
                self._times.clear()
            case _:
                pass
        if isinstance(event, RequestEvent):
            self._sinks.write(event)

    def _end_turn(self, text: str) -> None:
        self._sinks.end_texts()
        if text and not self._as_json:
            sys.stderr.write(f"{text}\n")
            sys.stderr.flush()

    def _timing(self, turn: int) -> str:
        begin_s = self._times.pop("begin", None)
        if begin_s is None:
            return ""
        times = {**self._times, "total": time.monotonic()}
        return f"turn {turn}: " + ", ".join(f"{name} {at_s - begin_s:.2f} s" for name, at_s in times.items())

    def _print_files(self) -> None:
        for paths in self._sinks.files.values():
            sys.stderr.write("".join(f"wrote {path}\n" for path in paths))
        for path in self._sinks.unwritten:
            sys.stderr.write(f"{path} was not written, because the answers had no audio\n")


async def _interrupt(session: AsyncSession, turn: int) -> None:
    # The turn may end at the same time.
    with suppress(NotReadyError):
        await session.interrupt(turn)


async def _lines() -> AsyncGenerator[str]:
    """Yields the lines of standard input with their ends, as they arrive. Prints a prompt if a user writes them."""
    loop, lines = asyncio.get_running_loop(), asyncio.Queue[str | None]()

    def read() -> None:
        # A thread that waits in `sys.stdin` holds a lock of it, which the end of the process needs.
        rest, number = b"", sys.stdin.fileno()
        with suppress(RuntimeError):  # raised if the loop has ended
            while data := os.read(number, _READ_BYTES):
                *whole, rest = (rest + data).split(b"\n")
                for line in whole:
                    loop.call_soon_threadsafe(lines.put_nowait, line.decode(errors="replace") + "\n")
            if rest:
                loop.call_soon_threadsafe(lines.put_nowait, rest.decode(errors="replace"))
            loop.call_soon_threadsafe(lines.put_nowait, None)

    threading.Thread(target=read, name="standard input", daemon=True).start()
    prompt = "> " if sys.stdin.isatty() else ""
    while True:
        sys.stderr.write(prompt)
        sys.stderr.flush()
        line = await lines.get()
        if line is None:
            return
        yield line
