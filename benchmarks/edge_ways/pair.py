"""A sender with its receivers, each in a separate process."""

from contextlib import ExitStack
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Generic, Self, TypeVar

from benchmarks.edge_ways.base import Receiver, Sender
from benchmarks.edge_ways.worker import End, Place, Worker, all_of

SenderT = TypeVar("SenderT", bound=Sender)
EndT = TypeVar("EndT", bound=End)
ReceiverT = TypeVar("ReceiverT", bound=Receiver)


class Pair(Generic[SenderT, ReceiverT]):
    """A way's processes. The constructor starts them, and `with` connects them or raises WorkerError."""

    def __init__(
        self,
        sender: type[SenderT],
        receiver: type[ReceiverT],
        *,
        places: tuple[Place, Place] = (Place(), Place()),
        receivers: int = 1,
    ) -> None:
        pipes = [Pipe() for _ in range(receivers)]
        nears, fars = [near for near, _ in pipes], [far for _, far in pipes]
        self._stack = ExitStack()
        self.sender = self._start(sender, nears, places[0])
        self.receivers = [self._start(receiver, [far], places[1]) for far in fars]
        for end in nears + fars:
            end.close()

    def __enter__(self) -> Self:
        with ExitStack() as failed:
            failed.push(self._stack)
            self.sender.ready()
            for receiver in self.receivers:
                receiver.ready()
            self._stack = failed.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def time(self, *, size_bytes: int, count: int) -> list[float]:
        """Returns the seconds from `send` until the last receiver has the tensor, for each message."""
        ends = [one.begin(Receiver.time_receives, size_bytes=size_bytes, count=count) for one in self.receivers]
        starts = self.sender.begin(Sender.time_sends, size_bytes=size_bytes, count=count)
        started, *in_hand = all_of([starts, *ends])
        return [(max(all_ends) - start) / 1e9 for start, *all_ends in zip(started, *in_hand, strict=True)]

    def time_copies(self, *, size_bytes: int, count: int) -> list[float]:
        """Returns the seconds of copies in the sender's memory: the baseline memcpy."""
        return self.sender.call(Sender.time_copies, size_bytes=size_bytes, count=count)

    def cpu_s(self) -> float:
        """Returns the processor time that all processes have used."""
        return self.sender.call(End.cpu_s) + sum(receiver.call(End.cpu_s) for receiver in self.receivers)

    def _start(self, end: type[EndT], peers: list[Connection], place: Place) -> Worker[EndT]:
        worker: Worker[EndT] = Worker(end, peers, place)
        self._stack.callback(worker.close)
        return worker
