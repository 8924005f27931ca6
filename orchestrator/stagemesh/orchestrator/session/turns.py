"""The turns of a session: the open turn, the turn that is being answered, and the transcript of ended turns."""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from copy import copy
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

from stagemesh.common.answer_text import shorten
from stagemesh.common.errors import (
    CancelledRequestError,
    InternalError,
    InvalidRequestError,
    NotFoundError,
    NotReadyError,
    OverloadedError,
    StagemeshError,
    UnsupportedError,
)
from stagemesh.common.output_position import OutputKey
from stagemesh.common.prompt_input import PromptInput, duration_s, size_of
from stagemesh.common.unknown_kinds import refuse_unknown
from stagemesh.connectors.edge import Packet
from stagemesh.orchestrator.request.output_record import MAX_LINGER_S, NOT_RUNNING
from stagemesh.orchestrator.request.streamed_input import StreamedInput, packets_of
from stagemesh.orchestrator.request.validation import SEEDS
from stagemesh.orchestrator.session.answer import Answer, FailedRequest, RunningRequest
from stagemesh.orchestrator.session.credit import Credit
from stagemesh.orchestrator.session.detection import TurnDetector
from stagemesh.orchestrator.session.listener import Speech
from stagemesh.orchestrator.session.session_call import SessionCall
from stagemesh.orchestrator.session.settings import SessionSettings
from stagemesh.orchestrator.session.tasks import Spawn, Task
from stagemesh.orchestrator.session.transcript import (
    Transcript,
    TranscriptTurn,
    restored_turn,
    serialize_messages,
)
from stagemesh.orchestrator.session.turn_requests import Runner, TurnRequest
from stagemesh.rpc.channels import MAX_MESSAGE_BYTES
from stagemesh.rpc.error_mapping import error_to_wire
from stagemesh.v1 import orchestrator_pb2, request_pb2

_log = logging.getLogger(__name__)

PROMPT_WINDOW_BYTES, STREAM_WINDOW_BYTES = 2 * MAX_MESSAGE_BYTES, 1 << 20
"""The input that may be ahead of the stages. A limit is raised at half of it, so that any piece fits sooner or later."""
_LARGEST_PROMPT_BYTES = MAX_MESSAGE_BYTES - (256 << 10)
"""The size of a prompt that fits into a message to a stage, together with the parameters of its request."""
_HEARD_SILENCE_S = 5.0
"""The audio that is retained before speech has been found in it, in seconds."""
_CLIENT = "the client"


class Outbox(Protocol):
    """Receives what the turns report. `Session` implements this protocol."""

    def send(self, turn: int, *, ends: bool = False, **event: Any) -> None:
        """Sends an event of a turn to the client. `ends` is whether no output of the turn may follow it."""

    def withdraw_end(self, turn: int) -> None:
        """Withdraws the events with which a turn has ended, because its end is sent again."""

    def consumed(self) -> None:
        """Called after stages have consumed a part of the input."""

    def turn_ended(self) -> None:
        """Called after a turn has ended."""

    def failed(self, error: StagemeshError) -> None:
        """Called if the session cannot continue at this orchestrator."""


@dataclass(frozen=True, slots=True)
class ClientPosition:
    """What a client has received when it attaches.

    `turn` is the oldest turn whose end it has not received, or 0 if it does not name one. `positions` are its positions
    in the outputs of this turn, which were made in `generation`.
    """

    turn: int = 0
    positions: Mapping[OutputKey, int] = field(default_factory=dict[OutputKey, int])
    generation: str = ""
    earlier_calls: int = 0


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
    was_interrupted: bool = False


class Turns:
    """The turns of one session. Turns are numbered from 1, and one of them is answered at a time.

    Methods that handle an event of the client raise an error if the event cannot be accepted, and then have no effect.
    """

    def __init__(
        self, settings: SessionSettings, runner: Runner, outbox: Outbox, *, spawn: Spawn, max_bytes: int
    ) -> None:
        self.number = 1
        """The number of the open turn."""
        self.answer: Answer | None = None
        """The answer to the turn that is being answered. In the mode STREAM, this can be the open turn."""
        self.credit = Credit(STREAM_WINDOW_BYTES if settings.streams else PROMPT_WINDOW_BYTES)
        self._settings, self._runner, self._outbox, self._spawn = settings, runner, outbox, spawn
        self._max_bytes = max_bytes if settings.streams else min(max_bytes, _LARGEST_PROMPT_BYTES)
        self._transcript = Transcript(settings.conversation)
        self._newest: EndedTurn | None = None
        self._replicas: Mapping[str, str] = {}
        self._input = PromptInput()
        """The input of the open turn in the mode PROMPT."""
        self._stream: StreamedInput | None = None
        """The input of the open turn in the mode STREAM. None before its first piece."""
        self._audio_s = 0.0
        """The duration of the audio that the client has appended in the session, in seconds."""
        self._client = ClientPosition()
        self._call: SessionCall | None = None
        self._linger_s = 0
        self._follower: Task | None = None
        self._due_s: float | None = None
        """The time in the audio at which the open turn ends, if it waits for the end of the former one."""
        self._failure: StagemeshError | None = None
        """The error of the detection in the open turn, which waits for the end of the former one."""
        self._listeners = 0
        """The number of listeners that were started for the open turn."""
        self._detector: TurnDetector | None = None
        if settings.detection is not None:
            self._detector = TurnDetector(
                listen=self._listen, heard=self._hear, failed=self._fail_detection, spawn=spawn
            )

    @property
    def is_idle(self) -> bool:
        """Whether no turn is being answered."""
        return self.answer is None

    # -- calls

    def attach(self, call: SessionCall, client: ClientPosition, *, linger_s: int) -> None:
        """Attaches a call of the client. Sends the newest answer again if the client lacks a part of it."""
        self._call, self._client, self._linger_s = call, client, min(linger_s, MAX_LINGER_S)
        newest = self._newest
        if self.answer is None and newest is not None and newest.turn == client.turn and not newest.was_interrupted:
            self._repeat(newest)

    def follow(self) -> None:
        """Sends the answer to the attached call, from the client's position on. Idempotent."""
        if self._call is not None and self.answer is not None and self._follower is None and not self.answer.is_over:
            is_known = self._client.turn == self.answer.turn
            positions = self._client.positions if is_known else {}
            self._follower = self._spawn(self._relay(self.answer, self._call, positions))

    def detach(self) -> None:
        """Detaches the call. The turn that is being answered continues for a while."""
        self._call = None
        self._stop_following()
        if self._detector is not None:
            self._detector.stop()
        if self.answer is not None and self.answer.request.ended.done() and not self.answer.is_over:
            self._note_over(self.answer, self.answer.request.record.timeline.error)

    def stop(self) -> RunningRequest | None:
        """Stops everything that runs, because the session ends. Returns the request that ends now, or None."""
        self.detach()
        answer, self.answer = self.answer, None
        if answer is None:
            return None
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
        self._check_size(turn.size_bytes)
        self._add_to_transcript(turn)
        self._newest = EndedTurn(event.turn, turn.answer, turn.answer, {output: len(turn.answer)}, was_interrupted=True)
        self.number += 1

    def append(self, piece: orchestrator_pb2.InputAppend) -> None:
        """Adds a piece to the input of the open turn."""
        if piece.WhichOneof("piece") is None:
            refuse_unknown(piece, of=_CLIENT)
            raise InvalidRequestError("a piece of input is empty; set its part or its message", reason="INVALID_PROMPT")
        if self._failure is not None:
            raise copy(self._failure)
        size_bytes = size_of(piece)
        self.credit.check(size_bytes)
        self._check_size(size_bytes)
        packets = self._packets_of(piece)
        if self._settings.streams:
            self._begin_stream()
        else:
            self._check_piece(piece)
        if self._detector is not None and piece.part.HasField("audio"):
            self._detector.hear(packets, at_s=self._audio_s)
        self._audio_s += duration_s(piece)
        if self._stream is None:
            self._input.append(piece)
            self.credit.add(size_bytes)
            self._forget_silence()
        else:
            self.credit.add(size_bytes, packet_bytes=sum(packet.size_bytes for packet in packets))
            for packet in packets:
                self._stream.append(packet)

    def clear(self) -> None:
        """Drops the input of the open turn. In the mode STREAM, the turn ends if its request runs."""
        if self.answer is not None and self.answer.turn == self.number:
            self._interrupt(self.answer, detected=False)
            return
        if self._stream is not None:
            self.credit.consume(self._stream.size_bytes)
        self._reset_input()

    def commit(self) -> None:
        """Ends the input of the open turn."""
        answer = self.answer
        if answer is not None and answer.turn != self.number:
            raise NotReadyError(
                f"turn {answer.turn} is being answered; wait for its end, or interrupt it", reason="TURN_RUNNING"
            )
        if answer is None and not self._input.pieces:
            raise NotReadyError(f"turn {self.number} has no input; append some before the commit", reason="EMPTY_TURN")
        self._commit(answer or self._start_prompt(), orchestrator_pb2.TurnCommitted())

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
        """Shortens the answer to the newest turn that has ended to what the user has heard."""
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
            if not self._settings.streams:
                self._add_to_transcript(replace(self._transcript.pop(), answer=heard))
        self._outbox.send(newest.turn, ends=True, truncated=orchestrator_pb2.TurnTruncated(answer=newest.heard))

    def proceed(self) -> None:
        """Begins to answer the open turn if its input has waited for the end of the former turn."""
        if self.answer is None and self._stream is not None:
            self.answer = self._start_safely(partial(self._start_stream, self._stream))
            self.follow()
        if self.answer is None and self._failure is not None:
            self._fail_turn(self._failure)
        elif self.answer is None and self._due_s is not None:
            self._commit_detected(self._due_s)

    # -- input

    def _check_size(self, size_bytes: int) -> None:
        """Raises OverloadedError (SESSION_TOO_LARGE) if the session would be too large with further bytes."""
        stream_bytes = self._stream.size_bytes if self._stream is not None else 0
        if self._transcript.size_bytes + self._input.size_bytes + stream_bytes + size_bytes > self._max_bytes:
            raise OverloadedError(
                f"the transcript and the input of turn {self.number} would have more than {self._max_bytes:,} bytes; "
                "commit or clear the turn, or open another session",
                reason="SESSION_TOO_LARGE",
            )

    def _packets_of(self, piece: orchestrator_pb2.InputAppend) -> Sequence[Packet]:
        """Returns the packets of a piece that is streamed or heard. Empty for any other piece."""
        if not self._settings.streams:
            is_heard = self._detector is not None and piece.part.HasField("audio")
            return packets_of(piece.part) if is_heard else ()
        if piece.WhichOneof("piece") == "message":
            raise UnsupportedError("messages cannot be streamed; append parts, or use the input mode PROMPT")
        packets, carried = packets_of(piece.part), self._settings.input_tensors
        for packet in packets:
            if not packet.tensors.keys() & carried:
                raise UnsupportedError(
                    f"no edge from @input carries {' and '.join(packet.tensors)}; append {' or '.join(sorted(carried))}"
                )
        return packets

    def _check_piece(self, piece: orchestrator_pb2.InputAppend) -> None:
        """Raises an error if the pipeline does not accept a part of the user's message. Its text needs no check."""
        if piece.WhichOneof("piece") == "part" and not piece.part.HasField("text"):
            request = self._request()
            request.input.conversation.messages.add(role=request_pb2.ROLE_USER, parts=[piece.part])
            self._runner.check(request)

    def _begin_stream(self) -> None:
        """Begins the input of the open turn, and its request unless the former turn is being answered."""
        answer = self.answer
        if answer is not None and answer.turn == self.number and answer.error is not None:
            raise copy(answer.error)
        if self._stream is None:
            stream = StreamedInput(self._consume)
            if answer is None:
                self.answer = self._start_stream(stream)
            self._stream = stream
            self.follow()

    def _consume(self, packet_bytes: int) -> None:
        self.credit.consume(packet_bytes)
        self._outbox.consumed()

    def _forget_silence(self) -> None:
        """Drops old audio in which no speech was found, because a client may append silence for hours."""
        if self._detector is None or self._detector.speaks or self._due_s is not None:
            return
        if self._audio_s - self._input.begins_s > 2 * _HEARD_SILENCE_S:
            self._input.drop_audio(until_s=self._audio_s - _HEARD_SILENCE_S)

    def _reset_input(self, remaining: PromptInput | None = None) -> None:
        self._input, self._stream = remaining or PromptInput(self._audio_s), None
        self._due_s, self._failure, self._listeners = None, None, 0
        if self._detector is not None:
            self._detector.forget_speech()

    # -- answers

    def _request(self, name: str = "") -> orchestrator_pb2.GenerateRequest:
        """Returns the request of the open turn, without its input. `name` is added to its id."""
        client, settings = self._client, self._settings
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
        messages = serialize_messages(self._input.messages())
        turn = self._turn_request()
        turn.message.input.conversation.CopyFrom(self._transcript.conversation(messages))
        return self._watched(Answer(self.number, self._runner.start(turn), messages=messages))

    def _start_stream(self, stream: StreamedInput) -> Answer:
        return self._watched(Answer(self.number, self._runner.start(self._turn_request(stream))))

    def _start_safely(self, start: Callable[[], Answer]) -> Answer:
        """Starts an answer for which no event of the client can be rejected. The answer fails if it cannot start."""
        try:
            return start()
        except StagemeshError as exc:
            return self._failed_answer(exc)

    def _failed_answer(self, error: StagemeshError) -> Answer:
        if self._stream is not None:
            self._stream.close()
        return Answer(self.number, FailedRequest(error), messages=serialize_messages(self._input.messages()))

    def _watched(self, answer: Answer) -> Answer:
        """Notes the end of an answer that no call follows."""

        def note_end(ended: object) -> None:  # noqa: ARG001
            if self.answer is answer and self._call is None and not answer.is_over:
                self._note_over(answer, answer.request.record.timeline.error)

        answer.request.ended.add_done_callback(note_end)
        return answer

    def _commit(
        self, answer: Answer, committed: orchestrator_pb2.TurnCommitted, *, remaining: PromptInput | None = None
    ) -> None:
        """Makes the open turn the turn that is being answered, and opens the next one with the remaining input."""
        answer.is_committed = True
        if self._stream is not None:
            self._stream.end()
        self.answer = answer
        self.number += 1
        self._reset_input(remaining)
        self._outbox.send(answer.turn, committed=committed)
        if answer.is_over:
            self._finish(answer)
        else:
            self.follow()

    async def _relay(self, answer: Answer, call: SessionCall, positions: Mapping[OutputKey, int]) -> None:
        error: StagemeshError | None = None
        try:
            async with aclosing(answer.follow(positions, linger_s=self._linger_s)) as events:
                async for event in events:
                    await call.send_generated(answer, event)
        except StagemeshError as exc:
            error = exc.with_traceback(None)
        except Exception:  # noqa: BLE001
            _log.exception("the answer to turn %d failed unexpectedly", answer.turn)
            error = InternalError("the orchestrator failed; its log has the details")
        self._follower = None
        self._note_over(answer, error)

    def _stop_following(self) -> None:
        if self._follower is not None:
            self._follower.cancel()
            self._follower = None
        if self._call is not None:
            self._call.drop_generated()

    def _note_over(self, answer: Answer, error: StagemeshError | None) -> None:
        if error is not None and error.reason == NOT_RUNNING:
            self._outbox.failed(error)
            return
        answer.is_over, answer.error = True, copy(error)
        if answer.is_committed:
            self._finish(answer)
        elif error is not None and self._detector is not None:
            self._fail_turn(error)

    def _finish(self, answer: Answer) -> None:
        text = answer.text(self._settings.transcript_output)
        self._end(answer, EndedTurn(answer.turn, text, text, answer.made_positions()))

    def _interrupt(self, answer: Answer, *, detected: bool) -> None:
        self._stop_following()
        sent, output = answer.sent_positions(), self._settings.transcript_output
        text = answer.text(output, length=sent.get(output, 0))
        answer.request.stop(CancelledRequestError(f"turn {answer.turn} was interrupted"))
        answer.error = None
        positions = [orchestrator_pb2.OutputPosition(name=name, position=count) for name, count in sent.items()]
        interrupted = orchestrator_pb2.TurnInterrupted(detected=detected, positions=positions)
        self._outbox.send(answer.turn, ends=True, interrupted=interrupted)
        self._end(answer, EndedTurn(answer.turn, text, text, sent, was_interrupted=True))

    def _end(self, answer: Answer, ended: EndedTurn) -> None:
        self._add_to_transcript(TranscriptTurn(answer.messages, ended.text))
        self._newest, self.answer = ended, None
        self._replicas = answer.replicas or self._replicas
        if answer.turn == self.number:
            self.number += 1
            self._reset_input()
        error = None if answer.error is None else error_to_wire(answer.error)
        self._outbox.send(ended.turn, ends=True, ended=orchestrator_pb2.TurnEnded(error=error, answer=ended.text))
        self._outbox.turn_ended()

    def _add_to_transcript(self, turn: TranscriptTurn) -> None:
        if not self._settings.streams:
            self._transcript.add(turn)

    def _repeat(self, newest: EndedTurn) -> None:
        """Answers the newest turn again, so that the client receives the part of the answer that it lacks."""
        request = self._runner.find(f"{self._settings.session_id}.{newest.turn}")
        self._outbox.withdraw_end(newest.turn)
        if request is not None:
            messages = b"" if self._settings.streams else self._transcript.pop().messages
            self.answer = Answer(newest.turn, request, messages=messages)
            self.answer.is_committed = True
            return
        error = None
        if any(self._client.positions.get((name, 0), 0) < sent for name, sent in newest.positions.items()):
            text = f"the outputs of turn {newest.turn} are not retained any longer; attach sooner"
            error = error_to_wire(NotFoundError(text, reason="UNKNOWN_REQUEST"))
        self._outbox.send(newest.turn, ends=True, ended=orchestrator_pb2.TurnEnded(error=error, answer=newest.heard))

    def _heard(self, newest: EndedTurn, positions: Sequence[orchestrator_pb2.OutputPosition]) -> str:
        """Returns the part of an answer that the user has heard.

        Raises InvalidRequestError (BEYOND_OUTPUT) if a position is beyond what was sent.
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
                return newest.text[: each.position]
        first = positions[0]
        share = first.position / newest.positions[first.name] if first.position else 0.0
        return shorten(newest.text, length=int(share * len(newest.text)))

    # -- detection of turns

    def _listen(self, stream: StreamedInput) -> RunningRequest:
        assert self._settings.detection is not None, "only such sessions listen"
        self._listeners += 1
        name = ".listen" if self._listeners == 1 else f".listen.{self._listeners}"
        return self._runner.listen(self._turn_request(stream, name=name), self._settings.detection)

    def _hear(self, speech: Speech) -> None:
        """Called when speech begins or ends in the audio of the open turn."""
        detected = orchestrator_pb2.SpeechDetected(begins=speech.begins, at_s=speech.at_s)
        self._outbox.send(self.number, speech=detected)
        former = self.answer if self.answer is not None and self.answer.turn != self.number else None
        self._due_s = None
        if not speech.begins:
            if former is None:
                self._commit_detected(speech.at_s)
            else:
                self._due_s = speech.at_s
            return
        self._input.drop_audio(until_s=speech.at_s)
        assert self._settings.detection is not None, "only such sessions hear"
        if former is not None and self._settings.detection.interrupts:
            self._interrupt(former, detected=True)

    def _commit_detected(self, at_s: float) -> None:
        """Commits the open turn with the audio until a time, and begins the next turn with the later audio."""
        answer, remaining = self.answer, PromptInput(self._audio_s)
        if answer is None:
            remaining = self._input.split(at_s)
            answer = self._start_safely(self._start_prompt)
        committed = orchestrator_pb2.TurnCommitted(detected=True, audio_end_s=remaining.begins_s)
        self._commit(answer, committed, remaining=remaining)
        clock_s = remaining.begins_s
        for piece in remaining.pieces:
            if self._detector is not None and piece.part.HasField("audio"):
                self._detector.hear(packets_of(piece.part), at_s=clock_s)
            clock_s += duration_s(piece)

    def _fail_detection(self, error: StagemeshError | None) -> None:
        """Ends the open turn if its listener has failed. If the former turn is being answered, waits for its end."""
        if error is not None and error.reason == NOT_RUNNING:
            self._outbox.failed(error)
        elif error is not None and (self.answer is None or self.answer.turn == self.number):
            self._fail_turn(error)
        else:
            self._failure = copy(error)

    def _fail_turn(self, error: StagemeshError) -> None:
        """Commits the open turn, and ends it with an error."""
        answer = self.answer or self._failed_answer(error)
        answer.request.stop(error)
        answer.is_over, answer.error = True, copy(error)
        committed = orchestrator_pb2.TurnCommitted(detected=True, audio_end_s=self._audio_s)
        self._commit(answer, committed)


def _ended(turn: int) -> NotReadyError:
    return NotReadyError(f"turn {turn} has ended; its answer cannot change any longer", reason="TURN_ENDED")


def _not_started(turn: int) -> NotReadyError:
    return NotReadyError(f"turn {turn} is not being answered yet; commit its input first", reason="TURN_NOT_STARTED")
