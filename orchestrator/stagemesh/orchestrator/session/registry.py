"""The sessions of an orchestrator: their limits, their end, and their lookup by id."""

import asyncio
import logging
import time
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import asynccontextmanager

from stagemesh.common.errors import ExistsError, OverloadedError
from stagemesh.orchestrator.request.output_record import not_running
from stagemesh.orchestrator.session.answer_relay import SessionCall
from stagemesh.orchestrator.session.session import Session
from stagemesh.orchestrator.session.settings import SessionSettings, read_settings
from stagemesh.orchestrator.session.turn_requests import Task, TurnRequests
from stagemesh.pipeline import Pipeline
from stagemesh.v1 import orchestrator_pb2

_log = logging.getLogger(__name__)

_TICK_S = 0.25
_RETRY_AFTER_S = 1.0


class SessionRegistry:
    """The sessions of one orchestrator, which are attached to a call or wait for one. Owns their tasks.

    Sessions can be opened only within `async with registry.running():`.
    """

    def __init__(
        self, pipeline: Pipeline, runner: TurnRequests, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._pipeline, self._runner, self._clock = pipeline, runner, clock
        self._sessions: dict[str, Session] = {}
        self._callers = Counter[str]()
        """The number of sessions of each caller."""
        self._ending: dict[str, asyncio.Future[None]] = {}
        """The ends of requests that have not been released yet, by the id of their session, which has ended."""
        self._group: asyncio.TaskGroup | None = None
        self._is_stopping = False

    def __len__(self) -> int:
        return len(self._sessions)

    @asynccontextmanager
    async def running(self) -> AsyncGenerator[None]:
        """Accepts sessions within the block. Call `drain` before the end of the block."""
        async with asyncio.TaskGroup() as group:
            self._group = group
            watching = group.create_task(self._watch(), name="watch sessions")
            try:
                yield
            finally:
                self._is_stopping = True
                watching.cancel()
                for session in list(self._sessions.values()):
                    self._end(session)

    async def open(self, opening: orchestrator_pb2.SessionOpen) -> tuple[Session, SessionCall]:
        """Opens a session, or attaches to the session with the same id and content. Returns it and the attached call.

        Call `leave` when the call has ended. Raises ExistsError (SESSION_EXISTS) if the session has other content,
        OverloadedError (SESSION_LIMIT) if there are too many sessions, and the errors of `read_settings`.
        """
        settings = read_settings(opening, self._pipeline)
        while (ending := self._ending.get(settings.session_id)) is not None:
            # The stages must release the request of a turn before another request has its id.
            await asyncio.wait([ending])
        if self._is_stopping or self._group is None:
            raise not_running()
        known = self._sessions.get(settings.session_id)
        if known is not None and known.is_closed:
            self._end(known)
            known = None
        if known is not None:
            _check_same(known.settings, settings, opening)
            return known, known.attach(opening, is_known=True)
        self._check_limits(opening.caller)
        session = Session(settings, self._runner, self._pipeline, spawn=self._spawn, clock=self._clock)
        self._sessions[settings.session_id] = session
        self._callers[opening.caller] += 1
        return session, session.attach(opening, is_known=False)

    def leave(self, session: Session, call: SessionCall) -> None:
        """Detaches a call that has ended. The session ends `linger_s` seconds later, or now if the client closed it."""
        session.detach(call)
        if not session.is_attached and (session.is_closed or not session.linger_s):
            self._end(session)

    def drain(self) -> None:
        """Ends the calls of idle sessions now, and the others at the ends of their turns. Rejects new calls."""
        self._is_stopping = True
        for session in self._sessions.values():
            session.drain()

    def _check_limits(self, caller: str) -> None:
        limits = self._pipeline.limits
        if len(self._sessions) >= limits.max_sessions:
            problem = f"the pipeline has {limits.max_sessions} sessions (limits.max_sessions)"
        elif self._callers[caller] >= limits.per_caller.max_sessions:
            problem = f"the caller has {limits.per_caller.max_sessions} sessions (limits.per_caller.max_sessions)"
        else:
            return
        raise OverloadedError(
            f"{problem}; close one, or try again later", reason="SESSION_LIMIT", retry_after_s=_RETRY_AFTER_S
        )

    async def _watch(self) -> None:
        """Parks idle sessions, and ends sessions whose client does not return in time."""
        while True:
            await asyncio.sleep(_TICK_S)
            for session in list(self._sessions.values()):
                if session.is_attached:
                    session.park_if_idle()
                elif self._clock() - session.changed_s >= session.linger_s:
                    self._end(session)

    def _end(self, session: Session) -> None:
        session_id, caller = session.settings.session_id, session.settings.request.caller
        if self._sessions.get(session_id) is not session:
            return
        del self._sessions[session_id]
        self._callers[caller] -= 1
        if not self._callers[caller]:
            del self._callers[caller]
        request = session.stop()
        if request is not None and not request.ended.done():
            self._ending[session_id] = request.ended
            request.ended.add_done_callback(lambda _: self._ending.pop(session_id, None))

    def _spawn(self, work: Coroutine[object, object, None]) -> Task:
        assert self._group is not None, "sessions are opened only while the registry runs"
        task = self._group.create_task(_run_logged(work))
        # A task that is cancelled before it begins never awaits its work.
        task.add_done_callback(lambda _: work.close())
        return task


async def _run_logged(work: Coroutine[object, object, None]) -> None:
    """Runs the work of one session. A defect in it must not end the other sessions."""
    try:
        await work
    except Exception:  # noqa: BLE001
        _log.exception("a task of a session failed unexpectedly")


def _check_same(known: SessionSettings, settings: SessionSettings, opening: orchestrator_pb2.SessionOpen) -> None:
    has_seed = opening.parameters.HasField("seed")
    if known.fingerprint != settings.fingerprint or (has_seed and settings.seed != known.seed):
        raise ExistsError(
            f"session {known.session_id!r} exists with other content; attach with the content that opened it, or use "
            "another session_id",
            reason="SESSION_EXISTS",
        )
