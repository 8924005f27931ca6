"""What a function stage is written as."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from stagemesh.connectors.edge import Packet

State = TypeVar("State")


@dataclass(frozen=True)
class Call(Generic[State]):
    """One request's part of a batch."""

    state: State
    packet: Packet | None
    """What came over the edges, without optional tensors that did not; None once, after the last, to flush."""


class Function(Protocol[State]):
    """A callable on batches of packets with state per request. Runs in one thread, off the event loop."""

    def open(self, *, seed: int, options: Mapping[str, float]) -> State:
        """The state of a new request; dropped at its end."""
        ...

    def __call__(self, batch: Sequence[Call[State]]) -> Sequence[Sequence[Packet]]:
        """For each call the packets that it makes, none or more, in order.

        Raises InvalidRequestError for the batch before it has changed any state; the engine then retries its calls
        one by one, so that only the guilty request fails.
        """
        ...


class OpensWithout(ABC, Generic[State]):
    """An ability of a function: it is told, when a request begins, which of its optional tensors will not come."""

    @abstractmethod
    def open_without(self, absent: frozenset[str], *, seed: int, options: Mapping[str, float]) -> State:
        """Called instead of `open`; nothing may be absent."""
