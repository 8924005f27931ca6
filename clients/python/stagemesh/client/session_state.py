"""The state of a session at its client: what was sent, what has arrived, and what waits for the program.

It knows neither gRPC nor a clock. A connection records the responses that arrive, and fetches the events to send.
"""

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from stagemesh.client.retries import RetryPolicy
from stagemesh.client.session_log import EventLog, PendingEvents
from stagemesh.client.session_turns import (
    ClientTranscript,
    Delivery,
    ReceivedTurn,
    SessionOpened,
    SpeechDetected,
    TurnCommitted,
    TurnEnded,
    TurnInterrupted,
    TurnTruncated,
)
from stagemesh.common.errors import ExistsError, StagemeshError
from stagemesh.common.wire.versions import refuse_unknown
from stagemesh.rpc.error_mapping import error_from_wire, error_to_wire
from stagemesh.v1 import orchestrator_pb2
from stagemesh.v1.orchestrator_pb2 import ConverseRequest, ConverseResponse

_READ_AHEAD = 64
"""The number of events that may wait for the program. More are received only while a call waits for a confirmation."""

_HEARD_SILENCE_S = 5.0
"""The audio without speech that is kept for another orchestrator, in seconds."""


class Restart(NamedTuple):
    """The reason to restore a session. `error` is the error because of which the next call waits, or None."""

    error: StagemeshError | None


class SessionState:
    """The state of a session. Drops responses that arrive again."""

    def __init__(self, opening: orchestrator_pb2.SessionOpen, policy: RetryPolicy) -> None:
        self._opening, self._policy = opening, policy
        self.opened: SessionOpened | None = None
        self.error: StagemeshError | None = None
        """The error that ended the session."""
        self.is_closed = False
        """Whether the session has ended without an error."""
        self.is_closing = False
        """Whether the program has closed the session."""
        self.restart: Restart | None = None
        """The reason why the orchestrator of the current call must forget the session, or None."""
        self.conditions: list[Callable[[], bool]] = []
        """The conditions on which methods wait, apart from readers of events."""
        self.committed = 0
        """The newest turn that was committed or has ended. The next one is the open turn."""
        self.turns: dict[int, ReceivedTurn] = {}
        """The turns that have not ended and that were committed or of which something has arrived, by number."""
        self.ended: ReceivedTurn | None = None
        """The newest turn that has ended."""
        self.log = EventLog()
        self.pending = PendingEvents()
        self.deliveries: deque[Delivery] = deque()
        self.piece_error: StagemeshError | None = None
        """The error of a rejected piece, until a method raises it."""
        is_streamed = opening.input_mode == orchestrator_pb2.INPUT_MODE_STREAM
        self._transcript = ClientTranscript(has_prompts=not (is_streamed or opening.turn_detection.detects_only))
        self._first: deque[ConverseRequest] = deque()
        """The events to send before those of the log: the earlier turns."""
        self._speech_s = -1.0
        """The time of the last detected begin or end of speech."""
        self._speaks = False
        """Whether speech began at that time."""
        self._handlers = {
            "opened": self._take_opened,
            "grant": self._take_grant,
            "rejected": self._take_rejected,
            "speech": self._take_speech,
            "committed": self._take_committed,
            "generated": self._take_generated,
            "interrupted": self._take_interrupted,
            "ended": self._take_ended,
            "truncated": self._take_truncated,
        }

    @property
    def has_ended(self) -> bool:
        """Whether the session has ended."""
        return self.is_closed or self.error is not None

    @property
    def may_read(self) -> bool:
        """Whether a further response may be received now."""
        return self._has_waiting or self.is_closing or len(self.deliveries) < _READ_AHEAD

    @property
    def needs_call(self) -> bool:
        """Whether something waits that needs a call to the orchestrator."""
        return self._has_waiting or self.is_closing or self.log.has_unsent

    @property
    def _has_waiting(self) -> bool:
        # A method whose condition is met may not have been resumed yet. It does not need anything further.
        return not all(condition() for condition in self.conditions)

    @property
    def newest(self) -> int:
        """The turn that is being answered, or else the newest one that was answered. 0 if there is none."""
        return min((turn.number for turn in self.turns.values() if not turn.is_stopped), default=self.committed)

    def known(self, turn: int) -> ReceivedTurn | None:
        """Returns a turn that has not ended, or the newest one that has ended. None for any other turn."""
        return self.ended if self.ended is not None and self.ended.number == turn else self.turns.get(turn)

    def begin_call(self, *, earlier_calls: int) -> ConverseRequest:
        """Returns the first event of a call."""
        self.restart = None
        self._first.clear()
        opening = orchestrator_pb2.SessionOpen()
        opening.CopyFrom(self._opening)
        opening.earlier_calls = earlier_calls
        opening.turn = self._ended_number + 1
        if opening.turn in self.turns:
            received = self.turns[opening.turn].position.request()
            opening.next_positions.extend(received.next_positions)
            opening.generation = received.generation
        return ConverseRequest(open=opening)

    def end_call(self) -> None:
        """Records that a call has ended. The orchestrator may continue without it."""
        self.log.is_attached = False
        for turn in self.turns.values():
            turn.position.note_lost()

    def next_event(self) -> ConverseRequest | None:
        """Returns the next event to send in the current call, or None if there is none now."""
        if self._first:
            return self._first.popleft()
        if self.is_closing and self.log.is_attached:
            # Events that were not sent are dropped.
            self.log.is_attached = False
            return _close_event(self.log.sent + 1)
        return self.log.next()

    def take(self, response: ConverseResponse) -> bool:
        """Records a response. Returns whether it has an event that has not arrived before.

        Raises UnsupportedError (UNKNOWN_KIND) if this client does not know its kind and must not ignore it, and the
        errors of `EventDecoder.decode`.
        """
        kind = response.WhichOneof("event")
        if kind is None:
            refuse_unknown(response, of="the orchestrator")
            return False
        before = len(self.deliveries)
        self._handlers[kind](response)
        return len(self.deliveries) > before

    def forget_silence(self) -> None:
        """Drops old audio in which no speech was detected, as the orchestrator does.

        A client may append silence for hours. Nothing is dropped without the detection of turns.
        """
        is_silent = self._opening.HasField("turn_detection") and not self._speaks and not self.turns
        if is_silent and self.log.kept_s > 2 * _HEARD_SILENCE_S:
            self.log.forget_audio(before_s=self.log.audio_s - _HEARD_SILENCE_S)

    def fail(self, error: StagemeshError) -> None:
        """Ends the session with an error. Does nothing if it has ended."""
        if not self.has_ended:
            self.error = error

    def drop_deliveries(self, turn: int) -> None:
        """Drops the events of the answer to a turn that the program has not read."""
        self.deliveries = deque(each for each in self.deliveries if each.turn != turn)

    def _take_opened(self, response: ConverseResponse) -> None:
        message = response.opened
        limit_bytes, accepted = message.input_limit_bytes, message.accepted_seq
        if self.opened is None:
            if accepted:
                raise ExistsError(
                    f"session {message.session_id!r} has events of another client; use another session_id",
                    reason="SESSION_EXISTS",
                )
            self._opening.parameters.seed = message.seed
            outputs = tuple(message.outputs)
            self.opened = SessionOpened(message.session_id, message.seed, outputs, message.transcript_output)
            self.deliveries.append(Delivery(response, self.opened))
        if message.is_known and accepted < self.log.accepted:
            # Another orchestrator has handled later events.
            self._restart(Restart(None), accepted)
        elif message.is_known:
            self.log.attach(limit_bytes=limit_bytes, accepted=accepted)
            self._end_clears()
        else:
            self._confirm_here()
            self._first.extend(self._transcript.events() if not self.is_closing else ())
            self.log.restart(limit_bytes=limit_bytes)

    def _confirm_here(self) -> None:
        """Confirms interruptions and truncations for an orchestrator that has not produced the answer."""
        interrupted = {event.interrupt.turn for event in self.pending.of_kind("interrupt")}
        output = self.opened.transcript_output if self.opened is not None else ""
        for number, turn in sorted(self.turns.items()):
            if turn.is_stopped or number in interrupted:
                self._stop(turn, ConverseResponse(turn=number, interrupted=orchestrator_pb2.TurnInterrupted()))
                ended = orchestrator_pb2.TurnEnded(answer=turn.text(output))
                self._take_ended(ConverseResponse(turn=number, ended=ended))
        sent = self.ended.received if self.ended is not None else dict[str, int]()
        for event in self.pending.of_kind("truncate"):
            positions = {each.name: each.position for each in event.truncate.positions}
            answer = self._transcript.shortened(positions, output=output, sent=sent)
            truncated = orchestrator_pb2.TurnTruncated(answer=answer)
            self._take_truncated(ConverseResponse(turn=event.truncate.turn, truncated=truncated))

    def _take_grant(self, response: ConverseResponse) -> None:
        self.log.grant(limit_bytes=response.grant.input_limit_bytes, accepted=response.grant.accepted_seq)
        self._end_clears()

    def _end_clears(self) -> None:
        """Confirms the clears that the session has handled."""
        for event in self.pending.of_kind("clear"):
            if event.seq <= self.log.accepted:
                self.log.clear(after=self._last_commit, before=event.seq)
                self.log.withdraw(event.seq)
                self.pending.resolve(event.seq, None)

    def _take_rejected(self, response: ConverseResponse) -> None:
        number, error = response.rejected.seq, error_from_wire(response.rejected.error)
        if number <= self._last_commit and self.log.has_content(number):
            self._take_rejected_restore(error)
            return
        self.log.grant(limit_bytes=0, accepted=number - 1)
        self._end_clears()
        if self.log.reject(number) is not None:
            self.piece_error = error
        self.pending.resolve(number, error)
        self.log.grant(limit_bytes=0, accepted=number)

    def _take_rejected_restore(self, error: StagemeshError) -> None:
        """Records that an orchestrator does not continue a turn which another one has committed."""
        turn = self.turns[min(self.turns)]
        if error.retry_after_s is None:
            output = self.opened.transcript_output if self.opened is not None else ""
            ended = orchestrator_pb2.TurnEnded(answer=turn.text(output), error=error_to_wire(error))
            self._take_ended(ConverseResponse(turn=turn.number, ended=ended))
        self._restart(Restart(error if error.retry_after_s is not None else None), self.log.sent)

    def _restart(self, restart: Restart, handled: int) -> None:
        """Asks the orchestrator to forget the session. `handled` is the last event that it has received."""
        if self.restart is None:
            self.restart, self.log.is_attached = restart, False
            self._first.clear()
            self._first.append(_close_event(handled + 1))

    def _take_speech(self, response: ConverseResponse) -> None:
        at_s = response.speech.at_s + self.log.restored_at_s
        if at_s > self._speech_s:
            self._speech_s, self._speaks = at_s, response.speech.begins
            if self._speaks and not self.turns:
                self.log.forget_audio(before_s=at_s - _HEARD_SILENCE_S)
            self.deliveries.append(Delivery(response, SpeechDetected(response.turn, response.speech.begins, at_s)))

    def _take_committed(self, response: ConverseResponse) -> None:
        number, detected = response.turn, response.committed.detected
        if number <= self.committed:
            return
        self.committed = number
        turn = self._turn(number)
        end_s = response.committed.audio_end_s + self.log.restored_at_s if detected else 0.0
        event = TurnCommitted(number, detected, end_s)
        self.deliveries.append(Delivery(response, event))
        commits = self.pending.of_kind("commit")
        if detected:
            turn.audio_end_s = end_s
        elif commits:
            turn.last_event = commits[0].seq
            self.pending.resolve(turn.last_event, event)

    def _take_generated(self, response: ConverseResponse) -> None:
        number = response.turn
        if number <= self._ended_number or (number > self.committed and self.pending.of_kind("clear")):
            return
        turn = self._turn(number)
        if not turn.is_stopped:
            self.deliveries.extend(turn.take(response))

    def _take_interrupted(self, response: ConverseResponse) -> None:
        if response.turn > self._ended_number:
            self._stop(self._turn(response.turn), response)

    def _stop(self, turn: ReceivedTurn, response: ConverseResponse) -> None:
        if turn.is_stopped:
            return
        turn.is_stopped = True
        self.drop_deliveries(turn.number)
        positions = {each.name: each.position for each in response.interrupted.positions} or turn.received
        event = TurnInterrupted(turn.number, response.interrupted.detected, positions)
        self.deliveries.append(Delivery(response, event))
        for sent in self.pending.of_kind("interrupt"):
            if sent.interrupt.turn in {0, turn.number}:
                # Streamed input that was not committed ends with the interruption.
                turn.last_event = turn.last_event or sent.seq
                self.log.withdraw(sent.seq)
                self.pending.resolve(sent.seq, event)

    def _take_ended(self, response: ConverseResponse) -> None:
        number, message = response.turn, response.ended
        if number <= self._ended_number:
            return
        turn = self.ended = self._turn(number)
        del self.turns[number]
        self.committed = max(self.committed, number)
        if turn.audio_end_s is not None:
            pieces = self.log.end_detected_turn(turn.audio_end_s)
        else:
            pieces = self.log.end_turn(turn.last_event)
        self._transcript.add(number, pieces, answer=message.answer)
        error = error_from_wire(message.error) if message.HasField("error") else None
        self.deliveries.append(Delivery(response, TurnEnded(number, message.answer, error)))

    def _take_truncated(self, response: ConverseResponse) -> None:
        if response.turn != self._ended_number:
            return
        self._transcript.answer = response.truncated.answer
        for sent in self.pending.of_kind("truncate")[:1]:
            event = TurnTruncated(response.turn, response.truncated.answer)
            self.deliveries.append(Delivery(response, event))
            self.log.withdraw(sent.seq)
            self.pending.resolve(sent.seq, event)

    @property
    def _ended_number(self) -> int:
        return self.ended.number if self.ended is not None else 0

    @property
    def _last_commit(self) -> int:
        """The number of the last event that has committed a turn which has not ended."""
        return max((turn.last_event for turn in self.turns.values()), default=0)

    def _turn(self, number: int) -> ReceivedTurn:
        if number not in self.turns:
            self.turns[number] = ReceivedTurn(number, self._policy)
        return self.turns[number]


def _close_event(number: int) -> ConverseRequest:
    return ConverseRequest(seq=number, close=orchestrator_pb2.SessionClose())
