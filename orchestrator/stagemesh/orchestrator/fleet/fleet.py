"""All replicas of a pipeline: they come and go while it runs, and each is watched from start to end."""

import asyncio
import logging
import time
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager

from stagemesh.orchestrator.config import ReplicaAddress
from stagemesh.orchestrator.fleet.edge_connectors import EdgeLinks
from stagemesh.orchestrator.fleet.load_estimate import StepCost
from stagemesh.orchestrator.fleet.replica import Replica, ReplicaState
from stagemesh.orchestrator.fleet.replica_connection import Connection, GrpcConnection
from stagemesh.orchestrator.fleet.replica_registry import ReplicaRegistry
from stagemesh.orchestrator.fleet.replica_watcher import ReplicaWatcher
from stagemesh.orchestrator.membership.base import Member, MemberSource
from stagemesh.orchestrator.spec import Pipeline
from stagemesh.v1 import stage_pb2

_log = logging.getLogger(__name__)


def connect(member: Member) -> Connection:
    """Opens a connection to where a member serves."""
    return GrpcConnection(member.stage, name=member.name or member.endpoint, endpoint=member.endpoint)


class Fleet:
    """The replicas by stage, within `async with fleet.watched():`. `sources` say who they are.

    `generations` are those whose replicas are taken in beside those of the pipeline's own.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        sources: Sequence[MemberSource],
        *,
        generations: Collection[str] = (),
        connect: Callable[[Member], Connection] = connect,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.book = ReplicaRegistry()
        self.links = EdgeLinks(pipeline.edges)
        self._pipeline, self._sources, self._generations = pipeline, sources, frozenset(generations)
        self._connect, self._clock = connect, clock
        self._seats: dict[tuple[str, str], ReplicaWatcher] = {}
        self._claims = Counter[tuple[str, str]]()
        self._costs: dict[str, StepCost] = defaultdict(StepCost)
        self._by_name: dict[str, Replica] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._group: asyncio.TaskGroup | None = None
        self._on_change: Callable[[], None] = lambda: None

    @property
    def replicas(self) -> Mapping[str, tuple[Replica, ...]]:
        """All replicas by stage, those that are out of reach or on their way out too."""
        return {stage: self.book.of(stage) for stage in self._pipeline.stages}

    @property
    def ready(self) -> bool:
        """Whether requests can run: a generation has a ready replica for every stage, and the edges can be crossed."""
        return self.links.ready and bool(self.book.ready(self._pipeline.stages.keys()))

    @asynccontextmanager
    async def watched(self, *, on_change: Callable[[], None] = lambda: None) -> AsyncGenerator[None]:
        """Keeps channels to all replicas open and what is known of them and of their links current.

        `on_change` is called when any of that changes.
        """
        async with asyncio.TaskGroup() as group:
            self._group, self._on_change = group, on_change
            self._start(self.links.keep(on_change=on_change), name="links")
            for source in self._sources:
                self._start(source.follow(self), name=type(source).__name__)
            try:
                yield
            finally:
                self._group = None
                for task in self._tasks:
                    task.cancel()

    # -- who is there: told by the sources

    def join(self, member: Member) -> None:
        """A replica serves there; two sources may know of it."""
        place = (member.stage, member.endpoint)
        self._claims[place] += 1
        if self._claims[place] > 1 or self._group is None:
            return
        _log.info("replica %s of stage %s joins", member.name or member.endpoint, member.stage)
        address = ReplicaAddress(member.name or member.endpoint, member.endpoint)
        connection = self._connect(member)
        seat = ReplicaWatcher(address, connection, lambda: self._make(member.stage, address, connection), self)
        self._seats[place] = seat
        self.book.add(seat.replica)
        self._start(seat.keep(), name=f"seat {address.name}")

    def leave(self, member: Member, why: str) -> None:
        """The source knows of it no longer. Requests that it works on go on."""
        place = (member.stage, member.endpoint)
        self._claims[place] -= 1
        if self._claims[place] > 0:
            return
        del self._claims[place]
        seat = self._seats.pop(place, None)
        if seat is not None:
            _log.info("replica %s of stage %s leaves: %s", seat.replica.name, member.stage, why)
            seat.leave(why)

    # -- what they say: told by the seats

    def admit(self, replica: Replica, said: stage_pb2.DescribeResponse) -> None:
        """See Seats."""
        # Its peers know it by the name in its own config, whoever had the address before.
        replica.name = said.replica or replica.name
        former = replica.detail
        holder = self._by_name.setdefault(replica.name, replica)
        if holder is not replica and holder.endpoint != replica.endpoint and holder.state is ReplicaState.READY:
            detail = (
                f"refused: the replica at {holder.endpoint} has the name {replica.name} too; give it one of its own"
            )
            replica.observe(ReplicaState.FAILED, detail)
        else:
            self._by_name[replica.name] = replica
            replica.observe_description(said, self._pipeline, generations=self._generations)
        if replica.state is ReplicaState.FAILED and replica.detail != former:
            _log.warning("replica %s of stage %s: %s", replica.name, replica.stage, replica.detail)

    def succeed(self, replica: Replica, successor: Replica | None) -> None:
        """See Seats."""
        self.book.remove(replica)
        self.links.left(replica)
        if self._by_name.get(replica.name) is replica:
            del self._by_name[replica.name]
        if successor is not None:
            self.book.add(successor)
        self._on_change()

    # -- inner workings

    def _make(self, stage: str, address: ReplicaAddress, connection: Connection) -> Replica:
        replica = Replica(
            stage,
            address,
            connection.client,
            on_change=lambda: self._changed(replica),
            cost=self._costs[stage],
            clock=self._clock,
        )
        return replica

    def _changed(self, replica: Replica) -> None:
        if self.book.update(replica):
            if self.book.is_ready(replica):
                self.links.joined(replica)
            else:
                self.links.left(replica)
        self._on_change()

    def _start(self, work: Coroutine[object, object, None], *, name: str) -> None:
        assert self._group is not None, "only within `watched`"
        task = self._group.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
