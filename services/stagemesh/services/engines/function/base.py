"""The API that the function of a function stage implements."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from stagemesh.connectors.edge import Packet

State = TypeVar("State")


@dataclass(frozen=True)
class Call(Generic[State]):
    """The call of one request within a batch."""

    state: State
    packet: Packet | None
    """The input, without absent optional tensors. None in the last call of a request, so that the function can return
    remaining packets."""


class Function(Protocol[State]):
    """The interface of a function: a callable on batches of packets with a separate state for each request.

    Each function runs on its own thread.
    """

    def open(self, *, seed: int, options: Mapping[str, float]) -> State:
        """Returns the state of a new request. The engine deletes the state when the request ends."""
        ...

    def __call__(self, batch: Sequence[Call[State]]) -> Sequence[Sequence[Packet]]:
        """Processes a batch. Returns the output packets of each call, in the order of the calls.

        Must raise an error before it changes any state. The engine then retries the calls one by one, so that only the
        request that caused the error fails.
        """
        ...


class OpensWithout(ABC, Generic[State]):
    """The interface of a function that must know which optional tensors are absent when a request starts."""

    @abstractmethod
    def open_without(self, absent: frozenset[str], *, seed: int, options: Mapping[str, float]) -> State:
        """Returns the state of a new request. Called instead of `open`. `absent` may be empty."""
