"""The stages in C++ and TypeScript: what the cases of `stagemesh conformance` do not play."""

import asyncio
import itertools
import random
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from stagemesh.common.wire.chunk_sizes import StepPolicy
from stagemesh.conformance import assert_same, receive_all, send_all
from stagemesh.connectors.data_plane import DataPlane
from stagemesh.connectors.packets import ConsumerAddress, EdgeKey, Packet
from stagemesh.rpc.channels import open_channel
from stagemesh.stage_conformance.driver import Settings, describe_stage
from stagemesh.stage_conformance.suites.steps import resume, running
from stagemesh.stage_conformance.trial import Step, Trial
from stagemesh.v1 import chunk_pb2, stage_pb2, stage_pb2_grpc
from tests.connectors.hosts import started_host
from tests.connectors.relay_faults import Direction, Fault, Faults
from tests.connectors.relays import relayed
from tests.cpp.programs import running_stage

pytestmark = pytest.mark.parametrize("language", ["cpp", "typescript"])
TEXTS = [np.random.default_rng(seq).integers(ord("a"), ord("z") + 1, 20_000, np.uint8) for seq in range(12)]


async def test_sigterm_lets_running_steps_finish_and_rejects_later_ones(language: str) -> None:
    async with running_stage(language) as (endpoint, process), open_channel(endpoint) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        health = stub.Watch(health_pb2.HealthCheckRequest())
        assert (await health.read()).status == health_pb2.HealthCheckResponse.SERVING
        async with Trial(await describe_stage(endpoint, channel, Settings())) as trial:
            step, peer, flow = await running(trial)
            process.terminate()
            assert (await health.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
            described = await trial.stub.Describe(stage_pb2.DescribeRequest())
            assert described.state == stage_pb2.REPLICA_STATE_DRAINING
            late = await trial.call(trial.request(request_id="late")).accepted()
            for attempt in itertools.count(2):
                late = trial.call(trial.request(request_id="late", attempt=attempt))
                await late.until(partial(_is_answered, late), "an answer")
                if late.is_over:
                    break
            assert late.error is not None
            assert late.error.reason == "NOT_READY"
            await resume(peer, flow)
            await step.finished()
        assert await process.wait() == 0


def _is_answered(step: Step) -> bool:
    return bool(step.events) or step.is_over


@pytest.fixture
def quick_producer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the Python producer notice a lost message early, and send several fragments of each chunk."""
    monkeypatch.setattr("stagemesh.connectors.peer_timeouts.REOPEN_S", 0.3)
    monkeypatch.setattr("stagemesh.connectors.stream.connection._CHECK_S", 0.1)
    monkeypatch.setattr("stagemesh.connectors.stream.connection._HANDSHAKE_S", 0.5)
    monkeypatch.setattr("stagemesh.connectors.fragments.FRAGMENT_BYTES", 8192)
    monkeypatch.setattr("stagemesh.connectors.fragments.WHOLE_CHUNK_BYTES", 8192)


@pytest.mark.parametrize("direction", Direction)
@pytest.mark.parametrize("fault", Fault)
@pytest.mark.usefixtures("quick_producer")
async def test_fault_of_a_message_is_recovered(language: str, fault: Fault, direction: Direction) -> None:
    async with (
        running_stage(language) as (endpoint, _),
        open_channel(endpoint) as channel,
        started_host("c-0", window_bytes=64 << 10) as c,
        relayed(endpoint) as before,
    ):

        async def run(name: str, *, into: Faults | None = None, out_of: Faults | None = None) -> None:
            """Sends one request by a separate producer. The faults strike on the way into the stage, or out of it."""
            producer = DataPlane(replica=name, pipeline="p", generation="g", arena_bytes=1 << 20)
            async with AsyncExitStack() as stack:
                stack.push_async_callback(producer.close)
                behind = await stack.enter_async_context(relayed(c.endpoint))
                before.faults[name], behind.faults["m-0"] = into or Faults(), out_of or Faults()
                inlet = c.plane.open_inlet(EdgeKey(name, "m->c", 1), producer="m-0")
                request = stage_pb2.ExecuteStepRequest(request_id=name, step_id=name, attempt=1)
                request.inputs.add(edge="a->m", producer=name, attempt=1)
                output = request.outputs.add(edge="m->c", consumer="c-0", endpoint=behind.endpoint, attempt=1)
                output.connector = chunk_pb2.CONNECTOR_GRPC
                call: Any = stage_pb2_grpc.StageServiceStub(channel).ExecuteStep(request)
                assert (await call.read()).HasField("accepted")
                address = ConsumerAddress("m-0", before.endpoint)
                outlet = producer.open_outlet(
                    EdgeKey(name, "a->m", 1), address, connector="grpc", policy=StepPolicy(), first_rows={"text": 0}
                )
                sent = (Packet({"text": text}) for text in TEXTS)
                _, received = await asyncio.gather(send_all(outlet, sent), receive_all(inlet))
                assert_same(received, [Packet({"text": text - 32}) for text in TEXTS])
                while await call.read() is not grpc.aio.EOF:
                    pass

        unharmed = Faults(), Faults()
        await run("unharmed", into=unharmed[0], out_of=unharmed[1])
        into = [Faults(fault, direction, index) for index in _some(unharmed[0].counts[direction])]
        out_of = [Faults(fault, direction, index) for index in _some(unharmed[1].counts[direction])]
        async with asyncio.timeout(30):
            await asyncio.gather(
                *(run(f"into-{faults.index}", into=faults) for faults in into),
                *(run(f"out-of-{faults.index}", out_of=faults) for faults in out_of),
            )
        if direction is Direction.REQUESTS:
            assert all(faults.struck for faults in (*into, *out_of))


def _some(count: int) -> list[int]:
    """Returns the first and last message indices of a flow, and a few between."""
    return sorted({*range(4), *random.Random(count).sample(range(count), 4), count - 2, count - 1})
