"""Replicas that only pretend to compute, by the event loop's clock.

A request is so many chunks at every stage. A replica makes one chunk after the other, of the requests that it holds by
turns, as an engine that batches continuously does; a chunk's turn comes once the stages before have made theirs.
"""

import asyncio
from collections import defaultdict
from collections.abc import AsyncGenerator

from stagemesh.connectors.base import ConnectorName
from stagemesh.connectors.errors import UnsupportedError
from stagemesh.connectors.negotiation import EdgeProbe
from stagemesh.connectors.pulse import Pulse
from stagemesh.orchestrator.membership.base import Member, Roster
from stagemesh.orchestrator.spec import Pipeline
from stagemesh.orchestrator.stages import StageClient
from stagemesh.v1 import stage_pb2

_ACCEPTED = stage_pb2.ExecuteStepResponse(accepted=stage_pb2.StepAccepted())
_FINISHED = stage_pb2.ExecuteStepResponse(finished=stage_pb2.StepFinished())
_REPORT_S, _IDLE_REPORT_S = 0.5, 30.0
CHUNK_S = 0.2
_HOST_REPLICAS, _ZONE_HOSTS = 8, 16


class World:
    """What the simulated processes share: how much work each request is, and the flows between them."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline
        self.chunks: dict[str, int] = {}
        """By request, how many it is at each stage."""
        self._flows: dict[str, dict[str, Flow]] = defaultdict(lambda: defaultdict(Flow))

    def flow(self, request_id: str, edge: str) -> "Flow":
        """What the edge has carried of the request."""
        return self._flows[request_id][edge]

    def forget(self, request_id: str) -> None:
        """The request has ended."""
        self.chunks.pop(request_id, None)
        self._flows.pop(request_id, None)

    def connect(self, member: Member) -> "SimulatedReplica":
        """A process serves there."""
        return SimulatedReplica(member, self)


class Flow:
    """Chunks of one request over one edge."""

    def __init__(self) -> None:
        self._arrived = 0
        self._changed = Pulse()

    def put(self) -> None:
        """One more."""
        self._arrived += 1
        self._changed.fire()

    async def wait(self, chunk: int) -> None:
        """Returns once this chunk, from 0, has arrived."""
        while self._arrived <= chunk:
            await self._changed.wait()


class SimulatedReplica:
    """One process, as connection and as client; see `stagemesh.orchestrator.connection.Connection`."""

    def __init__(self, member: Member, world: World) -> None:
        self._world = world
        self._member = member
        self._turn = asyncio.Lock()
        self._held = 0
        self._chunks_left = 0
        self._touched = asyncio.Event()

    @property
    def client(self) -> StageClient:
        """See Connection."""
        return self

    async def describe(self, *, timeout_s: float) -> stage_pb2.DescribeResponse:  # noqa: ARG002
        """See Connection."""
        number = int(self._member.name.rpartition("-")[2])
        host = number // _HOST_REPLICAS
        return stage_pb2.DescribeResponse(
            pipeline=self._world.pipeline.name,
            generation=self._world.pipeline.generation,
            stage=self._member.stage,
            replica=self._member.name,
            incarnation="one",
            state=stage_pb2.REPLICA_STATE_READY,
            wire_version=1,
            host=f"host {host}",
            zone=f"zone {host // _ZONE_HOSTS}",
        )

    async def wait_while_serving(self) -> None:
        """See Connection."""
        await asyncio.Event().wait()

    async def loads(self) -> AsyncGenerator[stage_pb2.WatchLoadResponse]:
        """See Connection."""
        while True:
            yield self._load()
            if not self._held:
                # As a real one: it reports again soon after it got work, and now and then in between.
                self._touched.clear()
                try:
                    async with asyncio.timeout(_IDLE_REPORT_S):
                        await self._touched.wait()
                except TimeoutError:
                    continue
            await asyncio.sleep(_REPORT_S)

    async def nobody_listens(self) -> bool:
        """See Connection."""
        return False

    async def close(self) -> None:
        """See Connection."""

    async def execute(
        self,
        request: stage_pb2.ExecuteStepRequest,
        *,
        timeout_s: float,  # noqa: ARG002
    ) -> AsyncGenerator[stage_pb2.ExecuteStepResponse]:
        """See StageClient."""
        flows = [self._world.flow(request.request_id, binding.edge) for binding in request.inputs]
        feeds = [self._world.flow(request.request_id, binding.edge) for binding in request.outputs]
        left = self._world.chunks[request.request_id]
        self._held += 1
        self._chunks_left += left
        self._touched.set()
        try:
            yield _ACCEPTED
            for chunk in range(left):
                for flow in flows:
                    await flow.wait(chunk)
                async with self._turn:
                    await asyncio.sleep(CHUNK_S)
                left -= 1
                self._chunks_left -= 1
                for flow in feeds:
                    flow.put()
            yield _FINISHED
        finally:
            self._held -= 1
            self._chunks_left -= left

    async def cancel(self, request: stage_pb2.CancelStepRequest, *, timeout_s: float) -> None:
        """See StageClient."""

    async def probe_edge(
        self,
        edge: str,  # noqa: ARG002
        *,
        consumer: str,  # noqa: ARG002
        endpoint: str,  # noqa: ARG002
        connector: ConnectorName,  # noqa: ARG002
        timeout_s: float,  # noqa: ARG002
    ) -> EdgeProbe:
        """See StageClient."""
        return EdgeProbe("shm", {})

    async def load(self, *, timeout_s: float) -> stage_pb2.WatchLoadResponse:  # noqa: ARG002
        """See StageClient."""
        return self._load()

    async def control(self, method: str, request: bytes, *, timeout_s: float) -> bytes:  # noqa: ARG002
        """See StageClient."""
        raise UnsupportedError(f"a simulated replica knows no {method}")

    def _load(self) -> stage_pb2.WatchLoadResponse:
        return stage_pb2.WatchLoadResponse(running=self._held, work_s=self._chunks_left * CHUNK_S)


class Members:
    """So many replicas, spread over the stages."""

    def __init__(self, pipeline: Pipeline, count: int) -> None:
        stages = list(pipeline.stages)
        self.members = [
            Member(stages[number % len(stages)], f"h:{number}", f"{stages[number % len(stages)]}-{number}")
            for number in range(count)
        ]

    async def follow(self, roster: Roster) -> None:
        """See MemberSource."""
        for member in self.members:
            roster.join(member)
