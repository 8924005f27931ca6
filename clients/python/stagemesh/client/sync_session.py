"""The session of a program without asyncio."""

import threading
from collections import deque
from collections.abc import Generator, Iterator, Mapping
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from typing import TYPE_CHECKING, Self, TypeVar

import grpc

from stagemesh.client.async_session import SessionCalls
from stagemesh.client.calls import request_span
from stagemesh.client.content import Message, Part
from stagemesh.client.session_methods import BaseSession, Steps
from stagemesh.client.session_turns import SessionEvent, TurnEnded, TurnInterrupted, TurnTruncated
from stagemesh.common.errors import StagemeshError
from stagemesh.v1.orchestrator_pb2 import ConverseRequest, ConverseResponse, SessionOpen

if TYPE_CHECKING:
    from stagemesh.client.clients import Client

_CLOSE_TIMEOUT_S = 1.0

T = TypeVar("T")


class Session(BaseSession):
    """A session: a conversation of numbered turns. Use it within `with`, which opens it and closes it.

    It is the counterpart of `AsyncSession` for programs without asyncio, and has the same methods. Several threads can
    share it, for example one that appends and one that iterates over the events.
    """

    def __init__(self, client: "Client", opening: SessionOpen) -> None:
        super().__init__(opening, client.retry_policy)
        self._client = client
        self._changed = threading.Condition()
        """The lock of the state, which is notified of each change."""
        self._thread: threading.Thread | None = None
        self._call_now: grpc.Call | None = None

    def append(self, *content: Part | Message) -> None:
        """Appends content to the input of the open turn, in the same way as `AsyncSession.append`."""
        for part in content:
            self._wait(self._methods.append(part))

    def clear(self) -> None:
        """Drops the input of the open turn."""
        self._wait(self._methods.clear())

    def commit(self) -> int:
        """Ends the input of the open turn, in the same way as `AsyncSession.commit`. Returns the number of the turn."""
        return self._wait(self._methods.commit())

    def interrupt(self, turn: int | None = None) -> TurnInterrupted:
        """Stops the answer to a turn, in the same way as `AsyncSession.interrupt`."""
        return self._wait(self._methods.interrupt(turn))

    def truncate(
        self, turn: int | None = None, *, audio_s: float | None = None, positions: Mapping[str, int] | None = None
    ) -> TurnTruncated:
        """Shortens the answer to a turn in the transcript, in the same way as `AsyncSession.truncate`."""
        return self._wait(self._methods.truncate(turn, audio_s=audio_s, positions=positions))

    def answer(self) -> Generator[SessionEvent]:
        """Yields the events up to the end of the turn that was committed last.

        Raises the error of the turn after its last event. Yields nothing if that end was read before.
        """
        turn = self._state.committed
        while self._methods.read_end < turn and (event := self._next()) is not None:
            yield event
            if isinstance(event, TurnEnded) and event.turn == turn and event.error is not None:
                raise event.error

    def __iter__(self) -> Generator[SessionEvent]:
        """Yields the events until the session is closed. Raises the error of the session."""
        while (event := self._next()) is not None:
            yield event

    def close(self) -> None:
        """Ends the session. A turn that is being answered is stopped. Idempotent."""
        self._client.sessions.discard(self)
        with self._changed:
            self._state.is_closing = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._thread is None or self._state.has_ended, timeout=_CLOSE_TIMEOUT_S)
            self._state.is_closed = self._state.error is None
            self._changed.notify_all()
            if self._call_now is not None:
                self._call_now.cancel()
        if self._thread is not None:
            self._thread.join()

    def __enter__(self) -> Self:
        if self._thread is not None:
            raise RuntimeError("a session can be opened only once; call `converse` again to open another one")
        self._client.sessions.add(self)
        self._thread = threading.Thread(
            # In the context of the caller, which has the caller's span.
            target=partial(copy_context().run, self._connect),
            name=f"session {self.session_id}",
            daemon=True,
        )
        self._thread.start()
        try:
            self._wait(self._methods.opened())
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _next(self) -> SessionEvent | None:
        while (delivery := self._wait(self._methods.next_delivery())) is not None:
            if delivery.event is not None:
                return delivery.event
        return None

    def _wait(self, steps: Steps[T]) -> T:
        """Runs a method that waits for the session."""
        with self._changed:
            try:
                while True:
                    condition = next(steps)
                    self._changed.notify_all()
                    self._changed.wait_for(condition)
            except StopIteration as stop:
                self._changed.notify_all()
                result: T = stop.value
                return result
            finally:
                steps.close()

    def _connect(self) -> None:
        """Calls the orchestrators until the session ends. Runs in a thread of its own."""
        with request_span("stagemesh.converse", {"stagemesh.session_id": self.session_id}) as self._headers:
            calls = SessionCalls(self._client, self._state)
            try:
                while not self._state.has_ended:
                    pause_s = self._call(calls)
                    with self._changed:
                        self._changed.notify_all()
                        if calls.is_parked:
                            self._changed.wait_for(lambda: self._state.has_ended or self._state.needs_call)
                        else:
                            self._changed.wait_for(lambda: self._state.has_ended, timeout=pause_s)
            except Exception as exc:  # noqa: BLE001 - the methods of the session raise it
                with self._changed:
                    calls.fail(exc)
            finally:
                with self._changed:
                    self._changed.notify_all()

    def _call(self, calls: SessionCalls) -> float:
        """Makes a call until it ends. Returns the number of seconds to wait before the next one."""
        over = threading.Event()
        with self._changed:
            opening = calls.begin()
            stub, events = self._client.stubs[calls.endpoint], self._events(opening, over)
            call = self._call_now = stub.Converse(events, metadata=self._headers)
        try:
            for response in call:
                with self._changed:
                    calls.take(response)
                    self._changed.notify_all()
                    self._changed.wait_for(lambda: self._state.has_ended or self._state.may_read)
        except grpc.RpcError as exc:
            with self._changed:
                return calls.end(exc)
        except StagemeshError:
            self._abandon(call, iter(call))
            raise
        else:
            with self._changed:
                return calls.end(None)
        finally:
            call.cancel()
            with self._changed:
                over.set()
                self._changed.notify_all()

    def _events(self, opening: ConverseRequest, over: threading.Event) -> Iterator[ConverseRequest]:
        """Yields the events to send until the call is over. Runs in a thread of gRPC."""
        yield opening
        while True:
            with self._changed:
                event = None
                while not over.is_set() and (event := self._state.next_event()) is None:
                    self._changed.wait()
                self._changed.notify_all()
            if event is None:
                return
            yield event

    def _abandon(self, call: grpc.Call, responses: Iterator[ConverseResponse]) -> None:
        """Closes a session at an orchestrator whose responses this client does not understand."""
        with self._changed:
            self._state.is_closing = True
            self._changed.notify_all()
        timer = threading.Timer(_CLOSE_TIMEOUT_S, call.cancel)
        timer.start()
        with suppress(grpc.RpcError):
            deque(responses, maxlen=0)
        timer.cancel()
