"""Turns whose ends are detected in the audio that the client appends.

A `Listener` is a request that finds speech in the audio. `TurnDetector` runs listeners and reports where speech
starts and ends. `DetectedTurns` ends the turns accordingly.
"""

import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from copy import copy
from dataclasses import dataclass
from typing import NamedTuple

from stagemesh.common.errors import CancelledRequestError, InternalError, StagemeshError
from stagemesh.common.requests.turn_content import PromptInput, duration_s
from stagemesh.common.wire.tensors import read_inline
from stagemesh.connectors.packets import Packet
from stagemesh.orchestrator.request.output_record import NOT_RUNNING
from stagemesh.orchestrator.request.streamed_input import StreamedInput, packets_of
from stagemesh.orchestrator.session.settings import SessionSettings
from stagemesh.orchestrator.session.turn_input import HEARD_KINDS
from stagemesh.orchestrator.session.turn_requests import Answer, EndedRequest, RunningRequest, Spawn, Task, TurnRequests
from stagemesh.orchestrator.session.turns import Outbox, Turns
from stagemesh.v1 import orchestrator_pb2

_log = logging.getLogger(__name__)
_MAX_LISTENED_BYTES = 8 << 20
"""The size of the audio without speech after which another listener continues, in bytes."""
_HEARD_SILENCE_S = 5.0
"""The audio that is retained before speech has been found in it, in seconds."""


class Speech(NamedTuple):
    """The begin or the end of speech. `at_s` is its time in the audio of the session, in seconds."""

    begins: bool
    at_s: float


@dataclass(frozen=True)
class Listener:
    """A request that finds speech in audio which is streamed into it.

    `begins_s` is the time in the audio of the session at which the streamed audio begins, in seconds.
    """

    request: RunningRequest
    stream: StreamedInput
    begins_s: float

    async def events(self) -> AsyncGenerator[Speech]:
        """Yields the begins and the ends of speech. Raises the error of a failed request. Iterate within `aclosing`."""
        record = self.request.record
        record.expect(linger_s=0)
        async with aclosing(record.follow(next_positions={})) as events:
            async for event in events:
                output = orchestrator_pb2.GenerateResponse.FromString(event).output
                if output.HasField("tensor"):
                    for begins, at_s in read_inline(output.tensor).tolist():
                        yield Speech(bool(begins), self.begins_s + at_s)


class TurnDetector:
    """Listens to the audio of one turn after another.

    - `listen` starts the request of a listener.
    - `heard` is called for each begin and each end of speech.
    - `failed` is called if a listener ends although its audio has not ended, with its error or with None.
    """

    def __init__(
        self,
        *,
        listen: Callable[[StreamedInput], RunningRequest],
        heard: Callable[[Speech], None],
        failed: Callable[[StagemeshError | None], None],
        spawn: Spawn,
    ) -> None:
        self.speaks = False
        """Whether the audio so far ends within speech."""
        self._listen, self._heard, self._failed, self._spawn = listen, heard, failed, spawn
        self._listener: Listener | None = None
        self._task: Task | None = None

    @property
    def listens(self) -> bool:
        """Whether a listener runs."""
        return self._listener is not None

    def hear(self, packets: Sequence[Packet], *, at_s: float) -> None:
        """Passes further audio to the listener, and starts a listener if none runs.

        `at_s` is the time in the audio of the session at which the packets begin. Raises the error of a listener that
        cannot be started.
        """
        if self._listener is not None and not self.speaks and self._listener.stream.size_bytes > _MAX_LISTENED_BYTES:
            self.stop()
        if self._listener is None:
            # The turn's own input determines the credit.
            stream = StreamedInput()
            self._listener = Listener(self._listen(stream), stream, begins_s=at_s)
            self._task = self._spawn(self._follow(self._listener))
        for packet in packets:
            self._listener.stream.append(packet)

    def stop(self) -> None:
        """Stops the listener. The next audio starts another one. Idempotent."""
        if self._listener is not None and self._task is not None:
            self._listener.request.stop(CancelledRequestError("the session does not listen any longer"))
            self._task.cancel()
        self._listener = self._task = None

    def forget_speech(self) -> None:
        """Stops the listener, and begins the next turn without speech."""
        self.stop()
        self.speaks = False

    async def _follow(self, listener: Listener) -> None:
        error: StagemeshError | None = None
        try:
            async for speech in listener.events():
                # A listener that hears the audio of a turn again finds its speech again.
                if speech.begins != self.speaks:
                    self.speaks = speech.begins
                    self._heard(speech)
        except StagemeshError as exc:
            error = exc
        except Exception:  # noqa: BLE001
            _log.exception("a listener failed unexpectedly")
            error = InternalError("the orchestrator failed; its log has the details")
        if self._listener is listener:
            self._listener = self._task = None
            self._failed(error)


class DetectedTurns(Turns):
    """The turns of a session in whose audio a stage of the pipeline detects speech.

    The open turn ends where its speech ends. Later audio belongs to the next turn.
    """

    def __init__(
        self, settings: SessionSettings, runner: TurnRequests, outbox: Outbox, *, spawn: Spawn, max_bytes: int
    ) -> None:
        super().__init__(settings, runner, outbox, spawn=spawn, max_bytes=max_bytes)
        assert settings.detection is not None, "the settings must contain the options of the detection"
        self._detection = settings.detection
        self._detector = TurnDetector(listen=self._listen, heard=self._hear, failed=self._fail_detection, spawn=spawn)
        self._listeners = 0
        """The number of listeners that were started for the open turn."""
        self._due_s: float | None = None
        """The time in the audio at which the open turn ends, if it waits for the end of the former one."""
        self._failure: StagemeshError | None = None
        """The error of the open turn's listener, if the turn waits for the end of the former one."""

    def detach(self) -> None:
        self._detector.stop()
        super().detach()

    def append(self, piece: orchestrator_pb2.InputAppend) -> None:
        if self._failure is not None:
            raise copy(self._failure)
        super().append(piece)
        # A client may append silence for hours.
        is_silent = not self._detector.speaks and self._due_s is None
        if is_silent and self.input.audio_s - self.input.prompt.begins_s > 2 * _HEARD_SILENCE_S:
            self.input.prompt.drop_audio(until_s=self.input.audio_s - _HEARD_SILENCE_S)

    def proceed(self) -> None:
        super().proceed()
        if self.former_answer is None and self._failure is not None:
            self._fail_turn(self._failure)
        elif self.former_answer is None and self._due_s is not None:
            self._commit_detected(self._due_s)

    def _start_prompt(self) -> Answer:
        if not self._detection.detects_only:
            return super()._start_prompt()
        answer = Answer(self.number, EndedRequest())
        answer.is_over = True
        return answer

    def _listen_to(self, piece: orchestrator_pb2.InputAppend, packets: Sequence[Packet]) -> None:
        if piece.part.HasField("audio"):
            if not self._detector.listens:
                # The client has attached again. Speech may have begun before.
                self._hear_again(self.input.prompt)
            self._detector.hear(packets, at_s=self.input.audio_s)

    def _begin_turn(self, remaining: PromptInput | None) -> None:
        super()._begin_turn(remaining)
        self._due_s, self._failure, self._listeners = None, None, 0
        self._detector.forget_speech()

    def _stream_failed(self, error: StagemeshError) -> None:
        self._fail_turn(error)

    def _listen(self, stream: StreamedInput) -> RunningRequest:
        self._listeners += 1
        name = ".listen" if self._listeners == 1 else f".listen.{self._listeners}"
        return self._runner.listen(self._turn_request(stream, name=name), self._detection)

    def _hear(self, speech: Speech) -> None:
        """Called when speech begins or ends in the audio of the open turn."""
        detected = orchestrator_pb2.SpeechDetected(begins=speech.begins, at_s=speech.at_s)
        self._outbox.send(self.number, speech=detected)
        former, due_s = self.former_answer, self._due_s
        self._due_s = None
        if speech.begins:
            if due_s is None:
                self.input.prompt.drop_audio(until_s=speech.at_s)
            if former is not None and self._detection.interrupts:
                self._interrupt(former, detected=True)
        elif former is None:
            self._commit_detected(speech.at_s)
        else:
            self._due_s = speech.at_s

    def _commit_detected(self, at_s: float) -> None:
        """Commits the open turn with the audio until a time, and begins the next turn with the later audio.

        Streamed audio cannot be taken back, so that a streamed turn has all audio that was appended.
        """
        answer, remaining = self.answer, PromptInput(self.input.audio_s)
        if answer is None:
            remaining = self.input.prompt.split(at_s)
            answer = self._start_safely(self._start_prompt)
        committed = orchestrator_pb2.TurnCommitted(detected=True, audio_end_s=remaining.begins_s)
        self._commit(answer, committed, remaining=remaining)
        self._hear_again(remaining)

    def _hear_again(self, remaining: PromptInput) -> None:
        clock_s = remaining.begins_s
        for piece in remaining.pieces:
            if piece.part.HasField("audio"):
                self._detector.hear(packets_of(piece.part, kinds=HEARD_KINDS), at_s=clock_s)
            clock_s += duration_s(piece)

    def _fail_detection(self, error: StagemeshError | None) -> None:
        """Ends the open turn if its listener has failed, now or at the end of the former turn."""
        if error is None:
            return
        if error.reason == NOT_RUNNING:
            self._outbox.failed(error)
        elif self.former_answer is None:
            self._fail_turn(error)
        else:
            self._failure = copy(error)

    def _fail_turn(self, error: StagemeshError) -> None:
        """Commits the open turn, and ends it with an error."""
        answer = self.answer or self._failed_answer(error)
        self._relay.stop(answer)
        answer.request.stop(error)
        answer.is_over, answer.error = True, copy(error)
        committed = orchestrator_pb2.TurnCommitted(detected=True, audio_end_s=self.input.audio_s)
        self._commit(answer, committed)
