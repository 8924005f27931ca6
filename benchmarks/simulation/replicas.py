"""Simulated replicas, which only wait on the event loop's clock.

A request is a number of chunks at every stage. A replica makes one chunk after another, and alternates between its
requests, as an engine with continuous batching does. It makes a chunk when the upstream stages have made theirs.

A replica that dies loses its steps and their chunks, and restarts after a while. Recovery is simulated by counting
chunks: a consumer retains its chunks, and a producer sends all of its chunks again to a new consumer.
"""

import asyncio
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, field
from typing import cast

from google.protobuf.message import Message

from stagemesh.common.errors import NotFoundError, UnavailableError, UnsupportedError
from stagemesh.common.notification import Notifier
from stagemesh.common.wire.versions import own_protocol
from stagemesh.connectors.stream.connector_agreement import EdgeProbe
from stagemesh.orchestrator.fleet.membership import Member, MembershipListener
from stagemesh.orchestrator.fleet.replica_client import ReplicaClient, Verdict
from stagemesh.orchestrator.fleet.replica_loss import REPLICA_LOST
from stagemesh.pipeline import Pipeline
from stagemesh.v1 import stage_pb2

_ACCEPTED = stage_pb2.ExecuteStepResponse(accepted=stage_pb2.StepAccepted())
_FINISHED = stage_pb2.ExecuteStepResponse(finished=stage_pb2.StepFinished())
_REPORT_S, _IDLE_REPORT_S = 0.5, 30.0
CHUNK_S = 0.2
RESTART_S = 5.0
"""The time from the death of a process to its restart."""
_HOST_REPLICAS, _ZONE_HOSTS = 8, 16


class World:
    """The state that simulated replicas share: the sizes of requests, and the flows between replicas."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline
        self.chunks: dict[str, int] = {}
        """The number of chunks at each stage, by request id."""
        self.replicas: list[SimulatedReplica] = []
        self.resume_s: list[float] = []
        """The time from the loss of each lost step to its restart."""
        self.deaths = self.lost_steps = 0
        self._lost_at_s: dict[tuple[str, str], float] = {}
        self._flows: dict[str, dict[str, Flow]] = defaultdict(lambda: defaultdict(Flow))
        self._holders: dict[str, set[SimulatedReplica]] = defaultdict(set)

    def flow(self, request_id: str, edge: str) -> "Flow":
        """Returns the flow of a request over an edge."""
        return self._flows[request_id][edge]

    def forget(self, request_id: str) -> None:
        """Removes all state of a request."""
        self.chunks.pop(request_id, None)
        self._flows.pop(request_id, None)
        for replica in self._holders.pop(request_id, ()):
            replica.forget(request_id)

    def connect(self, member: Member) -> ReplicaClient:
        """Adds a replica for a member."""
        self.replicas.append(SimulatedReplica(member, self))
        return cast("ReplicaClient", self.replicas[-1])

    def note_lost(self, request_id: str, stage: str) -> None:
        """Records that the stage's step was lost."""
        self.lost_steps += 1
        self._lost_at_s[request_id, stage] = asyncio.get_running_loop().time()

    def note_begun(self, request_id: str, stage: str, replica: "SimulatedReplica") -> None:
        """Records that the stage's step starts or restarts."""
        self._holders[request_id].add(replica)
        lost_at_s = self._lost_at_s.pop((request_id, stage), None)
        if lost_at_s is not None:
            self.resume_s.append(asyncio.get_running_loop().time() - lost_at_s)


class Flow:
    """The chunks of one request over one edge."""

    def __init__(self) -> None:
        self._made = self._arrived = 0
        self._producer: Step | None = None
        self._changed = Notifier()

    def produce(self, producer: "Step") -> None:
        """Records that the producer starts or restarts."""
        self._made, self._producer = 0, producer

    def consume(self) -> None:
        """Records that the consumer starts or restarts, without chunks."""
        self._arrived = 0

    def put(self, producer: "Step") -> None:
        """Adds a chunk, unless it is from a superseded producer."""
        if producer is self._producer:
            self._made += 1
            self.send_again()

    def send_again(self) -> None:
        """Sends the consumer all chunks that it lacks."""
        self._arrived = max(self._arrived, self._made)
        self._changed.fire()

    async def wait(self, chunk: int) -> None:
        """Returns when the chunk of this number, from 0, has arrived."""
        while self._arrived <= chunk:
            await self._changed.wait()


@dataclass(eq=False)
class Step:
    """One attempt at a stage's step of a request."""

    request: stage_pb2.ExecuteStepRequest
    chunks_left: int
    outgoing: list[Flow]
    events: "asyncio.Queue[stage_pb2.ExecuteStepResponse | None]" = field(
        default_factory=asyncio.Queue["stage_pb2.ExecuteStepResponse | None"]
    )
    """None stands for the end of the process."""


class SimulatedReplica:
    """One address, and the ReplicaClient of its process."""

    def __init__(self, member: Member, world: World) -> None:
        self._world = world
        self._member = member
        self._turn = asyncio.Lock()
        self._deaths = 0
        self._steps: dict[str, Step] = {}
        self._working: dict[Step, asyncio.Task[None]] = {}
        self._died, self._restarted_at_s = Notifier(), 0.0
        self._touched = asyncio.Event()

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return asyncio.get_running_loop().time() >= self._restarted_at_s

    def die(self) -> None:
        """Ends the process and its steps. Another process runs after `RESTART_S`."""
        self._deaths += 1
        self._world.deaths += 1
        self._restarted_at_s = asyncio.get_running_loop().time() + RESTART_S
        for step, task in self._working.items():
            self._world.note_lost(step.request.request_id, self._member.stage)
            task.cancel()
            step.events.put_nowait(None)
        self._working.clear()
        self._steps.clear()
        self._died.fire()

    def forget(self, request_id: str) -> None:
        """Removes all state of a request."""
        self._steps.pop(request_id, None)

    async def describe(self, *, timeout_s: float) -> stage_pb2.DescribeResponse:  # noqa: ARG002
        self._check_alive()
        number = int(self._member.name.rpartition("-")[2])
        host = number // _HOST_REPLICAS
        return stage_pb2.DescribeResponse(
            pipeline=self._world.pipeline.name,
            generation=self._world.pipeline.generation,
            stage=self._member.stage,
            replica=self._member.name,
            incarnation=str(self._deaths),
            state=stage_pb2.REPLICA_STATE_READY,
            protocol=own_protocol(),
            host=f"host {host}",
            zone=f"zone {host // _ZONE_HOSTS}",
        )

    async def wait_while_serving(self) -> None:
        await self._died.wait()
        self._check_alive()

    async def watch_load(self, verdict: Verdict) -> AsyncGenerator[stage_pb2.WatchLoadResponse]:
        del verdict
        while True:
            self._check_alive()
            yield self._load()
            if not self._working:
                # A real replica also reports soon after it receives work, and occasionally while idle.
                self._touched.clear()
                try:
                    async with asyncio.timeout(_IDLE_REPORT_S):
                        await self._touched.wait()
                except TimeoutError:
                    continue
            await asyncio.sleep(_REPORT_S)

    async def is_port_closed(self) -> bool:
        return not self.alive

    async def close(self) -> None:
        """Does nothing."""

    async def execute(
        self,
        request: stage_pb2.ExecuteStepRequest,
        *,
        timeout_s: float,  # noqa: ARG002
        take: Callable[[stage_pb2.ExecuteStepResponse], None],
    ) -> None:
        self._check_alive()
        request_id = request.request_id
        outgoing = [self._world.flow(request_id, binding.edge) for binding in request.outputs]
        step = self._steps[request_id] = Step(request, self._world.chunks[request_id], outgoing)
        self._world.note_begun(request_id, self._member.stage, self)
        working = self._working[step] = asyncio.create_task(self._work(step))
        self._touched.set()
        try:
            take(_ACCEPTED)
            if await step.events.get() is None:
                raise self._lost()
            take(_FINISHED)
        finally:
            working.cancel()
            self._working.pop(step, None)

    async def _work(self, step: Step) -> None:
        request_id = step.request.request_id
        flows = [self._world.flow(request_id, binding.edge) for binding in step.request.inputs]
        for flow in flows:
            flow.consume()
        for flow in step.outgoing:
            flow.produce(step)
        for chunk in range(step.chunks_left):
            for flow in flows:
                await flow.wait(chunk)
            async with self._turn:
                await asyncio.sleep(CHUNK_S)
            step.chunks_left -= 1
            for flow in step.outgoing:
                flow.put(step)
        step.events.put_nowait(_FINISHED)

    async def cancel(self, request: stage_pb2.CancelStepRequest, *, timeout_s: float) -> stage_pb2.CancelStepResponse:  # noqa: ARG002
        return stage_pb2.CancelStepResponse()

    async def rebind(self, request: stage_pb2.RebindStepRequest, *, timeout_s: float) -> None:  # noqa: ARG002
        self._check_alive()
        step = self._steps.get(request.request_id)
        if step is None or step.request.step_id != request.step_id:
            raise NotFoundError(f"step {request.step_id} does not run here", reason="UNKNOWN_STEP")
        for binding in request.outputs:
            self._world.flow(request.request_id, binding.edge).send_again()

    async def probe_edge(self, *_: object, **__: object) -> EdgeProbe:
        self._check_alive()
        return EdgeProbe("shm", {})

    async def control(self, request: Message, response: type[Message], *, timeout_s: float) -> Message:  # noqa: ARG002
        raise UnsupportedError(f"a simulated replica does not support {request.DESCRIPTOR.name}")

    def _load(self) -> stage_pb2.WatchLoadResponse:
        chunks_left = sum(step.chunks_left for step in self._working)
        return stage_pb2.WatchLoadResponse(running=len(self._working), work_s=chunks_left * CHUNK_S)

    def _check_alive(self) -> None:
        if not self.alive:
            raise self._lost()

    def _lost(self) -> UnavailableError:
        return UnavailableError(f"replica {self._member.name} is unreachable", reason=REPLICA_LOST)


class Members:
    """A source of `count` members, distributed over the stages."""

    def __init__(self, pipeline: Pipeline, count: int) -> None:
        stages = list(pipeline.stages)
        self.members = [
            Member(stages[number % len(stages)], f"h:{number}", f"{stages[number % len(stages)]}-{number}")
            for number in range(count)
        ]

    async def follow(self, listener: MembershipListener) -> None:
        for member in self.members:
            listener.join(member)
