"""A session and its client, against random events, answers and broken connections.

The client keeps what it receives, as the contract describes. Whatever happens, what it has received, the answers that
the session reports, and the prompts of later turns agree.
"""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from stagemesh.common.errors import InternalError, OverloadedError
from stagemesh.v1 import orchestrator_pb2
from tests.orchestrator.session.fake_runner import Chat, SteeredRequest, chatting, settle
from tests.orchestrator.session.scripts import ECHO, SPEAK, STREAM

_T = TypeVar("_T")
WORDS = st.text("aé🙂 ", min_size=1, max_size=8)
TURNS = st.integers(0, 6)


class SessionModel(RuleBasedStateMachine):
    """Sends events, legal or not, at any time. Answers arrive, end and fail at any time."""

    pipeline, fields = ECHO, dict[str, Any]()

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.folder = TemporaryDirectory()
        self.opening = chatting(Path(self.folder.name), self.pipeline, **self.fields)
        self.chat: Chat
        self.sent: dict[int, tuple[str, str]] = {}
        """The appended text and the kind of each event, by its number."""
        self.read = 0
        """The number of received events that the client has processed."""
        self.texts: dict[int, str] = {}
        self.answers: dict[int, str] = {}
        self.interrupted, self.committed, self.rejected = set[int](), set[int](), set[int]()
        self.blind_changes = 0
        """The number of events that can end a turn since the client has read an event."""

    @initialize(reads=st.booleans())
    def open(self, reads: bool) -> None:
        self.chat = self.run(self.opening.__aenter__())
        if not reads:
            self.chat.reads.clear()

    def run(self, work: Any) -> Any:
        return self.loop.run_until_complete(work)

    def call(self, function: Callable[[], _T]) -> _T:
        """Calls a function while the event loop runs."""

        async def call() -> _T:
            return function()

        return self.loop.run_until_complete(call())

    def send(self, kind: str, value: Any, text: str = "") -> None:
        self.blind_changes += kind in ("commit", "clear", "interrupt")
        self.sent[self.call(lambda: self.chat.send(**{kind: value}))] = (text, kind)

    @property
    def is_attached(self) -> bool:
        return self.chat.session.is_attached

    @property
    def running(self) -> SteeredRequest | None:
        """The request of the newest turn, if it runs."""
        request = next(reversed(self.chat.runner.requests.values()), None)
        return request if request is not None and not request.ended.done() else None

    @property
    def may_change_turns(self) -> bool:
        """Whether the client may send an event that can end a turn. It does not send many without reading."""
        return self.is_attached and self.blind_changes < 8

    # -- the client

    @precondition(lambda self: self.is_attached)
    @rule(text=WORDS)
    def say(self, text: str) -> None:
        self.send("append", {"part": {"text": text}}, text)

    @precondition(lambda self: self.may_change_turns)
    @rule()
    def commit(self) -> None:
        self.send("commit", {})

    @precondition(lambda self: self.may_change_turns)
    @rule()
    def clear(self) -> None:
        self.send("clear", {})

    @precondition(lambda self: self.may_change_turns)
    @rule(turn=st.just(0) | TURNS)
    def interrupt(self, turn: int) -> None:
        self.send("interrupt", {"turn": turn})

    @precondition(lambda self: self.is_attached)
    @rule(turn=TURNS, position=st.integers(0, 12))
    def truncate(self, turn: int, position: int) -> None:
        self.send("truncate", {"turn": turn, "positions": [{"name": "text", "position": position}]})

    @precondition(lambda self: self.is_attached)
    @rule()
    def break_connection(self) -> None:
        self.take()
        self.run(self.chat.leave())

    @precondition(lambda self: not self.is_attached)
    @rule()
    def attach_again(self) -> None:
        oldest = next(turn for turn in range(1, 1000) if turn not in self.answers)
        position = orchestrator_pb2.OutputPosition(name="text", position=len(self.texts.get(oldest, "").encode()))
        fields = {"linger_s": 60, "turn": oldest, "next_positions": [position]}
        self.call(lambda: self.chat.attach(is_known=True, **fields))

    @rule()
    def stop_reading(self) -> None:
        self.chat.reads.clear()

    @rule()
    def read_again(self) -> None:
        self.chat.reads.set()

    # -- the answers

    @precondition(lambda self: self.running)
    @rule(texts=st.lists(WORDS, min_size=1, max_size=6))
    def emit(self, texts: list[str]) -> None:
        request = self.running
        assert request is not None

        def emit() -> None:
            for text in texts:
                request.emit(text)

        self.call(emit)

    @precondition(lambda self: self.running)
    @rule(fails=st.booleans())
    def end(self, fails: bool) -> None:
        request = self.running
        assert request is not None
        self.call(lambda: request.end(InternalError("broken") if fails else None))

    @rule()
    def reject_next(self) -> None:
        self.chat.runner.error = OverloadedError("full", reason="ADMISSION_LIMIT", retry_after_s=1.0)

    @rule()
    def wait(self) -> None:
        self.run(settle())

    @precondition(lambda self: self.may_change_turns)
    @rule(text=WORDS)
    def take_a_turn(self, text: str) -> None:
        self.say(text)
        self.commit()
        self.run(settle())

    # -- the properties

    @invariant()
    def take(self) -> None:
        """Lets the client process the events that have arrived."""
        for event in self.chat.received[self.read :] if hasattr(self, "chat") else ():
            self.read += 1
            self.blind_changes = 0
            self._take(event)

    def _take(self, event: orchestrator_pb2.ConverseResponse) -> None:
        turn = event.turn
        match event.WhichOneof("event"):
            case "generated" if (output := event.generated.output).text:
                assert turn not in self.interrupted, "an output follows its interruption"
                assert turn not in self.answers, "an output follows the end of its turn"
                assert output.position == len(self.texts.get(turn, "").encode()), "an output is missing or repeated"
                self.texts[turn] = self.texts.get(turn, "") + output.text
            case "rejected":
                self.rejected.add(event.rejected.seq)
            case "committed":
                self.committed.add(turn)
            case "interrupted":
                self.interrupted.add(turn)
                sent = {each.name: each.position for each in event.interrupted.positions}
                assert sent.get("text", 0) == len(self.texts.get(turn, "").encode())
            case "ended" if turn not in self.answers:
                self.answers[turn] = event.ended.answer
                assert event.ended.answer == self.texts.get(turn, ""), "the answer is not the text that was sent"
            case "truncated":
                self.answers[turn] = event.truncated.answer
                assert self.texts.get(turn, "").startswith(event.truncated.answer)
            case _:
                pass

    def teardown(self) -> None:
        try:
            if hasattr(self, "chat"):
                self._finish()
        finally:
            if hasattr(self, "chat"):
                self.run(self.opening.__aexit__(None, None, None))
            self.loop.close()
            self.folder.cleanup()

    def _finish(self) -> None:
        """Ends what runs, and compares the transcript with the client's."""
        if not self.is_attached:
            self.attach_again()
        self.chat.runner.error = None
        self.chat.reads.set()
        self.run(settle())
        if self.running is not None:
            self.end(fails=False)
            self.run(settle())
        self.take()
        assert self.committed <= self.answers.keys(), "a committed turn has not ended"
        self.check_transcript()

    def check_transcript(self) -> None:
        self.send("clear", {})
        self.say("probe")
        self.commit()
        number = len(self.answers) + 1
        turns, text = list[str](), ""
        for seq, (piece, kind) in sorted(self.sent.items()):
            if seq in self.rejected:
                continue
            text = "" if kind == "clear" else text + piece
            if kind == "commit":
                turns += [text, self.answers.get(len(turns) // 2 + 1, "")]
                text = ""
        assert self.chat.prompt(number) == turns[:-1]


class StreamedSessionModel(SessionModel):
    """The same for streamed turns, which have no transcript."""

    pipeline, fields = SPEAK, {"input_mode": STREAM}

    def check_transcript(self) -> None:
        assert self.answers.keys() == set(range(1, len(self.answers) + 1)), "the numbers of turns have gaps"


_EXAMPLES = int(os.environ.get("SESSION_EXAMPLES", "60"))
_SETTINGS = settings(
    max_examples=_EXAMPLES,
    stateful_step_count=40,
    deadline=None,
    # Shrinking a failing example takes longer than the timeout of a test.
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)
TestSession = SessionModel.TestCase
TestSession.settings = _SETTINGS
TestStreamedSession = StreamedSessionModel.TestCase
TestStreamedSession.settings = _SETTINGS
pytestmark = pytest.mark.timeout(300)
