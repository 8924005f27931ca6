"""The turns of a session: the open turn, the turn that is being answered, and the transcript of ended turns."""

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Protocol

from stagemesh.common.errors import CancelledRequestError, InvalidRequestError, NotReadyError, StagemeshError
from stagemesh.common.requests.output_position import OutputKey, text_until
from stagemesh.common.requests.turn_content import PromptInput, shorten
from stagemesh.common.wire.encoding import parse_message
from stagemesh.connectors.packets import Packet
from stagemesh.orchestrator.request.output_record import NOT_RUNNING
from stagemesh.orchestrator.request.streamed_input import StreamedInput
from stagemesh.orchestrator.request.validation import SEEDS
from stagemesh.orchestrator.session.answer_relay import AnswerRelay, ClientPosition, SessionCall
from stagemesh.orchestrator.session.settings import SessionSettings
from stagemesh.orchestrator.session.turn_input import TurnInput
from stagemesh.orchestrator.session.turn_requests import (
    Answer,
    EndedRequest,
    RunningRequest,
    Spawn,
    TurnRequest,
    TurnRequests,
)
from stagemesh.rpc.channels import MAX_FIELDS
from stagemesh.rpc.error_mapping import error_to_wire
from stagemesh.v1 import orchestrator_pb2, request_pb2


@dataclass(frozen=True, slots=True)
class TranscriptTurn:
    """A turn that has ended: the messages of its input, as a serialized Conversation, and its answer."""

    messages: bytes
    answer: str

    @property
    def size_bytes(self) -> int:
        """The number of bytes of the messages and the answer."""
        return len(self.messages) + len(self.answer.encode())


class Transcript:
    """The conversation of a session so far: the opening, and the turns that have ended.

    All messages are serialized, because a parsed message needs several times as much memory. Serialized messages of
    protobuf can be joined.
    """

    __slots__ = ("_opening", "_turns", "size_bytes")

    def __init__(self, opening: bytes = b"") -> None:
        """`opening` is the conversation before the first turn, serialized."""
        self._opening = opening
        self._turns: list[TranscriptTurn] = []
        self.size_bytes = len(self._opening)
        """The number of bytes of all messages."""

    def add(self, turn: TranscriptTurn) -> None:
        """Adds the newest turn."""
        self._turns.append(turn)
        self.size_bytes += turn.size_bytes

    def pop(self) -> TranscriptTurn:
        """Removes and returns the newest turn."""
        turn = self._turns.pop()
        self.size_bytes -= turn.size_bytes
        return turn

    def conversation(self, messages: bytes) -> request_pb2.Conversation:
        """Returns the conversation that ends with the messages of a further turn.

        Raises InvalidRequestError (MESSAGE_TOO_LARGE) if it has too many messages for a request.
        """
        answered = (turn.messages + _serialize_answer(turn.answer) for turn in self._turns)
        data = b"".join((self._opening, *answered, messages))
        return parse_message(request_pb2.Conversation, data, max_fields=MAX_FIELDS)


def serialize_messages(messages: Sequence[request_pb2.Message]) -> bytes:
    """Returns messages as a serialized Conversation."""
    return request_pb2.Conversation(messages=messages).SerializeToString()


def restored_turn(messages: Sequence[request_pb2.Message]) -> TranscriptTurn:
    """Returns the turn that consists of these messages. The last message is its answer if the model is its author."""
    last = messages[-1] if messages else request_pb2.Message()
    if last.role != request_pb2.ROLE_ASSISTANT or last.tool_calls or last.parts:
        return TranscriptTurn(serialize_messages(messages), "")
    return TranscriptTurn(serialize_messages(messages[:-1]), last.content)


def _serialize_answer(answer: str) -> bytes:
    # A message without text is added, too, because some chat templates reject two messages of the user in a row.
    return serialize_messages([request_pb2.Message(role=request_pb2.ROLE_ASSISTANT, content=answer)])


class Outbox(Protocol):
    """Receives the reports of the turns. `Session` implements this protocol."""

    def send(self, turn: int, **event: Any) -> None:
        """Sends an event of a turn to the client. The event's kind is the name of its only argument."""

    def consumed(self) -> None:
        """Called after stages have consumed a part of the input."""

    def turn_ended(self) -> None:
        """Called after a turn has ended."""

    def failed(self, error: StagemeshError) -> None:
        """Called if the session cannot continue at this orchestrator."""


@dataclass(frozen=True, slots=True)
class EndedTurn:
    """The newest turn that has ended.

    `text` is the text of its answer that was sent, and `heard` is the part of it in the transcript. `positions` are the
    amounts of all outputs that were sent.
    """

    turn: int
    text: str
    heard: str
    positions: Mapping[str, int]


class Turns:
    """The turns of one session. Turns are numbered from 1, and one of them is answered at a time.

    Methods that handle an event of the client raise an error if the event cannot be accepted, and then have no effect.
    """

    def __init__(
        self, settings: SessionSettings, runner: TurnRequests, outbox: Outbox, *, spawn: Spawn, max_bytes: int
    ) -> None:
        self.number = 1
        """The number of the open turn."""
        self.answer: Answer | None = None
        """The answer to the turn that is being answered. In the mode STREAM, this can be the open turn."""
        self.input = TurnInput(settings, max_bytes=max_bytes, consumed=outbox.consumed)
        """The input of the open turn."""
        self._settings, self._runner, self._outbox = settings, runner, outbox
        self._transcript = Transcript(settings.conversation)
        self._newest: EndedTurn | None = None
        self._replicas: Mapping[str, str] = {}
        self._relay = AnswerRelay(over=self._note_over, spawn=spawn)

    @property
    def former_answer(self) -> Answer | None:
        """The answer to the turn before the open one, or None if that turn has ended."""
        return self.answer if self.answer is not None and self.answer.turn != self.number else None

    # -- calls

    def attach(self, call: SessionCall, client: ClientPosition, *, linger_s: int) -> None:
        """Attaches a call of the client."""
        self._relay.attach(call, client, linger_s=linger_s)
        if self.answer is not None:
            # The request of the open turn may have ended before, and the client may lack some of its outputs.
            self.answer.is_over = False

    def rest_of(self, turn: int, positions: Mapping[OutputKey, int]) -> Sequence[bytes] | None:
        """Returns the events of the request of a turn that has ended, without what precedes the client's positions.

        Returns None if the client lacks outputs that are not retained any longer.
        """
        request = self._runner.find(f"{self._settings.session_id}.{turn}")
        if request is not None:
            return request.record.events_after(positions)
        sent = self._newest.positions if self._newest is not None and self._newest.turn == turn else None
        has_all = sent is not None and all(positions.get((name, 0), 0) >= count for name, count in sent.items())
        return () if has_all else None

    def follow(self) -> None:
        """Begins to send the answer to the attached call."""
        if self.answer is not None and not self.answer.is_over:
            self._relay.relay(self.answer)

    def detach(self) -> None:
        """Detaches the call. The turn that is being answered continues for a while."""
        self._relay.detach()

    def stop(self) -> RunningRequest | None:
        """Stops everything that runs, because the session ends. Returns the request that ends now, or None."""
        self.detach()
        # The session is freed by a garbage collection, which may be far in the future.
        self._transcript = Transcript()
        self.input.drop()
        answer, self.answer = self.answer, None
        if answer is None:
            return None
        self._relay.stop(answer)
        answer.request.record.dismiss()
        return answer.request

    # -- events of the client

    def restore(self, event: orchestrator_pb2.TurnRestore) -> None:
        """Adds an earlier turn. Raises NotReadyError (INVALID_RESTORE) if it is not the next one."""
        if event.turn != self.number:
            raise NotReadyError(
                f"turn {event.turn} is restored, but the next turn is {self.number}; restore each turn once, in order",
                reason="INVALID_RESTORE",
            )
        turn, output = restored_turn(event.messages), self._settings.transcript_output
        self.input.check_size(turn.size_bytes, transcript_bytes=self._transcript.size_bytes)
        self._add_to_transcript(turn)
        self._newest = EndedTurn(event.turn, turn.answer, turn.answer, {output: len(turn.answer.encode())})
        self.number += 1

    def append(self, piece: orchestrator_pb2.InputAppend) -> None:
        """Adds a piece to the input of the open turn."""
        packets = self.input.check(piece, transcript_bytes=self._transcript.size_bytes)
        if self._settings.streams:
            self._begin_stream()
        else:
            self._check_piece(piece)
        self._listen_to(piece, packets)
        self.input.add(piece, packets)

    def clear(self) -> None:
        """Drops the input of the open turn. In the mode STREAM, the turn ends if its request runs."""
        if self.answer is not None and self.answer.turn == self.number:
            self._interrupt(self.answer, detected=False)
        else:
            self.input.drop()
            self._begin_turn(None)

    def commit(self) -> None:
        """Ends the input of the open turn."""
        if self.former_answer is not None:
            raise NotReadyError(
                f"turn {self.number - 1} is being answered; wait for its end, or interrupt it", reason="TURN_RUNNING"
            )
        if self.input.is_empty:
            raise NotReadyError(f"turn {self.number} has no input; append some before the commit", reason="EMPTY_TURN")
        self._commit(self.answer or self._start_prompt(), orchestrator_pb2.TurnCommitted())

    def interrupt(self, turn: int) -> None:
        """Stops the answer to a turn. 0 means the turn that is being answered."""
        answer = self.answer
        if answer is not None and turn in (0, answer.turn):
            self._interrupt(answer, detected=False)
        elif turn >= self.number or (not turn and self._newest is None):
            raise _not_started(turn or self.number)
        else:
            raise _ended(turn or self.number - 1)

    def truncate(self, event: orchestrator_pb2.TurnTruncate) -> None:
        """Shortens the answer to the newest turn that has ended to the part that the user has heard."""
        newest = self._newest
        if self.answer is not None and event.turn == self.answer.turn:
            raise NotReadyError(
                f"turn {event.turn} is being answered; interrupt it before you truncate it", reason="TURN_RUNNING"
            )
        if event.turn >= self.number or newest is None:
            raise _not_started(event.turn)
        if event.turn < newest.turn:
            raise _ended(event.turn)
        heard = self._heard(newest, event.positions)
        if len(heard) < len(newest.heard):
            self._newest = newest = replace(newest, heard=heard)
            if self._settings.has_transcript:
                self._add_to_transcript(replace(self._transcript.pop(), answer=heard))
        self._outbox.send(newest.turn, truncated=orchestrator_pb2.TurnTruncated(answer=newest.heard))

    def proceed(self) -> None:
        """Begins to answer the open turn if its input has waited for the end of the former turn."""
        if self.answer is None and self.input.stream is not None:
            self.answer = self._start_safely(partial(self._start_stream, self.input.stream))
            self.follow()

    # -- for the detection of turns

    def _listen_to(self, piece: orchestrator_pb2.InputAppend, packets: Sequence[Packet]) -> None:
        """Called before a piece is added. Raises an error if it cannot be added."""

    def _begin_turn(self, remaining: PromptInput | None) -> None:
        """Begins the next turn with the pieces that remain of the former one."""
        self.input.begin_turn(remaining)

    def _stream_failed(self, error: StagemeshError) -> None:
        """Called if the request of the open turn has failed. The turn ends when the client commits it."""

    # -- starting

    def _check_piece(self, piece: orchestrator_pb2.InputAppend) -> None:
        """Raises an error if the pipeline does not accept a part of the user's message. Its text needs no check."""
        if piece.WhichOneof("piece") == "part" and not piece.part.HasField("text"):
            request = self._request()
            request.input.conversation.messages.add(role=request_pb2.ROLE_USER, parts=[piece.part])
            self._runner.check(request)

    def _begin_stream(self) -> None:
        """Begins the input of the open turn, and its request unless the former turn is being answered."""
        if self.answer is not None and self.answer.turn == self.number and self.answer.error is not None:
            raise copy(self.answer.error)
        if self.input.stream is None:
            stream = self.input.new_stream()
            if self.answer is None:
                self.answer = self._start_stream(stream)
            self.input.stream = stream
            self.follow()

    def _request(self, name: str = "") -> orchestrator_pb2.GenerateRequest:
        """Returns the request of the open turn, without its input. `name` is added to its id."""
        client, settings = self._relay.client, self._settings
        request = orchestrator_pb2.GenerateRequest()
        request.CopyFrom(settings.request)
        request.request_id = f"{settings.session_id}.{self.number}{name}"
        request.parameters.seed = (settings.seed + self.number - 1) % SEEDS
        request.earlier_calls = client.earlier_calls
        if client.turn == self.number and client.positions:
            request.generation = client.generation
        return request

    def _turn_request(self, stream: StreamedInput | None = None, *, name: str = "") -> TurnRequest:
        timeout_s = self._settings.turn_timeout_s
        return TurnRequest(self._request(name), stream, preferred=self._replicas, time_left_s=timeout_s)

    def _start_prompt(self) -> Answer:
        messages = serialize_messages(self.input.prompt.messages())
        turn = self._turn_request()
        turn.message.input.conversation.CopyFrom(self._transcript.conversation(messages))
        return Answer(self.number, self._runner.start(turn), messages=messages)

    def _start_stream(self, stream: StreamedInput) -> Answer:
        return Answer(self.number, self._runner.start(self._turn_request(stream)))

    def _start_safely(self, start: Callable[[], Answer]) -> Answer:
        """Starts an answer for which no event of the client can be rejected. The answer fails if it cannot start."""
        try:
            return start()
        except StagemeshError as exc:
            return self._failed_answer(exc)

    def _failed_answer(self, error: StagemeshError) -> Answer:
        if self.input.stream is not None:
            self.input.stream.close()
        messages = serialize_messages(self.input.prompt.messages())
        return Answer(self.number, EndedRequest(error), messages=messages)

    def _commit(
        self, answer: Answer, committed: orchestrator_pb2.TurnCommitted, *, remaining: PromptInput | None = None
    ) -> None:
        """Makes the open turn the turn that is being answered, and opens the next one with the remaining input."""
        answer.is_committed = True
        if self.input.stream is not None:
            self.input.stream.end()
        self.answer = answer
        self.number += 1
        self._begin_turn(remaining)
        self._outbox.send(answer.turn, committed=committed)
        if answer.is_over:
            self._finish(answer)
        else:
            self.follow()

    # -- ending

    def _note_over(self, answer: Answer, error: StagemeshError | None) -> None:
        if error is not None and error.reason == NOT_RUNNING:
            self._outbox.failed(error)
            return
        is_known = answer.error is not None
        answer.is_over, answer.error = True, copy(error)
        if answer.is_committed:
            self._finish(answer)
        elif error is not None and not is_known:
            self._stream_failed(error)

    def _finish(self, answer: Answer) -> None:
        text = answer.text(self._settings.transcript_output)
        self._end(answer, EndedTurn(answer.turn, text, text, answer.made_positions()))

    def _interrupt(self, answer: Answer, *, detected: bool) -> None:
        self._relay.stop(answer)
        sent, output = answer.sent_positions(), self._settings.transcript_output
        text = answer.text(output, length=sent.get(output, 0))
        answer.request.stop(CancelledRequestError(f"turn {answer.turn} was interrupted"))
        answer.error = None
        positions = [orchestrator_pb2.OutputPosition(name=name, position=count) for name, count in sent.items()]
        interrupted = orchestrator_pb2.TurnInterrupted(detected=detected, positions=positions)
        self._outbox.send(answer.turn, interrupted=interrupted)
        self._end(answer, EndedTurn(answer.turn, text, text, sent))

    def _end(self, answer: Answer, ended: EndedTurn) -> None:
        self._add_to_transcript(TranscriptTurn(answer.messages, ended.text))
        self._newest, self.answer = ended, None
        self._replicas = answer.replicas or self._replicas
        if answer.turn == self.number:
            self.number += 1
            self._begin_turn(None)
        error = None if answer.error is None else error_to_wire(answer.error)
        self._outbox.send(ended.turn, ended=orchestrator_pb2.TurnEnded(error=error, answer=ended.text))
        self._outbox.turn_ended()

    def _add_to_transcript(self, turn: TranscriptTurn) -> None:
        if self._settings.has_transcript:
            self._transcript.add(turn)

    def _heard(self, newest: EndedTurn, positions: Sequence[orchestrator_pb2.OutputPosition]) -> str:
        """Returns the part of an answer that the user has heard.

        Raises InvalidRequestError if a position is beyond the part that was sent (BEYOND_OUTPUT), or within a character
        of the text (INVALID_POSITION).
        """
        if not positions:
            raise InvalidRequestError("a truncation names no output; name at least one with its position")
        for each in positions:
            if each.position > (sent := newest.positions.get(each.name, 0)):
                raise InvalidRequestError(
                    f"output {each.name!r} of turn {newest.turn} is truncated at {each.position}, but {sent} were sent",
                    reason="BEYOND_OUTPUT",
                )
        for each in positions:
            if each.name == self._settings.transcript_output:
                return text_until(newest.text, each.position)
        first = positions[0]
        share = first.position / newest.positions[first.name] if first.position else 0.0
        return shorten(newest.text, length=int(share * len(newest.text)))


def _ended(turn: int) -> NotReadyError:
    return NotReadyError(f"turn {turn} has ended; its answer cannot change any longer", reason="TURN_ENDED")


def _not_started(turn: int) -> NotReadyError:
    return NotReadyError(f"turn {turn} is not being answered yet; commit its input first", reason="TURN_NOT_STARTED")
