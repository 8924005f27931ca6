"""Replicas that register with an orchestrator, over real gRPC."""

import asyncio
import signal
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import grpc
import pytest

from stagemesh.cli.launcher.ports import PortPicker
from stagemesh.common.errors import InvalidRequestError, NotReadyError
from stagemesh.common.process.stage_process import OrchestratorAddress, StageConfig
from stagemesh.common.wire.versions import own_protocol
from stagemesh.conformance.replicas import until
from stagemesh.orchestrator.config import OrchestratorConfig, Registration, ReplicaAddress
from stagemesh.orchestrator.service import serving
from stagemesh.pipeline import Pipeline
from stagemesh.rpc.channels import open_channel
from stagemesh.rpc.handlers import answering
from stagemesh.rpc.server import Server
from stagemesh.services.stage.registration import registered
from stagemesh.v1 import membership_pb2, membership_pb2_grpc, orchestrator_pb2, orchestrator_pb2_grpc
from tests.children import config_command, running_process
from tests.orchestrator.mesh import ask, poll, serve, texts, until_health
from tests.orchestrator.scripted_stage import ScriptedStage


@dataclass
class _Orchestrator:
    """Serves an orchestrator whose config lists no replica. Replicas register at `endpoint`."""

    endpoint: str
    channel: grpc.aio.Channel
    stub: "orchestrator_pb2_grpc.OrchestratorServiceAsyncStub"

    async def replicas(self) -> dict[str, str]:
        """Returns the names of the replicas of stage b, each with the name in its certificate."""
        described = await self.stub.DescribePipeline(orchestrator_pb2.DescribePipelineRequest(), timeout=10)
        return {
            each.name: each.server_name for stage in described.stages if stage.name == "b" for each in stage.replicas
        }

    async def until(self, *names: str) -> None:
        """Waits until stage b has exactly these replicas."""
        await poll(self.replicas, until=lambda seen: [*seen] == [*names])


@asynccontextmanager
async def _orchestrator(
    pipeline: Pipeline, *, port: int | None = None, open_to_all: bool = True
) -> AsyncGenerator[_Orchestrator]:
    replicas = {} if open_to_all else {stage: (ReplicaAddress(f"{stage}-0", "h:1"),) for stage in pipeline.stages}
    registration = Registration(lease_s=3600) if open_to_all else None
    endpoint = f"127.0.0.1:{port or PortPicker().pick()}"
    config = OrchestratorConfig(
        str(pipeline.source), replicas, "127.0.0.1:0", admin_listen=endpoint, registration=registration, drain_s=0.1
    )
    async with serving(config, pipeline) as bound, open_channel(f"127.0.0.1:{bound}") as channel:
        yield _Orchestrator(endpoint, channel, orchestrator_pb2_grpc.OrchestratorServiceStub(channel))


@pytest.fixture
async def orchestrator(pipeline: Pipeline) -> AsyncGenerator[_Orchestrator]:
    async with _orchestrator(pipeline) as orchestrator:
        yield orchestrator


@asynccontextmanager
async def _registered(pipeline: Pipeline, stage: str, *orchestrators: str) -> AsyncGenerator[None]:
    """Serves a scripted stage that registers as a stage process does."""
    scripted = ScriptedStage(stage)
    scripted.description.pipeline, scripted.description.generation = pipeline.name, pipeline.generation
    server, endpoint = await serve(scripted)
    config = replace(_config(pipeline, stage, *orchestrators), listen=endpoint, server_name=f"{stage}.example")
    try:
        async with registered(config, incarnation="one", port=0):
            yield
    finally:
        await server.stop(grace_s=0)


def _config(pipeline: Pipeline, stage: str, *orchestrators: str) -> StageConfig:
    return StageConfig(
        pipeline=pipeline.name,
        generation=pipeline.generation,
        stage=stage,
        replica=f"{stage}-0",
        engine="fake",
        function="relay",
        listen="127.0.0.1:0",
        orchestrators=tuple(OrchestratorAddress(each, "orchestrator.example") for each in orchestrators),
    )


async def _until_logged(caplog: pytest.LogCaptureFixture, text: str) -> None:
    await until(lambda: any(text in message for message in caplog.messages), timeout_s=20)


async def test_stages_that_register_serve(orchestrator: _Orchestrator, pipeline: Pipeline) -> None:
    async with AsyncExitStack() as stages:
        for stage in pipeline.stages:
            await stages.enter_async_context(_registered(pipeline, stage, orchestrator.endpoint))
        await until_health(orchestrator.channel, serving=True)
        events = [event async for event in orchestrator.stub.Generate(ask(), timeout=20)]
        assert texts(events, "last") == "c done"
        await stages.aclose()
        await orchestrator.until()


async def test_a_replica_registers_by_its_certificates_name(orchestrator: _Orchestrator, pipeline: Pipeline) -> None:
    both = _orchestrator(pipeline)
    async with both as other, _registered(pipeline, "b", orchestrator.endpoint, other.endpoint):
        for each in (orchestrator, other):
            await each.until("b-0")
            assert await each.replicas() == {"b-0": "b.example"}


async def test_a_replica_registers_after_a_restart(pipeline: Pipeline, caplog: pytest.LogCaptureFixture) -> None:
    async with AsyncExitStack() as stack:
        first = await stack.enter_async_context(AsyncExitStack())
        orchestrator = await first.enter_async_context(_orchestrator(pipeline))
        await stack.enter_async_context(_registered(pipeline, "b", orchestrator.endpoint))
        await orchestrator.until("b-0")
        await first.aclose()
        # Registered replicas do not delay the orchestrator's end until its calls are aborted.
        await _until_logged(caplog, "the orchestrator stops; register again")
        port = int(orchestrator.endpoint.rpartition(":")[2])
        again = await stack.enter_async_context(_orchestrator(pipeline, port=port))
        await again.until("b-0")


async def test_a_failed_stage_leaves_and_reports_its_error(orchestrator: _Orchestrator, pipeline: Pipeline) -> None:
    with pytest.raises(NotReadyError, match="out of memory"):
        async with _registered(pipeline, "b", orchestrator.endpoint):
            await orchestrator.until("b-0")
            raise NotReadyError("the engine is out of memory")
    await orchestrator.until()


class _Silent(membership_pb2_grpc.MembershipServiceServicer):
    """An orchestrator that tells the first `ended` registrations that their lease has ended, and never answers later
    ones.
    """

    def __init__(self, *, ended: int = 0) -> None:
        self._ended = ended
        self.asked = asyncio.Event()

    async def Register(
        self, request_iterator: AsyncIterator[membership_pb2.RegisterRequest], context: Any
    ) -> AsyncIterator[membership_pb2.RegisterResponse]:
        async with answering(context):
            await anext(request_iterator)
            if self._ended:
                self._ended -= 1
                raise NotReadyError("the lease has ended; register again", reason="LEASE_ENDED")
            self.asked.set()
            await asyncio.Event().wait()
            yield membership_pb2.RegisterResponse(protocol=own_protocol())


@pytest.mark.parametrize("ended", [0, 1], ids=["never registered", "lease ended"])
async def test_a_silent_orchestrator_does_not_delay_a_leaving_replica(pipeline: Pipeline, ended: int) -> None:
    server, silent = Server("127.0.0.1:0"), _Silent(ended=ended)
    membership_pb2_grpc.add_MembershipServiceServicer_to_server(silent, server.grpc)
    config = _config(pipeline, "b", f"127.0.0.1:{await server.start()}")
    try:
        async with asyncio.timeout(8), registered(config, incarnation="one", port=7):
            await silent.asked.wait()
    finally:
        await server.stop(grace_s=0)


@pytest.mark.parametrize(
    ("field", "complaint"),
    [("generation", "its generation is other, expected"), ("pipeline", "its pipeline is other, expected chain")],
)
async def test_a_stage_of_another_pipeline_logs_why_it_is_rejected(
    orchestrator: _Orchestrator, pipeline: Pipeline, caplog: pytest.LogCaptureFixture, field: str, complaint: str
) -> None:
    config = replace(_config(pipeline, "b", orchestrator.endpoint), **{field: "other"})  # type: ignore[arg-type]
    async with registered(config, incarnation="one", port=7):
        await _until_logged(caplog, f"not registered with orchestrator {orchestrator.endpoint}: replica b-0")
    assert await orchestrator.replicas() == {}
    (record,) = (each for each in caplog.records if "not registered" in each.getMessage())
    assert (record.levelname, complaint in record.getMessage()) == ("ERROR", True)


async def test_registration_can_be_disabled(pipeline: Pipeline, caplog: pytest.LogCaptureFixture) -> None:
    async with (
        _orchestrator(pipeline, open_to_all=False) as orchestrator,
        registered(_config(pipeline, "b", orchestrator.endpoint), incarnation="one", port=7),
    ):
        await _until_logged(caplog, "replicas cannot register with this")
        assert [*await orchestrator.replicas()] == ["b-0"], "it is the listed one alone"


async def test_an_unreachable_address_is_not_advertised(pipeline: Pipeline) -> None:
    config = replace(_config(pipeline, "b", "h:1"), listen="0.0.0.0:0")
    with pytest.raises(InvalidRequestError, match="set `advertise`"):
        async with registered(config, incarnation="one", port=7):
            pass


async def test_a_stage_deregisters_at_sigterm(orchestrator: _Orchestrator, pipeline: Pipeline, tmp_path: Path) -> None:
    config = _config(pipeline, "b", orchestrator.endpoint)
    command = config_command("stagemesh.services.stage", config, tmp_path / "stage.json")
    async with running_process(*command) as process:
        await orchestrator.until("b-0")
        process.send_signal(signal.SIGTERM)
        await orchestrator.until()
        async with asyncio.timeout(20):
            assert await process.wait() == 0
