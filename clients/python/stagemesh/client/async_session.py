"""The session of an asyncio program, and its calls to the orchestrators."""

import asyncio
from collections.abc import AsyncGenerator, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Self, TypeVar

import grpc
import grpc.aio

from stagemesh.client.calls import BaseClient, CallSequence, request_span
from stagemesh.client.content import Message, Part
from stagemesh.client.session_methods import BaseSession, Steps
from stagemesh.client.session_state import Restart, SessionState
from stagemesh.client.session_turns import Delivery, SessionEvent, TurnEnded, TurnInterrupted, TurnTruncated
from stagemesh.common.errors import InternalError, StagemeshError
from stagemesh.common.notification import Notifier
from stagemesh.common.tasks import end_tasks
from stagemesh.rpc.error_mapping import from_rpc_error
from stagemesh.v1.orchestrator_pb2 import ConverseRequest, ConverseResponse, SessionOpen

if TYPE_CHECKING:
    from stagemesh.client.clients import AsyncClient


_PARKED = "SESSION_PARKED"


class SessionCalls(CallSequence):
    """The successive calls of a session."""

    def __init__(self, client: BaseClient, state: SessionState) -> None:
        super().__init__(client, timeout_s=None)
        self._state = state
        self._earlier_calls = 0
        self.is_parked = False
        """Whether the last call ended because the session was idle, so that the next one waits for an event."""

    def begin(self) -> ConverseRequest:
        """Starts a call, and returns its first event. Raises CancelledRequestError if the client is closed."""
        if self.is_parked:
            self._attempts.begin_search()
            self.is_parked = False
        self.begin_call()
        return self._state.begin_call(earlier_calls=self._earlier_calls)

    def take(self, response: ConverseResponse) -> None:
        """Records a response. Raises the errors of `SessionState.take`."""
        is_new = self._state.take(response)
        self._attempts.note_answer(is_new=is_new)

    def end(self, failure: grpc.RpcError | None) -> float:
        """Records the end of a call. Returns the number of seconds to wait before the next call.

        `failure` is the error with which the call ended, or None if it succeeded. Raises the error if a further call
        cannot help.
        """
        self._state.end_call()
        if failure is None:
            return self._end_well()
        error = from_rpc_error(failure, peer=self._client.endpoints[self.endpoint])
        if self._attempts.answered and error.reason == _PARKED:
            self.is_parked = True
            self._note_lost()
            return 0.0
        return self.pause_s(failure)

    def fail(self, exc: Exception) -> None:
        """Ends the session with the error of its connection."""
        if not isinstance(exc, StagemeshError):
            error = InternalError(f"the session failed unexpectedly: {exc!r}; report this as a defect")
            error.__cause__ = exc
            exc = error
        self._state.fail(exc)

    def _end_well(self) -> float:
        if self._state.restart is not None:
            return self._pause_before_restart(self._state.restart)
        if not self._state.is_closing:
            raise InternalError("the orchestrator ended a session that was not closed; report this as a defect")
        self._state.is_closed = True
        return 0.0

    def _pause_before_restart(self, restart: Restart) -> float:
        self._note_lost()
        if restart.error is None:
            return 0.0
        pause_s = self._attempts.pause_s(restart.error, broken=True)
        if pause_s is None:
            raise restart.error
        self._next_endpoint = (self.endpoint + 1) % len(self._client.endpoints)
        return max(pause_s, restart.error.retry_after_s or 0.0)

    def _note_lost(self) -> None:
        self._earlier_calls += 1


_CLOSE_TIMEOUT_S = 1.0

T = TypeVar("T")
_Call = grpc.aio.StreamStreamCall[ConverseRequest, ConverseResponse]


class AsyncSession(BaseSession):
    """A session: a conversation of numbered turns. Use it within `async with`, which opens it and closes it.

    A program appends the input of a turn, commits it, and iterates over the events of the session. It may append the
    next turn while a turn is answered, from another task. If the connection breaks, or if the orchestrator stops, the
    session continues at the same or another orchestrator, and the program receives every event exactly once.

    Methods raise the error of their event if the session rejects it. A session remains usable after such an error.
    `append` does not wait for an answer, so that the next method raises the error of a rejected piece.
    """

    def __init__(self, client: "AsyncClient", opening: SessionOpen) -> None:
        super().__init__(opening, client.retry_policy)
        self._client = client
        self._changed = Notifier()
        self._task: asyncio.Task[None] | None = None

    async def append(self, *content: Part | Message) -> None:
        """Appends text, audio samples, media files or messages to the input of the open turn.

        Consecutive texts are joined, and so are consecutive audio samples. Waits until the session accepts more input.
        Raises InvalidRequestError if a piece cannot be sent.
        """
        for part in content:
            await self._wait(self._methods.append(part))

    async def clear(self) -> None:
        """Drops the input of the open turn."""
        await self._wait(self._methods.clear())

    async def commit(self) -> int:
        """Ends the input of the open turn, so that the pipeline answers it. Returns the number of the turn.

        Raises NotReadyError if the turn has no input (EMPTY_TURN), or while the former turn is answered (TURN_RUNNING).
        """
        return await self._wait(self._methods.commit())

    async def interrupt(self, turn: int | None = None) -> TurnInterrupted:
        """Stops the answer to a turn, by default the one that is being answered.

        Returns when the session has confirmed it. No event of the answer follows. Raises NotReadyError (TURN_ENDED or
        TURN_NOT_STARTED) if the turn is not being answered.
        """
        return await self._wait(self._methods.interrupt(turn))

    async def truncate(
        self, turn: int | None = None, *, audio_s: float | None = None, positions: Mapping[str, int] | None = None
    ) -> TurnTruncated:
        """Shortens the answer to a turn in the transcript to what the user has heard. Later turns contain only that.

        - `turn` is the newest turn that was answered. It is the default.
        - `audio_s` is the playing time of the heard audio in seconds.
        - `positions` is how much of each output was heard, by name: bytes of a text in UTF-8, samples of an audio. By
          default, it is what the program has received by iteration.

        Raises NotReadyError for any other turn, and InvalidRequestError (BEYOND_OUTPUT) for more than was sent.
        """
        return await self._wait(self._methods.truncate(turn, audio_s=audio_s, positions=positions))

    async def answer(self) -> AsyncGenerator[SessionEvent]:
        """Yields the events up to the end of the turn that was committed last.

        Raises the error of the turn after its last event. Yields nothing if that end was read before.
        """
        turn = self._state.committed
        while self._methods.read_end < turn and (event := await self._next()) is not None:
            yield event
            if isinstance(event, TurnEnded) and event.turn == turn and event.error is not None:
                raise event.error

    async def __aiter__(self) -> AsyncGenerator[SessionEvent]:
        """Yields the events until the session is closed. Raises the error of the session."""
        while (event := await self._next()) is not None:
            yield event

    async def next_delivery(self) -> Delivery | None:
        """Returns the next event with the response that contained it, or None when the session is closed.

        A delivery without an event is a part of an event. Raises the error of the session.
        """
        return await self._wait(self._methods.next_delivery())

    async def close(self) -> None:
        """Ends the session. A turn that is being answered is stopped. Idempotent."""
        self._client.sessions.discard(self)
        if self._task is None:
            return
        self._state.is_closing = True
        self._changed.fire()
        await asyncio.wait([self._task], timeout=_CLOSE_TIMEOUT_S)
        await end_tasks([self._task])
        self._state.is_closed = self._state.error is None
        self._changed.fire()

    async def __aenter__(self) -> Self:
        if self._task is not None:
            raise RuntimeError("a session can be opened only once; call `converse` again to open another one")
        self._client.sessions.add(self)
        self._task = asyncio.create_task(self._connect())
        try:
            await self._wait(self._methods.opened())
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _next(self) -> SessionEvent | None:
        while (delivery := await self.next_delivery()) is not None:
            if delivery.event is not None:
                return delivery.event
        return None

    async def _wait(self, steps: Steps[T]) -> T:
        """Runs a method that waits for the session."""
        try:
            while True:
                condition = next(steps)
                self._changed.fire()
                while not condition():
                    await self._changed.wait()
        except StopIteration as stop:
            self._changed.fire()
            result: T = stop.value
            return result
        finally:
            steps.close()

    async def _connect(self) -> None:
        """Calls the orchestrators until the session ends."""
        with request_span("stagemesh.converse", {"stagemesh.session_id": self.session_id}) as self._headers:
            calls = SessionCalls(self._client, self._state)
            try:
                while not self._state.is_closed:
                    pause_s = await self._call(calls)
                    self._changed.fire()
                    while calls.is_parked and not self._state.needs_call:
                        await self._changed.wait()
                    await asyncio.sleep(pause_s)
            except Exception as exc:  # noqa: BLE001 - the methods of the session raise it
                calls.fail(exc)
            finally:
                self._changed.fire()

    async def _call(self, calls: SessionCalls) -> float:
        """Makes a call until it ends. Returns the number of seconds to wait before the next one."""
        opening = calls.begin()
        call = self._client.stubs[calls.endpoint].Converse(metadata=self._headers)
        writing = asyncio.create_task(self._write(call, opening))
        try:
            async for response in call:
                calls.take(response)
                self._changed.fire()
                while not self._state.may_read:
                    await self._changed.wait()
        except grpc.aio.AioRpcError as exc:
            return calls.end(_ended(exc))
        except StagemeshError:
            await self._abandon(call)
            raise
        else:
            return calls.end(None)
        finally:
            call.cancel()
            await end_tasks([writing])

    async def _write(self, call: _Call, opening: ConverseRequest) -> None:
        # The reader of the call receives its error.
        with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await call.write(opening)
            while True:
                event = self._state.next_event()
                if event is not None:
                    await call.write(event)
                    self._changed.fire()
                else:
                    await self._changed.wait()

    async def _abandon(self, call: _Call) -> None:
        """Closes a session at an orchestrator whose responses this client does not understand."""
        self._state.is_closing = True
        self._changed.fire()
        with suppress(grpc.aio.AioRpcError, TimeoutError):
            async with asyncio.timeout(_CLOSE_TIMEOUT_S):
                async for _ in call:
                    pass


def _ended(failure: grpc.aio.AioRpcError) -> grpc.aio.AioRpcError:
    """Returns the failure of a call.

    grpc.aio replaces the status of a call by INTERNAL if the call ends while an event is written. The cause is usually
    a broken connection. Otherwise, the next call fails with the same status.
    """
    metadata = failure.trailing_metadata()
    if failure.code() is not grpc.StatusCode.INTERNAL or metadata:
        return failure
    text = "the call ended while an event was sent"
    return grpc.aio.AioRpcError(grpc.StatusCode.UNAVAILABLE, failure.initial_metadata(), metadata, text)
