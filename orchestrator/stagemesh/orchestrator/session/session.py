"""One session: the calls of its client, the numbers of events, and the events that a client may have missed."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from typing import Any, NamedTuple

from stagemesh.common.errors import (
    InvalidRequestError,
    NotFoundError,
    NotReadyError,
    ReplacedError,
    StagemeshError,
    UnavailableError,
)
from stagemesh.common.requests.output_position import OutputKey
from stagemesh.common.wire.versions import refuse_unknown
from stagemesh.orchestrator.request.output_record import NOT_RUNNING, not_running
from stagemesh.orchestrator.session.answer_relay import ClientPosition, SessionCall, generated_response, response
from stagemesh.orchestrator.session.settings import SessionSettings
from stagemesh.orchestrator.session.turn_detection import DetectedTurns
from stagemesh.orchestrator.session.turn_requests import RunningRequest, Spawn, TurnRequests
from stagemesh.orchestrator.session.turns import Turns
from stagemesh.pipeline import Pipeline
from stagemesh.rpc.error_mapping import error_to_wire
from stagemesh.v1 import orchestrator_pb2

_MAX_EVENTS, _EARLIER_EVENTS = 256, 32
INTERRUPTED, ENDED = "interrupted", "ended"

RestOf = Callable[[int, Mapping[OutputKey, int]], Sequence[bytes] | None]
"""A function that returns the events of a turn's request after some positions, or None if they are not retained."""
MAX_SESSION_LINGER_S = 3600


class _Recent(NamedTuple):
    """A serialized event of a turn. `open_turn` is the turn that was open when it was sent."""

    data: bytes
    turn: int
    kind: str
    open_turn: int


class RecentEvents:
    """The events of the open turn and of the turn before it, apart from the events of their requests.

    Contains at most 256 of them, and earlier events if these are at most 32 altogether.
    """

    __slots__ = ("_events",)

    def __init__(self) -> None:
        # A deque would need a kilobyte of memory in each idle session.
        self._events: list[_Recent] = []

    def add(self, data: bytes, *, turn: int, kind: str, open_turn: int) -> None:
        """Adds an event, and drops earlier ones."""
        events = self._events
        while len(events) >= _MAX_EVENTS or (len(events) >= _EARLIER_EVENTS and events[0].open_turn < open_turn - 1):
            del events[0]
        events.append(_Recent(data, turn, kind, open_turn))

    def replay(self, client: ClientPosition, rest_of: RestOf) -> Iterator[bytes]:
        """Yields the serialized events that a client may have missed, in order.

        Before the end of a turn that the client has not received, yields the events of the turn's request after the
        client's position, unless the turn was interrupted.
        """
        missing, interrupted = client.turn, {event.turn for event in self._events if event.kind == INTERRUPTED}
        for event in self._events:
            data = event.data
            if event.kind == ENDED and 0 < missing <= event.turn and event.turn not in interrupted:
                positions = client.positions if event.turn == client.turn else dict[OutputKey, int]()
                rest = rest_of(event.turn, positions)
                if rest is None:
                    data = _without_outputs(event)
                for generated in rest or ():
                    yield generated_response(event.turn, generated)
            yield data


def _without_outputs(event: _Recent) -> bytes:
    """Returns the end of a turn with an error, because its outputs are not retained."""
    response = orchestrator_pb2.ConverseResponse.FromString(event.data)
    text = f"the outputs of turn {event.turn} are not retained any longer; attach sooner"
    response.ended.error.CopyFrom(error_to_wire(NotFoundError(text, reason="UNKNOWN_REQUEST")))
    return response.SerializeToString()


class Session:
    """One conversation with a client. At most one call is attached to it at a time.

    A client that attaches again may have missed events. Therefore the session sends the events of the last turns again,
    apart from outputs, which begin at the client's position.
    """

    def __init__(
        self,
        settings: SessionSettings,
        runner: TurnRequests,
        pipeline: Pipeline,
        *,
        spawn: Spawn,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings = settings
        self.linger_s = 0
        """For how many seconds the session continues without a call."""
        self.is_closed = False
        """Whether the client has closed the session."""
        self.changed_s = clock()
        """The time of the last event of the client, of the end of the last turn, or of the end of the last call."""
        self._park_s = pipeline.sessions.park_s
        self._clock = clock
        kind = Turns if settings.detection is None else DetectedTurns
        self._turns = kind(settings, runner, self, spawn=spawn, max_bytes=pipeline.limits.max_session_bytes)
        self._call: SessionCall | None = None
        self._accepted_seq = 0
        self._is_rebuilt = False
        """Whether an earlier call has opened the session elsewhere, and no event with a number has arrived here."""
        self._may_restore = False
        self._has_events = False
        """Whether an event with a number has arrived in the present call."""
        self._recent = RecentEvents()
        self._is_stopping = self._input_has_ended = False

    @property
    def is_attached(self) -> bool:
        """Whether a call is attached."""
        return self._call is not None

    @property
    def _is_idle(self) -> bool:
        return self._turns.answer is None

    # -- calls

    def attach(self, opening: orchestrator_pb2.SessionOpen, *, is_known: bool) -> SessionCall:
        """Attaches a call, which replaces the call that is attached. Returns the call.

        `is_known` is whether this is not the first call that is attached. Raises InvalidRequestError (INVALID_POSITION)
        if the client's position is within a character.
        """
        if (former := self._call) is not None:
            self.detach(former)
            former.end(ReplacedError("a later call attached to the session; end this one", reason="SESSION_REPLACED"))
        positions = {(each.name, each.index): each.position for each in opening.next_positions}
        client = ClientPosition(opening.turn, positions, opening.generation, opening.earlier_calls)
        missed = list(self._recent.replay(client, self._turns.rest_of))
        call = self._call = SessionCall()
        self.linger_s = min(opening.linger_s, MAX_SESSION_LINGER_S)
        self._is_rebuilt = not is_known and opening.earlier_calls > 0
        self._may_restore, self._has_events, self._input_has_ended = not is_known, False, False
        self.changed_s = self._clock()
        self._turns.attach(call, client, linger_s=self.linger_s)
        call.send(response(opened=self._opened(is_known=is_known)))
        for event in missed:
            call.send(event)
        if self._is_idle:
            self._turns.proceed()
        self._turns.follow()
        return call

    def detach(self, call: SessionCall) -> None:
        """Detaches a call that has ended. Does nothing if another call is attached."""
        if call is self._call:
            self._call = None
            self.changed_s = self._clock()
            self._turns.detach()

    def end_input(self, call: SessionCall) -> None:
        """Ends a call whose client sends no further events, after the turn that is being answered."""
        if call is self._call:
            self._input_has_ended = True
            self._end_call_when_idle()

    def park_if_idle(self) -> None:
        """Ends the call if the session has been idle for the time after which it parks."""
        idle_s = self._clock() - self.changed_s
        if self._call is not None and self._park_s and self._is_idle and idle_s >= self._park_s:
            self._call.end(
                UnavailableError(
                    f"the session was idle for {self._park_s:g} s; call again when there is an event to send",
                    reason="SESSION_PARKED",
                )
            )

    def drain(self) -> None:
        """Ends the call after the turn that is being answered, because the orchestrator stops."""
        self._is_stopping = True
        self._end_call_when_idle()

    def stop(self) -> RunningRequest | None:
        """Stops everything that runs, because the session ends. Returns the request that ends now, or None."""
        return self._turns.stop()

    # -- events of the client

    def handle(self, call: SessionCall, event: orchestrator_pb2.ConverseRequest) -> bool:
        """Handles an event. Returns False if it is rejected. Ignores events of a call that is not attached any longer.

        Raises InvalidRequestError (EVENT_GAP) if events are missing, and UnavailableError (NOT_RUNNING) if the
        orchestrator stops. Such an error ends the call.
        """
        if call is not self._call or (event.WhichOneof("event") not in ("open", "restore") and self._has(event.seq)):
            return True
        self.changed_s = self._clock()
        try:
            self._dispatch(event)
        except StagemeshError as exc:
            if exc.reason == NOT_RUNNING:
                raise
            rejected = orchestrator_pb2.EventRejected(seq=event.seq, error=error_to_wire(exc))
            self.send(0, rejected=rejected)
            return False
        return True

    def _has(self, seq: int) -> bool:
        """Returns whether the session has handled the event with this number. Otherwise, it handles it now."""
        if self._is_rebuilt and seq:
            self._is_rebuilt, self._accepted_seq = False, seq - 1
        if seq and seq <= self._accepted_seq:
            return True
        if seq != self._accepted_seq + 1:
            raise InvalidRequestError(
                f"event {seq} follows event {self._accepted_seq}; number the events from 1 without gaps",
                reason="EVENT_GAP",
            )
        self._accepted_seq, self._has_events, self._may_restore = seq, True, False
        return False

    def _dispatch(self, event: orchestrator_pb2.ConverseRequest) -> None:
        if self.is_closed:
            raise NotReadyError("the session was closed; open another one", reason="SESSION_CLOSED")
        match event.WhichOneof("event"):
            case "open":
                raise _not_open("the session is open already; send `open` once, as the first event of a call")
            case "restore":
                self._restore(event.restore)
            case "close":
                self._close()
                return
            case "append":
                self._turns.append(event.append)
            case "clear":
                self._turns.clear()
                self._turns.input.credit.raise_limit()
                self._send_grant()
            case "commit":
                self._turns.commit()
            case "interrupt":
                self._turns.interrupt(event.interrupt.turn)
            case "truncate":
                self._turns.truncate(event.truncate)
            case _:
                refuse_unknown(event, of="the client")
                raise InvalidRequestError("an event is empty; set its kind")
        self.consumed()

    def _restore(self, event: orchestrator_pb2.TurnRestore) -> None:
        if self._has_events:
            raise _not_open("turns are restored after other events; restore them directly after `open`")
        if not self._may_restore:
            raise NotReadyError(
                "the orchestrator knows the session and its turns; send only the events after accepted_seq",
                reason="INVALID_RESTORE",
            )
        self._turns.restore(event)

    def _close(self) -> None:
        self.is_closed = True
        if not self._is_idle:
            self._turns.interrupt(0)
        if self._call is not None:
            self._call.end()

    # -- events for the client

    def send(self, turn: int, **event: Any) -> None:
        data = response(turn, **event)
        self._recent.add(data, turn=turn, kind=next(iter(event)), open_turn=self._turns.number)
        if self._call is not None:
            self._call.send(data)

    def consumed(self) -> None:
        if self._turns.input.credit.raise_limit():
            self._send_grant()

    def _send_grant(self) -> None:
        if self._call is not None:
            grant = orchestrator_pb2.InputGrant(
                input_limit_bytes=self._turns.input.credit.limit_bytes, accepted_seq=self._accepted_seq
            )
            self._call.send(response(grant=grant))

    def turn_ended(self) -> None:
        if self._call is None:
            # A request without a call to follow it would run until its deadline.
            return
        self.changed_s = self._clock()
        if not (self.is_closed or self._is_stopping):
            self._turns.proceed()
        self._end_call_when_idle()

    def failed(self, error: StagemeshError) -> None:
        if self._call is not None:
            self._call.end(copy(error))

    def _end_call_when_idle(self) -> None:
        if self._call is None or not self._is_idle:
            return
        if self._is_stopping:
            self._call.end(not_running("the orchestrator stops; continue the session at another one"))
        elif self._input_has_ended:
            self._call.end()

    def _opened(self, *, is_known: bool) -> orchestrator_pb2.SessionOpened:
        settings, answer = self.settings, self._turns.answer
        return orchestrator_pb2.SessionOpened(
            session_id=settings.session_id,
            is_known=is_known,
            accepted_seq=self._accepted_seq,
            turn=self._turns.number,
            running_turn=answer.turn if answer is not None else 0,
            input_limit_bytes=self._turns.input.credit.limit_bytes,
            outputs=settings.request.outputs,
            seed=settings.seed,
            park_s=self._park_s,
            transcript_output=settings.transcript_output,
        )


def _not_open(message: str) -> NotReadyError:
    return NotReadyError(message, reason="SESSION_NOT_OPEN")
