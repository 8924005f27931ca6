"""The acceptances of tickets that a consumer has sent to a producer and that wait for an answer."""

import asyncio
import itertools
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass

from stagemesh.common.errors import StagemeshError, UnavailableError
from stagemesh.v1 import stage_pb2

_REPEAT_S = 2.0
"""The time in seconds without an answer after which an acceptance is sent again, because a message may be lost."""


@dataclass(frozen=True)
class _Acceptance:
    message: stage_pb2.AcceptTickets
    answer: asyncio.Future[None]


class TicketAcceptances:
    """Accepts leases on tickets at one incarnation of a producer. Use it on the event loop.

    If a connection ends before the answer, the acceptance is sent again over the next one.
    """

    def __init__(self, replica: str, wake: Callable[[], None]) -> None:
        """`replica` is the producer's name. `wake` is called when `take_unsent` has messages to return."""
        self._replica, self._wake = replica, wake
        self._waiting: dict[int, _Acceptance] = {}
        self._unsent: dict[int, stage_pb2.AcceptTickets] = {}
        self._numbers = itertools.count(1)
        self._is_lost = False

    async def accept(self, lease_id: int) -> None:
        """Asks the producer to keep the state of a lease. Returns when the producer has confirmed it.

        The caller must limit the time. Raises UnavailableError: TICKET_EXPIRED if the state has been released,
        TICKET_LOST if the producer has terminated.
        """
        if self._is_lost:
            raise self._lost_error()
        number = next(self._numbers)
        message = stage_pb2.AcceptTickets(lease_id=lease_id, acceptance=number)
        acceptance = _Acceptance(message, asyncio.get_running_loop().create_future())
        self._waiting[number] = acceptance
        try:
            while not acceptance.answer.done():
                self._unsent[number] = message
                self._wake()
                await asyncio.wait((acceptance.answer,), timeout=_REPEAT_S)
            if (error := acceptance.answer.exception()) is not None:
                # Raises a copy, because a raised error refers to frames, which refer to the future, and to the ticket.
                raise copy(error)
        finally:
            del self._waiting[number]
            self._unsent.pop(number, None)

    @property
    def has_unsent(self) -> bool:
        """Whether a message has not been sent."""
        return bool(self._unsent)

    def answered(self, number: int, error: StagemeshError | None) -> None:
        """Processes the producer's answer to an acceptance. `error` is None if the producer keeps the state.

        Ignores a repeated answer, and an answer that is not expected any more.
        """
        acceptance = self._waiting.get(number)
        if acceptance is None or acceptance.answer.done():
            return
        if error is None:
            acceptance.answer.set_result(None)
        else:
            acceptance.answer.set_exception(error)

    def send_again(self) -> None:
        """Makes all acceptances without an answer unsent again, because their answers may have been lost."""
        self._unsent = {number: each.message for number, each in self._waiting.items()}

    def take_unsent(self) -> list[stage_pb2.AcceptTickets]:
        """Removes and returns the messages that have not been sent."""
        unsent = list(self._unsent.values())
        self._unsent.clear()
        return unsent

    def lose(self) -> None:
        """Fails all acceptances with TICKET_LOST, because the producer has terminated. Idempotent."""
        self._is_lost = True
        for number in list(self._waiting):
            self.answered(number, self._lost_error())

    def _lost_error(self) -> UnavailableError:
        return UnavailableError(
            f"replica {self._replica}, which kept the state of the ticket, has terminated or restarted",
            reason="TICKET_LOST",
            metadata={"producer": self._replica},
        )
