"""Deliveries that tamper with the events of a client, like a faulty orchestrator."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from enum import Enum

from stagemesh.client import Event, Text
from stagemesh.common.errors import InternalError
from tests.soak.delivery import Delivery
from tests.soak.workload import Request

PIECE = 3
"""The number of the piece that is changed. A piece is the content of one event."""


class Tampering(Enum):
    """The way in which one piece of one output of every request is changed."""

    NOTHING = "nothing"
    DUPLICATE = "duplicate"
    LOSE = "lose"
    SWAP = "swap"
    ALTER = "alter"
    END_EARLY = "end early"
    FAIL = "fail"


class TamperedDelivery(Delivery):
    """The delivery of a request one of whose outputs is changed."""

    def __init__(
        self, request: Request, units: Mapping[str, Sequence[bytes]], *, tampering: Tampering, output: str
    ) -> None:
        super().__init__(request, units)
        self._tampering, self._output = tampering, output
        self._seen, self._has_ended = 0, False
        self._held: list[Event] = []

    def add(self, event: Event) -> None:
        is_piece = getattr(event, "output", "") == self._output
        self._seen += is_piece
        changed = self._tampered(event) if is_piece and self._seen == PIECE else [event]
        if is_piece and self._seen > PIECE and self._held:
            changed.append(self._held.pop())
        for each in changed if not self._has_ended else ():
            super().add(each)

    def _tampered(self, event: Event) -> list[Event]:
        """Returns the events instead of one. Raises InternalError if the request must fail."""
        match self._tampering:
            case Tampering.DUPLICATE:
                return [event, event]
            case Tampering.LOSE:
                return []
            case Tampering.SWAP:
                self._held.append(event)
                return []
            case Tampering.ALTER:
                assert isinstance(event, Text)
                return [replace(event, delta=event.delta[:-1].swapcase() + event.delta[-1:])]
            case Tampering.END_EARLY:
                self._has_ended = True
                return []
            case Tampering.FAIL:
                raise InternalError("it was made to fail")
            case _:
                return [event]
