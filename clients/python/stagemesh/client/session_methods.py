"""The methods of a session, without a way to wait.

A method that waits is a generator: it yields the condition on which it waits, and returns its result. The synchronous
and the asynchronous session wait in their own ways.
"""

from collections.abc import Callable, Generator, Iterator, Mapping
from copy import copy
from typing import TypeAlias, TypeVar

from stagemesh.client.calls import Headers
from stagemesh.client.content import AudioSamples, Message, Part, to_message, to_part
from stagemesh.client.requests import check_size
from stagemesh.client.retries import RetryPolicy
from stagemesh.client.session_log import Confirmation
from stagemesh.client.session_state import SessionState
from stagemesh.client.session_turns import (
    Delivery,
    ReceivedTurn,
    SessionOpened,
    TurnCommitted,
    TurnEnded,
    TurnInterrupted,
    TurnTruncated,
)
from stagemesh.common.errors import NotFoundError, NotReadyError, StagemeshError
from stagemesh.common.requests.output_position import text_until
from stagemesh.v1 import orchestrator_pb2
from stagemesh.v1.orchestrator_pb2 import ConverseRequest, InputAppend, SessionOpen

_PIECE_BYTES = 256 << 10
_PIECE_CHARACTERS = _PIECE_BYTES // 4

T = TypeVar("T")
Steps: TypeAlias = Generator[Callable[[], bool], None, T]
"""A method that waits: it yields the conditions on which it waits, and returns its result."""


class BaseSession:
    """Base class of the sessions. A subclass calls the orchestrators, and waits for the steps of its methods."""

    def __init__(self, opening: SessionOpen, policy: RetryPolicy) -> None:
        self._state = SessionState(opening, policy)
        self._methods = SessionMethods(self._state)
        self._headers: Headers = ()
        self.session_id = opening.session_id
        """The id that identifies the session in every service and log."""

    @property
    def opened(self) -> SessionOpened:
        """The first event of the session. Only while the session is open."""
        assert self._state.opened is not None, "the `with` or `async with` statement opens the session"
        return self._state.opened

    @property
    def turn(self) -> int:
        """The number of the open turn, to which input is appended. Turns are numbered from 1."""
        return self._state.committed + 1


class SessionMethods:
    """The methods of a session. Each raises the error of the session, or of a piece that was rejected."""

    def __init__(self, state: SessionState) -> None:
        self._state = state
        self.read_end = 0
        """The newest turn whose end the program has read."""

    def opened(self) -> Steps[None]:
        """Waits until the session is open."""
        yield from self._wait(lambda: self._state.opened is not None)

    def append(self, content: Part | Message) -> Steps[None]:
        """Appends content to the open turn. Waits for credit."""
        for piece in _pieces(content):
            check_size(piece, what="piece")
            self._check()
            while not self._state.log.has_credit(piece):
                yield from self._wait(lambda piece=piece: self._state.log.has_credit(piece))  # type: ignore[misc]
                self._check()
            self._state.log.add(ConverseRequest(append=piece))
            self._state.forget_silence()

    def clear(self) -> Steps[None]:
        """Drops the input of the open turn. Waits until the session has dropped it."""
        self._state.drop_deliveries(self._state.committed + 1)
        yield from self._send(ConverseRequest(clear=orchestrator_pb2.InputClear()))

    def commit(self) -> Steps[int]:
        """Ends the input of the open turn. Returns the number of the turn when it is confirmed."""
        answer = yield from self._send(ConverseRequest(commit=orchestrator_pb2.TurnCommit()))
        assert isinstance(answer, TurnCommitted), "TurnCommitted confirms a commit"
        self._check()
        return answer.turn

    def interrupt(self, turn: int | None) -> Steps[TurnInterrupted]:
        """Stops the answer to a turn. Returns when it is confirmed."""
        number = self._state.newest if turn is None else turn
        event = ConverseRequest(interrupt=orchestrator_pb2.TurnInterrupt(turn=number))
        answer = yield from self._send(event)
        assert isinstance(answer, TurnInterrupted), "TurnInterrupted confirms an interruption"
        return answer

    def truncate(
        self, turn: int | None, *, audio_s: float | None, positions: Mapping[str, int] | None
    ) -> Steps[TurnTruncated]:
        """Shortens the answer to a turn in the transcript. Returns when it is confirmed.

        Raises InvalidRequestError (INVALID_POSITION) if a position is within a character of the text.
        """
        number = self._state.newest if turn is None else turn
        answer = self._state.known(number)
        if answer is not None and answer.is_stopped:
            yield from self._wait(lambda: number not in self._state.turns)
        if positions is None:
            positions = self._heard(answer, audio_s)
        event = orchestrator_pb2.TurnTruncate(turn=number)
        for name, position in positions.items():
            if answer is not None:
                text_until(answer.text(name), position)
            event.positions.add(name=name, position=position)
        truncated = yield from self._send(ConverseRequest(truncate=event))
        assert isinstance(truncated, TurnTruncated), "TurnTruncated confirms a truncation"
        return truncated

    def next_delivery(self) -> Steps[Delivery | None]:
        """Waits for an event, and returns it. Returns None when the session has ended."""
        state = self._state
        yield lambda: state.has_ended or bool(state.deliveries)
        if not state.deliveries:
            if state.error is not None:
                raise copy(state.error)
            return None
        delivery = state.deliveries.popleft()
        answer = state.known(delivery.turn)
        if delivery.output and answer is not None:
            answer.heard[delivery.output] = delivery.end
        if isinstance(delivery.event, TurnEnded):
            self.read_end = delivery.event.turn
        return delivery

    def _heard(self, turn: ReceivedTurn | None, audio_s: float | None) -> Mapping[str, int]:
        """Returns how much of each output the user has heard: what the program has read, or a time in the audio."""
        if audio_s is not None:
            if turn is None or turn.audio is None:
                raise NotFoundError("the turn produced no audio; give positions instead", reason="NO_AUDIO")
            output, sample_rate_hz = turn.audio
            return {output: int(audio_s * sample_rate_hz)}
        opened = self._state.opened
        received = () if turn is None else turn.received
        names = received or (opened.outputs[:1] if opened is not None else ())
        return {name: 0 if turn is None else turn.heard.get(name, 0) for name in names}

    def _send(self, event: ConverseRequest) -> Steps[Confirmation]:
        """Sends an event, and returns its confirmation. Raises its error if the session rejects it."""
        self._check()
        number = self._state.log.add(event)
        self._state.pending.add(event)
        try:
            yield from self._wait(lambda: self._state.pending.is_answered(number))
        finally:
            answer = self._state.pending.take_answer(number)
        if isinstance(answer, StagemeshError):
            raise answer
        return answer

    def _wait(self, condition: Callable[[], bool]) -> Steps[None]:
        def may_continue() -> bool:
            return self._state.has_ended or condition()

        self._state.conditions.append(may_continue)
        try:
            yield may_continue
        finally:
            self._state.conditions.remove(may_continue)
        if not condition():
            self._check()

    def _check(self) -> None:
        """Raises the error of the session or of a rejected piece, if there is one."""
        if self._state.error is not None:
            raise copy(self._state.error)
        if self._state.is_closed or self._state.is_closing:
            raise NotReadyError("the session was closed; open another one", reason="SESSION_CLOSED")
        error, self._state.piece_error = self._state.piece_error, None
        if error is not None:
            raise error


def _pieces(content: Part | Message) -> Iterator[InputAppend]:
    """Yields the pieces of content. Divides long text and audio, which then do not need all of their credit at once."""
    if isinstance(content, Message):
        yield InputAppend(message=to_message(content))
    elif isinstance(content, str) and len(content) > _PIECE_CHARACTERS:
        for begin in range(0, len(content), _PIECE_CHARACTERS):
            yield InputAppend(part=to_part(content[begin : begin + _PIECE_CHARACTERS]))
    elif isinstance(content, AudioSamples) and content.samples.nbytes > _PIECE_BYTES:
        rows = max(1, _PIECE_BYTES // content.samples[:1].nbytes)
        for begin in range(0, len(content.samples), rows):
            part = AudioSamples(content.samples[begin : begin + rows], content.sample_rate_hz)
            yield InputAppend(part=to_part(part))
    else:
        yield InputAppend(part=to_part(content))
