"""What the caller of one request has of it, whatever calls and orchestrators it came by. Knows no clock and no gRPC."""

from collections import Counter
from math import ceil

from stagemesh.client.events import Admitted, Event, Progress, Queued, decode_event
from stagemesh.client.retries import RetryPolicy
from stagemesh.common.output_position import Position
from stagemesh.v1 import orchestrator_pb2

_MAX_LINGER_S = 10


class ClientPosition:
    """Lets every event by once, and says what to send to hear the rest."""

    def __init__(self, request: orchestrator_pb2.GenerateRequest, policy: RetryPolicy) -> None:
        self._request = orchestrator_pb2.GenerateRequest()
        self._request.CopyFrom(request)
        self._request.linger_s = min(_MAX_LINGER_S, ceil(policy.reattach_s))
        self._received = Position()
        self._steps = Counter[str]()
        self._admitted = False

    def request(self) -> orchestrator_pb2.GenerateRequest:
        """What the next call is to send."""
        self._request.next_positions.update(self._received.counts)
        return self._request

    def note_lost(self) -> None:
        """The call that was made may have had the request run, and brings nothing more."""
        self._request.earlier_calls += 1

    def take(self, response: orchestrator_pb2.GenerateResponse) -> Event | None:
        """The event in `response`; None for one that the caller had, or of a kind that a newer server added."""
        event = decode_event(response)
        match event:
            case Queued() | Admitted() if self._admitted:
                # It waits or is placed again; for the caller it has begun.
                return None
            case Admitted():
                self._admitted = True
                self._request.parameters.seed = event.seed
            case Progress() if self._request.earlier_calls and event.steps <= self._steps[event.stage]:
                return None
            case Progress():
                self._steps[event.stage] = event.steps
            case _:
                pass
        if response.HasField("output"):
            self._received.advance(response.output)
        return event
