"""The interfaces that the function of a function stage implements."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from stagemesh.common.wire.tensors import Tensors, Value
from stagemesh.connectors.packets import Packet
from stagemesh.services.engines.prompts import Medium

State = TypeVar("State")


@dataclass(frozen=True)
class Call(Generic[State]):
    """One input of one request, with the request's state. A batch consists of calls."""

    state: State
    packet: Packet | None
    """The input packet, or None in the last call of a request.

    In the last call, the function can return remaining packets. If an optional tensor is absent in the request, the
    packet does not contain this tensor.
    """
    media: Sequence[Medium] = ()
    """The media of the client's prompt, if the function's signature accepts media. They are not decoded yet:
    `media_decoding` reads them. The packet contains the text of the prompt.
    """


class Function(Protocol[State]):
    """The interface of a function: a callable that processes batches of packets.

    A function has a separate state for each request. Each function runs on a thread of its own.
    """

    def open(self, *, seed: int, options: Mapping[str, Value]) -> State:
        """Returns the state of a new request. The engine deletes the state when the request ends.

        `options` contains the request's options, completed with the defaults.
        """
        ...

    def __call__(self, batch: Sequence[Call[State]]) -> Sequence[Sequence[Packet]]:
        """Processes a batch. Returns a list of output packets for each call, in the order of the calls.

        If the batch cannot be processed, the function must raise an exception before it changes any state. The engine
        then retries the calls one by one, so that only the request that caused the exception fails.
        """
        ...


class OpensWithout(ABC, Generic[State]):
    """The interface of a function that receives the names of the optional tensors that are absent from a request."""

    @abstractmethod
    def open_without(self, absent: frozenset[str], *, seed: int, options: Mapping[str, Value]) -> State:
        """Returns the state of a new request. Called instead of `open`.

        `absent` contains the names of the absent optional tensors. The set may be empty.
        """


class Saves(ABC, Generic[State]):
    """The interface of a function whose state can be saved and restored in another process.

    The engine saves the state of a request between two calls of the request. If the stage restarts, the restored state
    receives only the input rows that follow. Both methods run on the function's thread.
    """

    @abstractmethod
    def save(self, state: State) -> Tensors:
        """Returns the tensors that `restore` needs, by name. At most 6 MiB in total, or the state is not used.

        Later calls must not change these tensors.
        """

    @abstractmethod
    def restore(self, tensors: Tensors, *, seed: int, options: Mapping[str, Value]) -> State:
        """Returns the state that `save` has saved. Called instead of `open`.

        Raises KeyError, TypeError or ValueError if the function cannot have saved these tensors.
        """
