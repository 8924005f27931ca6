"""The calls of a session to the orchestrators of its pipeline: when they begin, and what their ends mean."""

import grpc

from stagemesh.client.calls import BaseClient, CallSequence
from stagemesh.client.sessions.state import Restart, SessionState
from stagemesh.common.errors import InternalError, StagemeshError
from stagemesh.rpc.error_mapping import from_rpc_error
from stagemesh.v1.orchestrator_pb2 import ConverseRequest, ConverseResponse

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
        if self._attempts.answered and self._is_parked(failure):
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

    def _is_parked(self, failure: grpc.RpcError) -> bool:
        return from_rpc_error(failure, peer=self._client.endpoints[self.endpoint]).reason == _PARKED

    def _note_lost(self) -> None:
        self._earlier_calls += 1
