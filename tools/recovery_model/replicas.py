"""A model of the replicas that run one request, as immutable states. They follow docs/protocol.md.

Each row is one chunk. A process that crashes restarts at once, and knows nothing.
"""

from collections.abc import Iterator
from typing import NamedTuple, TypeAlias, TypeVar

from stagemesh.common.errors import ExistsError, NotFoundError, NotReadyError, StaleAttemptError
from stagemesh.pipeline import Route

T = TypeVar("T")
Flow: TypeAlias = tuple[int, int]
"""The process at the other end of an edge, and the flow's attempt."""


class ViolationError(Exception):
    """A state breaks an invariant."""


class End(NamedTuple):
    """A step's end of an edge."""

    peer: int
    attempt: int
    opened: tuple[int, int] = (0, 0)
    """The incarnation and the attempt of the peer with which chunks were exchanged."""
    chunks: int = 0
    """The number of chunks that have arrived in this attempt of the flow. The end of the flow is one of them."""
    rows: int = 0
    """The number of rows that the consumer has received in all attempts."""
    state: str = ""
    """"ended" if an end has arrived at the consumer. "delivered" or "committed" at the producer."""


class Call(NamedTuple):
    """The content of ExecuteStep."""

    attempt: int
    begins: int
    flows: tuple[Flow | None, ...]
    """The flows of the step by the edge's number. None for other edges, and for edges to finished consumers."""


class Step(NamedTuple):
    """An attempt of a stage at a replica."""

    call: Call
    made: int
    ends: tuple[End | None, ...]
    """The ends of the step's edges by the edge's number."""
    end: str = ""
    """How the step ended: "finished", "failed" or "cancelled"."""
    lowest: int = 0
    """The lowest attempt in which the edges may be rebound."""


class Process(NamedTuple):
    """A replica of a stage."""

    incarnation: int = 1
    highest: int = 0
    step: Step | None = None


Processes: TypeAlias = tuple[Process, ...]


class Rebinding(NamedTuple):
    """The content of RebindStep, for incoming or for outgoing edges."""

    attempt: int
    ends: tuple[tuple[int, End, int], ...]
    """The number, the binding and the first row of each edge."""


def put(items: tuple[T, ...], index: int, item: T) -> tuple[T, ...]:
    """Returns `items` with another item at one index."""
    return (*items[:index], item, *items[index + 1 :])


class Replicas:
    """The rules of a route's replicas. Each stage has the same number of replicas, which its attempts use in turn."""

    def __init__(self, route: Route, *, rows: int = 2, replicas: int = 1) -> None:
        self.route, self.rows, self.replicas = route, rows, replicas
        self.names = [stage.name for stage in route.stages]
        self.ends = [(self.names.index(each.producer), self.names.index(each.consumer)) for each in route.edges]
        """The producer and the consumer of each edge."""

    def place(self, stage: int, attempt: int) -> int:
        """Returns the process on which an attempt of a stage runs."""
        return stage * self.replicas + attempt % self.replicas

    def incoming(self, p: int) -> list[int]:
        """Returns the numbers of the edges that lead to a process."""
        return [e for e, (_, consumer) in enumerate(self.ends) if consumer == p // self.replicas]

    def execute(self, processes: Processes, p: int, call: Call, *, attach_only: bool, lowest: int = 0) -> Processes:
        """Starts a step or attaches to it. Raises the errors of ExecuteStep.

        `lowest` is the lowest attempt in which the edges of the step may be rebound from now on.
        """
        process, step = processes[p], processes[p].step
        if call.attempt < process.highest:
            raise StaleAttemptError("a later attempt exists", facts={"attempt": process.highest})
        if step is None or step.call.attempt != call.attempt:
            if attach_only:
                raise NotFoundError("the step is unknown", reason="UNKNOWN_STEP")
            step = Step(call, call.begins, tuple(flow and End(*flow) for flow in call.flows))
            return self._with_step(put(processes, p, process._replace(highest=call.attempt)), p, step)
        if step.call != call:
            raise ExistsError("it has other content", reason="STEP_EXISTS", facts={"attempt": process.highest})
        return put(processes, p, process._replace(step=step._replace(lowest=max(step.lowest, lowest))))

    def rebind(self, processes: Processes, p: int, rebinding: Rebinding, *, keeps: bool = True) -> Processes:
        """Rebinds edges of a step. Raises the errors of RebindStep. `keeps` is False if the first chunk was dropped."""
        step = processes[p].step
        if step is None or step.call.attempt != rebinding.attempt or step.end not in ("", "finished"):
            raise NotFoundError("the step is unknown", reason="UNKNOWN_STEP")
        for e, wanted, first_row in rebinding.ends:
            bound, is_output = step.ends[e], self.ends[e][0] == p // self.replicas
            if bound is None or (step.end and not is_output):
                raise NotFoundError("the step has no such edge", reason="UNKNOWN_EDGE")
            if wanted.attempt < (latest := max(bound.attempt, step.lowest)):
                raise StaleAttemptError("a later attempt exists", metadata={"edge": "e"}, facts={"attempt": latest})
            if wanted[:2] == bound[:2] and not self.is_lost(processes, p, e):
                continue
            if bound.rows < first_row:
                raise NotReadyError("rows would be left out", reason="ROWS_MISSING")
            if is_output and (not keeps or bound.state == "committed"):
                raise NotReadyError("the first chunk is gone", reason="CHUNK_GONE")
            new = wanted if is_output else wanted._replace(rows=bound.rows, state=bound.state)
            step = step._replace(ends=put(step.ends, e, new))
        return self._with_step(processes, p, step)

    def stop(self, processes: Processes, p: int, end: str) -> Processes:
        """Ends the step of a process that fails or is cancelled."""
        step = processes[p].step
        assert step is not None, "it runs"
        return put(processes, p, processes[p]._replace(step=step._replace(end=end)))

    def reader(self, processes: Processes, p: int, e: int) -> End | None:
        """Returns the consumer's end of the flow that a process sends over an edge. None if it is not expected."""
        process, step = processes[p], processes[p].step
        outlet = step.ends[e] if step is not None and step.end in ("", "finished") else None
        if outlet is None or outlet.state:
            return None
        consumer, reader = processes[outlet.peer], processes[outlet.peer].step
        inlet = reader.ends[e] if reader is not None and not reader.end else None
        if inlet is None or inlet[:2] != (p, outlet.attempt):
            return None
        known = inlet.opened[0] in (0, process.incarnation) and outlet.opened[0] in (0, consumer.incarnation)
        return inlet if known else None

    def is_lost(self, processes: Processes, p: int, e: int) -> bool:
        """Returns whether a step waits for another peer on an edge. A consumer does only after the flow was opened."""
        step = processes[p].step
        end = step.ends[e] if step is not None else None
        if end is None or end.state:
            return False
        if self.ends[e][0] == p // self.replicas:
            return self.reader(processes, p, e) is None
        return bool(end.opened[0]) and self.reader(processes, end.peer, e) != end

    def moves(self, processes: Processes) -> Iterator[tuple[str, Processes]]:
        """Yields the progress that steps may make: a source makes a row, or a chunk is delivered."""
        for p, process in enumerate(processes):
            step = process.step
            if step is None or step.end not in ("", "finished"):
                continue
            if not step.end and not self.incoming(p) and step.made < self.rows:
                yield f"process {p} makes a row", self._with_step(processes, p, step._replace(made=step.made + 1))
            for e, (producer, _) in enumerate(self.ends):
                inlet = self.reader(processes, p, e) if producer == p // self.replicas else None
                row = step.call.begins + inlet.chunks if inlet else 0
                if inlet and (row < step.made or row == step.made == self.rows):
                    yield f"process {p} delivers over edge {e}", self._deliver(processes, p, e, inlet)

    def _deliver(self, processes: Processes, p: int, e: int, inlet: End) -> Processes:
        step = processes[p].step
        outlet = step.ends[e] if step is not None else None
        reader = processes[outlet.peer].step if outlet is not None else None
        assert step is not None, "it sends"
        assert outlet is not None, "the edge is bound"
        assert reader is not None, "the consumer reads"
        row = step.call.begins + inlet.chunks
        opened = processes[p].incarnation, step.call.attempt
        read = processes[outlet.peer].incarnation, reader.call.attempt
        is_same = inlet.opened in ((0, 0), opened) and outlet.opened in ((0, 0), read)
        if not is_same or inlet.chunks != outlet.chunks:
            raise ViolationError("two attempts of a stage share a flow's key")
        if row > inlet.rows:
            raise ViolationError("a row is left out")
        is_end = row == self.rows
        rows, chunks = max(inlet.rows, min(row + 1, self.rows)), inlet.chunks + 1
        inlet = End(p, inlet.attempt, opened, chunks, rows, "ended" if is_end else inlet.state)
        outlet = outlet._replace(opened=read, chunks=chunks, state="delivered" if is_end else "")
        reader = reader._replace(ends=put(reader.ends, e, inlet))
        received = min(end.rows for k in self.incoming(outlet.peer) if (end := reader.ends[k]))
        processes = self._with_step(processes, p, step._replace(ends=put(step.ends, e, outlet)))
        return self._with_step(processes, outlet.peer, reader._replace(made=max(reader.made, received)))

    def _with_step(self, processes: Processes, p: int, step: Step) -> Processes:
        """Replaces the step of a process. If the step has done everything, ends it and commits its incoming flows."""
        is_over = not step.end and step.made == self.rows and all(end is None or end.state for end in step.ends)
        processes = put(processes, p, processes[p]._replace(step=step._replace(end="finished") if is_over else step))
        for e in self.incoming(p) if is_over else ():
            inlet = step.ends[e]
            assert inlet is not None, "all producers are bound"
            producer = processes[inlet.peer]
            outlet = producer.step.ends[e] if producer.step is not None else None
            if producer.step and outlet and outlet[:2] == (p, inlet.attempt) and outlet.state == "delivered":
                ends = put(producer.step.ends, e, outlet._replace(state="committed"))
                changed = producer._replace(step=producer.step._replace(ends=ends))
                processes = put(processes, inlet.peer, changed)
        return processes
