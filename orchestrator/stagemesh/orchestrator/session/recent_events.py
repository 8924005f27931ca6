"""The events of the last turns, which a client that attaches again may have missed."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from stagemesh.common.errors import NotFoundError
from stagemesh.common.output_position import OutputKey
from stagemesh.orchestrator.session.relay import ClientPosition
from stagemesh.orchestrator.session.responses import generated_response
from stagemesh.rpc.error_mapping import error_to_wire
from stagemesh.v1 import orchestrator_pb2

_MAX_EVENTS, _EARLIER_EVENTS = 256, 32
INTERRUPTED, ENDED = "interrupted", "ended"

RestOf = Callable[[int, Mapping[OutputKey, int]], Sequence[bytes] | None]
"""A function that returns the events of a turn's request after some positions, or None if they are not retained."""


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
