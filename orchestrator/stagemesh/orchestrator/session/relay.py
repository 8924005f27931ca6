"""Relays the events of an answer's request to the call of the client that is attached."""

import logging
from collections.abc import Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field

from stagemesh.common.errors import InternalError, StagemeshError
from stagemesh.common.output_position import OutputKey
from stagemesh.orchestrator.request.output_record import MAX_LINGER_S
from stagemesh.orchestrator.session.answer import Answer
from stagemesh.orchestrator.session.session_call import SessionCall
from stagemesh.orchestrator.session.tasks import Spawn, Task

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ClientPosition:
    """The position of a client when it attaches.

    `turn` is the oldest turn whose end it has not received, or 0 if it does not name one. `positions` are its positions
    in the outputs of this turn, which were made in `generation`.
    """

    turn: int = 0
    positions: Mapping[OutputKey, int] = field(default_factory=dict[OutputKey, int])
    generation: str = ""
    earlier_calls: int = 0


class AnswerRelay:
    """Relays one answer at a time while a call is attached.

    `over` is called with an answer and its error, or None, when the client has been sent everything, or when the
    request of an answer ends while no call is attached.
    """

    def __init__(self, *, over: Callable[[Answer, StagemeshError | None], None], spawn: Spawn) -> None:
        self.client = ClientPosition()
        """The position of the client when it attached."""
        self._over, self._spawn = over, spawn
        self._call: SessionCall | None = None
        self._linger_s = 0
        self._answer: Answer | None = None
        """The answer that is relayed when a call is attached."""
        self._task: Task | None = None

    def attach(self, call: SessionCall, client: ClientPosition, *, linger_s: int) -> None:
        """Attaches a call. An answer that is being given is relayed when `relay` is called."""
        self._call, self.client, self._linger_s = call, client, min(linger_s, MAX_LINGER_S)

    def detach(self) -> None:
        """Detaches the call. The request of the answer continues for a while."""
        self._stop_task()
        self._call, answer = None, self._answer
        if answer is not None and answer.request.ended.done():
            self._note_end(answer)

    def relay(self, answer: Answer) -> None:
        """Relays an answer from the client's position on, now or when a call is attached. Idempotent."""
        if self._answer is not answer:
            assert self._task is None, "the former answer is over"
            self._answer = answer
            answer.request.ended.add_done_callback(lambda _: self._note_end(answer))
        if self._call is not None and self._task is None:
            positions = self.client.positions if self.client.turn == answer.turn else dict[OutputKey, int]()
            self._task = self._spawn(self._run(answer, self._call, positions))

    def stop(self, answer: Answer) -> None:
        """Stops relaying an answer, and drops its events that were not sent yet."""
        self._stop_task()
        if self._call is not None:
            self._call.drop(answer)
        self._answer = None

    async def _run(self, answer: Answer, call: SessionCall, positions: Mapping[OutputKey, int]) -> None:
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
        self._answer = self._task = None
        self._over(answer, error)

    def _note_end(self, answer: Answer) -> None:
        if answer is self._answer and self._call is None:
            self._answer = None
            self._over(answer, answer.request.record.timeline.error)

    def _stop_task(self) -> None:
        if self._task is not None:
            self._task.cancel()
            self._task = None
