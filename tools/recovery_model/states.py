"""The states of orchestrators and of a client in the model of one request."""

from collections.abc import Iterable
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeAlias, cast

from stagemesh.orchestrator.request.recovery import AttemptState, Phase
from stagemesh.pipeline import Edge, Route, Stage
from stagemesh.pipeline.graph import PipelineOutput
from stagemesh.pipeline.schema import Chunk
from tools.recovery_model.replicas import Call, Processes, Rebinding, put

TENSOR = "t"
Late: TypeAlias = tuple[int, Call | Rebinding | int, bool]


class Attempt(NamedTuple):
    """The state of a stage at an orchestrator. The first five fields are the arguments of `state_of`."""

    attempt: int
    phase: Phase = Phase.PLACED
    bound: tuple[tuple[str, int], ...] = ()
    first_row: int = 0
    checkpoint: int | None = None
    resumed: bool = False
    incarnation: int = 0
    """The incarnation of the process on which the attempt is placed."""
    call: Call | None = None
    follows: int = 0
    """The incarnation of the process that answered the call. 0 if there is no call, and -1 if no answer has arrived."""
    events: int = 0
    """The number of events that have arrived."""
    rebinding: Rebinding | None = None
    superseded: tuple[int, ...] = ()
    rebound: bool = False
    """Whether the attempt was bound to a new consumer."""


class Run(NamedTuple):
    """A request at an orchestrator."""

    first: int
    running: int | None
    known: tuple[int, ...]
    """The incarnations of the processes, as far as the orchestrator has noticed."""
    mode: str
    """"continue", "first" or "again"."""
    stages: tuple[Attempt, ...] = ()
    lost: frozenset[str] = frozenset()
    fresh: frozenset[str] = frozenset()
    rows: int = 0
    """The number of rows of the output that the client can have."""
    has_reader: bool = True
    end: str = ""
    """"finished", or the reason of the error with which the request failed."""

    def put(self, i: int, **changes: Any) -> "Run":
        """Returns the run with changes to a stage."""
        return self._replace(stages=put(self.stages, i, self.stages[i]._replace(**changes)))


class Client(NamedTuple):
    """The client of the request."""

    calls: int = 0
    admitted: int | None = None
    follows: int | None = None
    """The number of the orchestrator whose answer the client reads."""
    is_done: bool = False


class World(NamedTuple):
    """A state of everything."""

    processes: Processes
    runs: tuple[Run | None, ...] = (None, None)
    client: Client = Client()
    late: frozenset[Late] = frozenset()
    """Calls that may still arrive, once and at any time: the process, the content, and `attach_only` or `when_left`.

    The content of CancelStep is an attempt.
    """
    crashes: int = 0
    """The number of processes that may still crash."""
    faults: int = 0
    """The number of further faults that may still happen."""

    def at(self, o: int) -> Run:
        run = self.runs[o]
        assert run is not None, "it runs"
        return run

    def put(self, o: int, run: Run | None) -> "World":
        return self._replace(runs=put(self.runs, o, run))


Move: TypeAlias = tuple[str, World]


def edge(name: str, producer: str, consumer: str, chunk: Chunk = "step") -> Edge:
    """Returns an edge that transfers all rows."""
    return Edge(name=name, producer=producer, consumer=consumer, chunk=chunk)


def route_of(*edges: Edge) -> Route:
    """Returns a route. The stages are in the order in which the edges name them. The last one is the output."""
    names = dict.fromkeys(name for each in edges for name in (each.producer, each.consumer))
    last = list(names)[-1]
    outputs = {last: PipelineOutput(source=last, name=last, kind="text", sample_rate_hz=0)}
    return Route(tuple(cast("Stage", SimpleNamespace(name=name)) for name in names), edges, outputs)


@lru_cache(maxsize=1 << 16)
def state_of(attempt: int, phase: Phase, bound: Iterable[tuple[str, int]], row: int, point: int | None) -> AttemptState:
    """Returns the state on which the decisions of `recovery` depend. It is shared, and must not be changed."""
    rows = {TENSOR: row} if row else {}
    return AttemptState(attempt, phase, dict(bound), rows, None if point is None else {TENSOR: point})
