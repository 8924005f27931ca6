"""The client's position in the events of a request, by which it receives each of them once."""

from collections import Counter
from collections.abc import Mapping, Sequence
from math import ceil

from stagemesh.client.event_decoder import EventDecoder
from stagemesh.client.responses import Admitted, Event, Finished, Progress, Queued
from stagemesh.client.retries import RetryPolicy
from stagemesh.common.output_position import Position
from stagemesh.v1 import orchestrator_pb2

_MAX_LINGER_S = 10


class ClientPosition:
    """The client's position in the events of a request.

    Removes repeated events, and builds the request that asks for the remaining events.
    """

    def __init__(self, request: orchestrator_pb2.GenerateRequest, policy: RetryPolicy) -> None:
        self._request = orchestrator_pb2.GenerateRequest()
        self._request.CopyFrom(request)
        self._request.linger_s = min(_MAX_LINGER_S, ceil(policy.reattach_s))
        self._received, self._decoder = Position(), EventDecoder()
        self._steps = Counter[tuple[str, int]]()
        self._admitted = False
        self._generation = ""
        """The generation in which the request runs."""
        self._replicas: Mapping[str, str] = {}
        """The replicas of the request by stage. Empty if it has not been admitted or has several choices."""
        self._admitted_call = 0
        """The number of calls before the one in which the request was admitted."""
        self._is_finished = False

    def request(self) -> orchestrator_pb2.GenerateRequest:
        """Returns the request to send with the next call, which asks for the outputs that are still missing."""
        del self._request.next_positions[:]
        for (name, index), position in self._received.counts.items():
            self._request.next_positions.add(name=name, index=index, position=position)
        if self._received.counts:
            self._request.generation = self._generation
        if self._request.earlier_calls > self._admitted_call and self._replicas:
            self._request.admitted_call = self._admitted_call
            self._request.preferred_replicas.clear()
            self._request.preferred_replicas.update(self._replicas)
        return self._request

    def note_lost(self) -> None:
        """Records that a call ended before its request ended. The call may have started the request."""
        self._request.earlier_calls += 1

    def take(self, response: orchestrator_pb2.GenerateResponse) -> Sequence[Event]:
        """Returns the events in `response` that the caller does not have yet. Empty if their kind is unknown."""
        rest = self.remainder(response)
        return () if rest is None else self.events(rest)

    def remainder(self, response: orchestrator_pb2.GenerateResponse) -> orchestrator_pb2.GenerateResponse | None:
        """Returns `response` without the part of an output that has arrived before. None if nothing remains."""
        if not response.HasField("output"):
            return response
        rest = self._received.remainder(response.output)
        if rest is None or rest is response.output:
            return None if rest is None else response
        return orchestrator_pb2.GenerateResponse(output=rest, ignorable=response.ignorable)

    def events(self, response: orchestrator_pb2.GenerateResponse) -> Sequence[Event]:
        """Returns the events in a response that `remainder` has returned, without those that arrived before."""
        if response.HasField("admitted"):
            self._generation, choices = response.admitted.generation, response.admitted.choices
            self._replicas = dict(choices[0].replicas) if len(choices) == 1 else {}
            self._admitted_call = self._request.earlier_calls
        return tuple(filter(self._is_new, self._decoder.decode(response)))

    def _is_new(self, event: Event) -> bool:
        match event:
            case Queued() | Admitted() if self._admitted:
                # The request is queued or placed again. The caller has already received its start.
                return False
            case Admitted():
                self._admitted = True
                self._request.parameters.seed = event.seed
            case Progress():
                key = event.stage, event.index
                is_new = not self._request.earlier_calls or event.steps > self._steps[key]
                if is_new:
                    self._steps[key] = event.steps
                return is_new
            case Finished():
                # An orchestrator repeats it if the connection broke after it.
                is_new, self._is_finished = not self._is_finished, True
                return is_new
            case _:
                pass
        return True
