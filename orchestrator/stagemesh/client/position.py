"""A client's record of the outputs that it has received for a request, over all calls and orchestrators.

This module does not depend on gRPC.
"""

from collections import Counter
from math import ceil

from stagemesh.client.events import Admitted, Event, Progress, Queued, decode_event
from stagemesh.client.retries import RetryPolicy
from stagemesh.common.output_position import Position
from stagemesh.v1 import orchestrator_pb2

_MAX_LINGER_S = 10


class ClientPosition:
    """Removes repeated events of a request, and builds the request that asks for the remaining events."""

    def __init__(self, request: orchestrator_pb2.GenerateRequest, policy: RetryPolicy) -> None:
        self._request = orchestrator_pb2.GenerateRequest()
        self._request.CopyFrom(request)
        self._request.linger_s = min(_MAX_LINGER_S, ceil(policy.reattach_s))
        self._received = Position()
        self._steps = Counter[str]()
        self._admitted = False

    def request(self) -> orchestrator_pb2.GenerateRequest:
        """Returns the request to send with the next call, which asks for the outputs that are still missing."""
        self._request.next_positions.update(self._received.counts)
        return self._request

    def note_lost(self) -> None:
        """Records that a call ended before the request did. The call may have started the request."""
        self._request.earlier_calls += 1

    def take(self, response: orchestrator_pb2.GenerateResponse) -> Event | None:
        """Returns the event in `response`, or None if the caller already has it or if its kind is unknown."""
        event = decode_event(response)
        match event:
            case Queued() | Admitted() if self._admitted:
                # The request is queued or placed again. The caller has already received its start.
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
