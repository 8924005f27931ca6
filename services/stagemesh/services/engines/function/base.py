"""The API of a function stage."""

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
    """The input, without optional tensors that are absent. None once, after the last input, to flush."""


class Function(Protocol[State]):
    """A callable on batches of packets with a state per request. Runs on a thread of its own."""

    def open(self, *, seed: int, options: Mapping[str, float]) -> State:
        """Returns the state of a new request. It is dropped when the request ends."""
        ...

    def __call__(self, batch: Sequence[Call[State]]) -> Sequence[Sequence[Packet]]:
        """Returns a sequence of packets for each call, in the order of the calls.

        Raises an error for the whole batch before it has changed any state; the engine then retries the calls one by
        one, so that only the request at fault fails.
        """
        ...


class OpensWithout(ABC, Generic[State]):
    """Implemented by a function that must know at a request's start which optional tensors are absent."""

    @abstractmethod
    def open_without(self, absent: frozenset[str], *, seed: int, options: Mapping[str, float]) -> State:
        """Called instead of `open`. `absent` may be empty."""
