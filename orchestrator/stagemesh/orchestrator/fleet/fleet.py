"""Tracks all replicas of a pipeline, which may join and leave at any time.

A `ReplicaWatcher` watches one address: which replica process serves there, whether it is ready, and its load.
"""

import asyncio
import logging
import time
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager, suppress

from stagemesh.common.backoff import Backoff
from stagemesh.common.errors import StagemeshError
from stagemesh.common.process.stage_process import ReplicaState
from stagemesh.common.tasks import kept_in
from stagemesh.common.wire.versions import NO_COMMON_VERSION
from stagemesh.orchestrator.fleet.edge_connectors import EdgeConnectors
from stagemesh.orchestrator.fleet.membership import Member, MemberSource, check_names
from stagemesh.orchestrator.fleet.replica import MAX_DETAIL, Replica, StepCost
from stagemesh.orchestrator.fleet.replica_client import ReplicaClient, Verdict
from stagemesh.orchestrator.fleet.replica_loss import GIVE_UP_S
from stagemesh.orchestrator.fleet.replica_registry import ReplicaRegistry
from stagemesh.orchestrator.fleet.stage_adapters import StageAdapters
from stagemesh.pipeline import Pipeline
from stagemesh.v1 import stage_pb2

_log = logging.getLogger(__name__)

_DESCRIBE_TIMEOUT_S = 2.0
_LOADING_PAUSE_S = 0.5
_LOST_PAUSES = Backoff(first_s=0.25, longest_s=2.0)
_LOAD_RETRY_S = 1.0


class ReplicaWatcher:
    """Watches the replica processes at one address, one after another.

    The watch ends when the member has left and its replica runs no request of this orchestrator.
    """

    def __init__(self, fleet: "Fleet", member: Member, client: ReplicaClient) -> None:
        """Creates a watcher for the address of a member. `client` calls the replica at this address."""
        self._fleet, self._member, self._client = fleet, member, client
        self._left = asyncio.Event()
        self._lost_at_s: float | None = None
        self._retries = _LOST_PAUSES.retries()
        self._tasks = asyncio.TaskGroup()
        self._load_reports: asyncio.Task[None] | None = None
        """The task that stores the replica's load reports, or None if no reports are being received."""
        self._verdict = stage_pb2.ROLLOUT_VERDICT_UNSPECIFIED
        """The verdict that was sent with the last request for load reports."""
        self.replica = fleet.create_replica(member, client)

    def leave(self, why: str) -> None:
        """Stops planning requests on the replica. The watch ends after the replica's running requests have ended.

        `why` is shown to operators.
        """
        self.replica.leave(why)
        self._left.set()

    async def watch(self) -> None:
        """Watches the address until the member has left and its replica is idle. Then closes the connection."""
        try:
            async with self._tasks:
                watching = self._tasks.create_task(self._watch(), name=f"watch {self.replica.name}")
                await self._left.wait()
                await self.replica.wait_until_idle()
                watching.cancel()
                self._stop_load_reports()
        finally:
            self._fleet.replace(self.replica, None)
            await self._client.close()

    async def _watch(self) -> None:
        """Polls the replica's description until the replica is ready. Runs until it is cancelled.

        After the replica is ready, waits until the replica is no longer ready, and then polls again.
        """
        while True:
            pause_s = _LOADING_PAUSE_S
            try:
                await self._describe()
                if self.replica.can_connect:
                    _log.info("replica %s is ready", self.replica.name)
                    await self._client.wait_while_serving()
                    await self._describe()
            except StagemeshError as exc:
                pause_s = self._retries.next_s()
                await self._lose(exc)
            await asyncio.sleep(pause_s)

    async def _describe(self) -> None:
        description = await self._client.describe(timeout_s=_DESCRIBE_TIMEOUT_S)
        check_names(description)
        self._lost_at_s = None
        self._retries.reset()
        failed = description.state == stage_pb2.REPLICA_STATE_FAILED
        if self.replica.is_described and self.replica.incarnation != description.incarnation:
            self.replica.end(self.replica.loss("restarted", reason="REPLICA_RESTARTED"))
            self._replace()
        elif self.replica.end_cause is not None and not failed:
            self._replace()
        self._fleet.admit(self.replica, description)
        if failed:
            self.replica.end(self.replica.loss(f"failed ({description.detail[:MAX_DETAIL]})"))
        elif self._load_reports is None and self._fleet.is_own_stage(self.replica, description):
            self._receive_load_reports()

    def update_verdict(self) -> None:
        """Requests load reports again if the verdict has changed, because the request carries the verdict."""
        if self._load_reports is not None and self._verdict != self._fleet.verdict(self.replica):
            self._stop_load_reports()
            self._receive_load_reports()

    def _receive_load_reports(self) -> None:
        self._verdict = self._fleet.verdict(self.replica)
        self._load_reports = self._tasks.create_task(self._record_loads(self.replica, self._verdict))

    def _replace(self) -> None:
        self._stop_load_reports()
        predecessor, self.replica = self.replica, self._fleet.create_replica(self._member, self._client)
        if self._left.is_set():
            self.replica.leave(predecessor.detail)
        self._fleet.replace(predecessor, self.replica)

    async def _record_loads(self, replica: Replica, verdict: Verdict) -> None:
        """Stores the load reports of `replica` until the task is cancelled. A refused replica only receives the
        verdict.

        A replica that sends no load reports can still serve requests. Whether the replica is ready depends on its
        health check.
        """
        while True:
            with suppress(StagemeshError):
                async with aclosing(self._client.watch_load(verdict)) as reports:
                    async for report in reports:
                        check_names(report)
                        if not replica.is_refused:
                            replica.record_load(report)
            await asyncio.sleep(_LOAD_RETRY_S)

    def _stop_load_reports(self) -> None:
        if self._load_reports is not None:
            self._load_reports.cancel()
            self._load_reports = None

    async def _lose(self, cause: StagemeshError) -> None:
        self._stop_load_reports()
        is_refused = cause.reason == NO_COMMON_VERSION
        self.replica.observe(ReplicaState.FAILED if is_refused else ReplicaState.UNREACHABLE, cause.message)
        now_s = asyncio.get_running_loop().time()
        if self._lost_at_s is None:
            self._lost_at_s = now_s
        if not self.replica.is_described or self.replica.end_cause is not None:
            return
        if await self._client.is_port_closed():
            self.replica.end(self.replica.loss(f"terminated ({cause.message})"))
        elif now_s - self._lost_at_s > GIVE_UP_S:
            self.replica.end(self.replica.loss(f"is unreachable ({cause.message})"), died=False)


def connect(member: Member) -> ReplicaClient:
    """Returns a client for the replica at the address of a member."""
    name = member.name or member.endpoint
    return ReplicaClient(stage=member.stage, replica=name, endpoint=member.endpoint, server_name=member.server_name)


class Fleet:
    """Tracks the replicas of a pipeline by stage. Watches the replicas within `async with fleet.watched():`."""

    def __init__(
        self,
        pipeline: Pipeline,
        sources: Sequence[MemberSource],
        *,
        generations: Collection[str] = (),
        warm: Collection[str] = (),
        connect: Callable[[Member], ReplicaClient] = connect,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Creates a fleet whose members are reported by `sources`.

        Accepts replicas of the pipeline's own generation and of the additional `generations`. `warm` are the stages
        whose sleeping replicas are woken when requests need them.
        """
        self.registry = ReplicaRegistry()
        self.edge_connectors = EdgeConnectors(pipeline.edges)
        self.adapters = StageAdapters()
        self.warm = frozenset(warm)
        """The stages whose sleeping replicas are woken when requests need them."""
        self._pipeline, self._sources, self._generations = pipeline, sources, frozenset(generations)
        self._connect, self._clock = connect, clock
        self._watchers: dict[tuple[str, str], ReplicaWatcher] = {}
        self._reports = defaultdict[tuple[str, str], list[Member]](list)
        """A member for each source that currently reports it, by the member's stage and endpoint."""
        self.step_costs = defaultdict[str, StepCost](StepCost)
        """The estimates of the time that a step takes, by stage."""
        self._by_name: dict[str, Replica] = {}
        self._serving: frozenset[str] = frozenset()
        """The last `serving_generations` that were not empty. Empty until every stage has had a ready replica."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._group: asyncio.TaskGroup | None = None
        self._on_change: Callable[[], None] = lambda: None

    @property
    def replicas(self) -> Mapping[str, tuple[Replica, ...]]:
        """All replicas by stage, including replicas that are unreachable or leaving."""
        return {stage: self.registry.of(stage) for stage in self._pipeline.stages}

    @property
    def ready(self) -> bool:
        """Whether the fleet can run requests.

        In at least one generation, every stage must have a replica that is ready or is woken when requests need it.
        Every edge between stages with ready replicas must be usable.
        """
        asleep = {stage for stage in self.warm if not self.registry.has_ready(stage)}
        edges = [edge for edge in self._pipeline.edges if not asleep & set(edge.arc)]
        return self.edge_connectors.are_ready(edges) and bool(self.serving_generations)

    @property
    def serving_generations(self) -> frozenset[str]:
        """The generations in which every stage has a replica that is ready or is woken when requests need it."""
        stages = self._pipeline.stages
        asleep = {stage: {replica.generation for replica in self.sleeping(stage)} for stage in self.warm}
        serving = set(self.registry.ready(stages.keys()))
        for generation in frozenset[str]().union(*asleep.values()) - serving:
            awake = [stage for stage in stages if generation not in asleep.get(stage, ())]
            if not awake or generation in self.registry.ready(awake):
                serving.add(generation)
        return frozenset(serving)

    def sleeping(self, stage: str) -> list[Replica]:
        """Returns the sleeping replicas of a stage, in the same order in every orchestrator."""
        asleep = [replica for replica in self.registry.of(stage) if replica.state is ReplicaState.ASLEEP]
        return sorted(asleep, key=lambda replica: (len(replica.name), replica.name))

    @asynccontextmanager
    async def watched(self, *, on_change: Callable[[], None] = lambda: None) -> AsyncGenerator[None]:
        """Connects to all replicas within the block. Updates the replicas' states and the connectors of their edges.

        `on_change` is called after each update.
        """
        async with asyncio.TaskGroup() as group:
            self._group, self._on_change = group, on_change
            self._start(self.edge_connectors.probe_links(on_change=on_change), name="probe links")
            for source in self._sources:
                self._start(source.follow(self), name=type(source).__name__)
            try:
                yield
            finally:
                self._group = None
                for task in self._tasks:
                    task.cancel()

    # -- MembershipListener

    def join(self, member: Member) -> None:
        key = (member.stage, member.endpoint)
        self._reports[key].append(member)
        if len(self._reports[key]) > 1 or self._group is None:
            return
        watcher = self._watchers[key] = ReplicaWatcher(self, member, self._connect(member))
        _log.info("replica %s of stage %s joins", watcher.replica.name, member.stage)
        self.registry.add(watcher.replica)
        self._start(watcher.watch(), name=f"watcher of {watcher.replica.name}")

    def leave(self, member: Member, why: str) -> None:
        key = (member.stage, member.endpoint)
        self._reports[key].remove(member)
        if self._reports[key]:
            return
        del self._reports[key]
        watcher = self._watchers.pop(key, None)
        if watcher is not None:
            _log.info("replica %s of stage %s leaves: %s", watcher.replica.name, member.stage, why)
            watcher.leave(why)

    # -- called by the watchers

    def create_replica(self, member: Member, client: ReplicaClient) -> Replica:
        """Creates the Replica for a new process at the member's address, without registering it."""
        cost = self.step_costs[member.stage]
        replica = Replica(member, client, on_change=lambda: self._update(replica), cost=cost, clock=self._clock)
        return replica

    def admit(self, replica: Replica, description: stage_pb2.DescribeResponse) -> None:
        """Sets the state of a replica from the replica's description.

        The state becomes FAILED if the replica is a member under another name, if another ready replica has the same
        name, or if the replica does not belong to its stage.
        """
        names = {member.name for member in self._reports.get((replica.stage, replica.endpoint), ())}
        # Two processes may have had the address, and other replicas use the name in the replica's own config.
        if "" in names or description.replica in names:
            replica.name = description.replica or replica.name
        former_detail = replica.detail
        holder = self._by_name.setdefault(replica.name, replica)
        if description.replica not in ("", replica.name):
            replica.refuse(f"it is named {description.replica}, not {replica.name}; correct its config or the member")
        elif holder is not replica and holder.endpoint != replica.endpoint and holder.state is ReplicaState.READY:
            replica.refuse(f"the replica at {holder.endpoint} is also named {replica.name}; rename one of them")
        else:
            self._by_name[replica.name] = replica
            replica.observe_description(description, self._pipeline, generations=self._generations)
        if replica.state is ReplicaState.FAILED and replica.detail != former_detail:
            _log.warning("replica %s of stage %s: %s", replica.name, replica.stage, replica.detail)

    def replace(self, replica: Replica, successor: Replica | None) -> None:
        """Replaces a replica that has ended with its successor.

        - `successor` is the next process at the same address, or None if the address is no longer watched.
        """
        self.registry.remove(replica)
        self.edge_connectors.leave(replica)
        if self._by_name.get(replica.name) is replica:
            del self._by_name[replica.name]
        if successor is not None:
            self.registry.add(successor)
        self._update_verdicts(replica)
        self._on_change()

    def verdict(self, replica: Replica) -> Verdict:
        """Returns the verdict on whether a rolling update may count a replica as ready.

        The verdict is unspecified until a generation has served for the first time.
        """
        if replica.state is not ReplicaState.FAILED and replica.generation in self._serving:
            return stage_pb2.ROLLOUT_VERDICT_RELEASED
        return stage_pb2.ROLLOUT_VERDICT_WITHHELD if self._serving else stage_pb2.ROLLOUT_VERDICT_UNSPECIFIED

    def is_own_stage(self, replica: Replica, description: stage_pb2.DescribeResponse) -> bool:
        """Returns whether a replica belongs to this pipeline and to its stage, whatever its generation is."""
        return (description.pipeline, description.stage) == (self._pipeline.name, replica.stage)

    def _update(self, replica: Replica) -> None:
        if self.adapters.observe(replica) and self._group is not None:
            self._start(self.adapters.adopt(replica), name=f"adapters of {replica.name}")
        can_connect = replica.can_connect and replica in self.registry
        if can_connect and replica not in self.edge_connectors:
            self.edge_connectors.join(replica)
            if self._group is not None and self.adapters.names(replica.stage):
                self._start(self.adapters.restore(replica), name=f"adapters of {replica.name}")
        elif not can_connect and replica in self.edge_connectors:
            self.edge_connectors.leave(replica)
        self.registry.update(replica)
        self._update_verdicts(replica)
        self._on_change()

    def _update_verdicts(self, replica: Replica) -> None:
        """Sends the verdicts for rolling updates that changed together with `replica`."""
        if self._group is None:
            return
        ready = self.serving_generations or self._serving
        changed = self._watchers.get((replica.stage, replica.endpoint))
        affected = self._watchers.values() if ready != self._serving else [changed] if changed else []
        self._serving = ready
        for watcher in affected:
            watcher.update_verdict()

    def _start(self, work: Coroutine[object, object, None], *, name: str) -> None:
        assert self._group is not None, "only within `watched`"
        kept_in(self._tasks, self._group.create_task(work, name=name))
