"""Two real stages on one host: the engine of the first emits small tensors, that of the second notes their arrival.

Each stage is a process with a StageService. Many requests run at once, and each emits tensors at a steady rate. The
clock starts when the first engine emits a tensor and stops when the second engine receives it.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from typing import ClassVar

import numpy as np

from benchmarks.edge_ways.worker import End, receive
from stagemesh.common.plugins.descriptors import Emitted, Signature
from stagemesh.common.process.stage_process import StageConfig
from stagemesh.common.wire.tensors import TensorSpec
from stagemesh.connectors.data_plane import DataPlane
from stagemesh.connectors.packets import Packet
from stagemesh.rpc.channels import open_channel
from stagemesh.rpc.handlers import add_stage_service
from stagemesh.rpc.server import Server
from stagemesh.services.engines.abilities import EngineAbilities
from stagemesh.services.engines.base import Emission, Engine, EngineEvent, EngineLoad, Task, Usage
from stagemesh.services.stage.runtime import StageRuntime
from stagemesh.services.stage.servicer import StageServicer
from stagemesh.v1 import chunk_pb2, stage_pb2, stage_pb2_grpc

STREAMS = 32
TENSORS_PER_S = 25
TENSOR_BYTES = 4 << 10
WARM_UP = 10
"""The first tensors of each stream, which do not count."""

_EDGE = "first->second"
_BYTES = TensorSpec("uint8", ("bytes",))


class _TimedEngine:
    """The parts of an engine that both engines share."""

    def __init__(self) -> None:
        self._running = 0

    @property
    def abilities(self) -> EngineAbilities:
        """The engine has no optional abilities."""
        return EngineAbilities()

    async def start(self, report: Callable[[str], None]) -> None:
        """Does nothing, because the engine has no model to load."""

    def load(self) -> EngineLoad:
        return EngineLoad(self._running, 0)

    async def wait_failed(self) -> str:
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    async def close(self) -> None:
        """Does nothing: there is nothing to free."""


class EmittingEngine(_TimedEngine):
    """Emits the tensors of each request at a steady rate. The seed of a request is its number of tensors."""

    async def submit(self, task: Task) -> AsyncGenerator[EngineEvent, None]:
        loop, period_s = asyncio.get_running_loop(), 1 / TENSORS_PER_S
        # The phases of the streams are spread evenly over a period.
        next_s = loop.time() + period_s * (1 + int(task.request_id) / STREAMS)
        for _ in range(task.seed):
            await asyncio.sleep(next_s - loop.time())
            next_s += period_s
            tensor = np.zeros(TENSOR_BYTES, np.uint8)
            tensor[:8] = np.array([time.monotonic_ns()]).view(np.uint8)
            yield Emission(Packet({"x": tensor}))
        yield Usage(engine_steps=task.seed)


class NotingEngine(_TimedEngine):
    """Notes how long each received tensor took, in seconds."""

    def __init__(self) -> None:
        super().__init__()
        self.times_s: list[float] = []

    async def submit(self, task: Task) -> AsyncGenerator[EngineEvent, None]:
        times_s: list[float] = []
        async for packet in task.inlets[_EDGE]:
            emitted_ns = int(packet.tensors["x"][:8].view(np.int64)[0])
            times_s.append((time.monotonic_ns() - emitted_ns) / 1e9)
        self.times_s += times_s[WARM_UP:]
        yield Usage()


class StageEnd(End):
    """A process with one stage."""

    stage: ClassVar[str]
    signature: ClassVar[Signature]

    def make_engine(self) -> Engine:
        """Returns the stage's engine."""
        raise NotImplementedError

    async def open(self) -> None:
        config = StageConfig("bench", "1", self.stage, f"{self.stage}-0", "bench", f"{self.place.address}:0")
        self._engine = self.make_engine()
        plane = DataPlane(replica=config.replica, pipeline="bench", generation="1", arena_bytes=64 << 20)
        self._runtime = StageRuntime(self._engine, plane, config, self.signature)
        self._server = Server(config.listen)
        add_stage_service(StageServicer(self._runtime), self._server.grpc)
        self.endpoint = f"{self.place.address}:{await self._server.start()}"
        await self._runtime.start()

    async def close(self) -> None:
        await self._runtime.close()
        await self._server.stop(grace_s=0)

    async def execute(
        self,
        make_request: Callable[[str], stage_pb2.ExecuteStepRequest],
        *,
        on_accepted: Callable[[], None] = lambda: None,
    ) -> None:
        """Runs the requests of all streams to their ends. Calls `on_accepted` when the stage has accepted all of them.

        A producer must not start before that.
        """
        accepted = asyncio.Barrier(STREAMS)
        async with open_channel(self.endpoint) as channel:
            stub = stage_pb2_grpc.StageServiceStub(channel)

            async def run(name: str) -> None:
                async for response in stub.ExecuteStep(make_request(name)):
                    if response.HasField("accepted") and await accepted.wait() == 0:
                        on_accepted()

            await asyncio.gather(*(run(str(number)) for number in range(STREAMS)))


class FirstStage(StageEnd):
    """The stage that emits."""

    stage = "first"
    signature = Signature(emits={"x": Emitted(_BYTES)})

    def make_engine(self) -> Engine:
        return EmittingEngine()

    async def open(self) -> None:
        await super().open()
        self._consumer: str = await receive(self.peers[0])

    async def emit(self, *, count: int) -> None:
        """Emits `count` tensors in each stream."""

        def make_request(name: str) -> stage_pb2.ExecuteStepRequest:
            binding = stage_pb2.OutputBinding(
                edge=_EDGE, consumer="second-0", endpoint=self._consumer, connector=chunk_pb2.CONNECTOR_AUTO, attempt=1
            )
            request = _request(name, count)
            request.input.text = "emit"
            request.outputs.append(binding)
            return request

        await receive(self.peers[0])
        await self.execute(make_request)


class SecondStage(StageEnd):
    """The stage that receives."""

    stage = "second"
    signature = Signature(accepts={"x": _BYTES}, emits={"x": Emitted(_BYTES)})

    def make_engine(self) -> Engine:
        self._noting = NotingEngine()
        return self._noting

    async def open(self) -> None:
        await super().open()
        self.peers[0].send(self.endpoint)

    async def receive(self, *, count: int) -> list[float]:
        """Receives the tensors of all streams and returns the seconds that each took."""

        def make_request(name: str) -> stage_pb2.ExecuteStepRequest:
            request = _request(name, count)
            request.inputs.append(stage_pb2.InputBinding(edge=_EDGE, producer="first-0", attempt=1))
            return request

        await self.execute(make_request, on_accepted=lambda: self.peers[0].send("accepted"))
        times_s, self._noting.times_s = self._noting.times_s, []
        return times_s


def _request(name: str, seed: int) -> stage_pb2.ExecuteStepRequest:
    return stage_pb2.ExecuteStepRequest(request_id=name, step_id=name, attempt=1, seed=seed)
