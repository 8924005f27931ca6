"""The stage in TypeScript when replicas at the other ends of its edges are replaced or restarted."""

import asyncio

import grpc
import numpy as np
import pytest

from stagemesh.common.errors import StagemeshError, UnavailableError
from stagemesh.common.wire.chunk_sizes import FramesPolicy, WholePolicy
from stagemesh.conformance import assert_same, receive_all, send_all
from stagemesh.conformance.fault_suite import proxied
from stagemesh.connectors.flow.chunking import Chunker
from stagemesh.connectors.packets import Packet
from stagemesh.orchestrator.planning.chunk_policies import policy_to_wire
from stagemesh.v1 import stage_pb2
from tests.connectors.hosts import started_host
from tests.rpc.call_errors import error_of, raises
from tests.typescript.nodes import QUICK
from tests.typescript.stage_harness import (
    IN,
    OUT,
    Step,
    chain,
    inlet_from,
    outlet_to,
    step_request,
    text,
    texts,
    upper,
    upper_stage,
)


def numbered(count: int, *, rows: int) -> list[Packet]:
    """Returns packets whose rows make one long text."""
    letters = np.resize(np.arange(ord("a"), ord("z") + 1, dtype=np.uint8), count * rows)
    return [Packet({"text": letters[start : start + rows]}) for start in range(0, count * rows, rows)]


def joined(packets: list[Packet]) -> bytes:
    return b"".join(packet.tensors["text"].tobytes() for packet in packets)


def input_binding(producer: str, attempt: int, **first_rows: int) -> stage_pb2.InputRebinding:
    binding = stage_pb2.InputBinding(edge=IN, producer=producer, attempt=attempt)
    return stage_pb2.InputRebinding(binding=binding, first_rows=first_rows)


def output_binding(endpoint: str, attempt: int, consumer: str = "c-1") -> stage_pb2.OutputBinding:
    return stage_pb2.OutputBinding(edge=OUT, consumer=consumer, endpoint=endpoint, attempt=attempt)


@pytest.mark.parametrize(("first_row", "rows"), [(0, 7), (0, 5), (10, 4), (21, 7)])
async def test_restarted_producer_continues_the_edge_by_rows(first_row: int, rows: int) -> None:
    sent = numbered(10, rows=7)
    whole = joined(sent)
    async with chain() as running, started_host("a-1") as successor:
        for one in sent[:3]:
            await running.outlet.send(one)
        got = [await anext(running.inlet) for _ in range(3)]
        await running.stage.rebind(running.step, inputs=[input_binding("a-1", 2, text=first_row)])
        rest = np.frombuffer(whole[first_row:], np.uint8)
        again = [Packet({"text": rest[start : start + rows]}) for start in range(0, len(rest), rows)]
        later = outlet_to(running.stage.endpoint, successor.plane, "r", attempt=2)
        _, received = await asyncio.gather(send_all(later, again), receive_all(running.inlet))
        assert joined([*got, *received]) == whole.upper()
        await running.step.finished()
        with pytest.raises(StagemeshError):
            await send_all(running.outlet, sent[3:])


async def test_dead_producer_is_replaced_while_its_flow_waits() -> None:
    sent = texts(10, 5000)
    async with chain() as running, started_host("a-1") as successor:
        await running.outlet.send(sent[0])
        got = [await anext(running.inlet)]
        await running.a.close()
        await running.stage.rebind(running.step, inputs=[input_binding("a-1", 2)])
        later = outlet_to(running.stage.endpoint, successor.plane, "r", attempt=2)
        _, received = await asyncio.gather(send_all(later, sent), receive_all(running.inlet))
        assert_same([*got, *received], upper(sent))
        await running.step.finished()


@pytest.mark.parametrize("taken", [0, 4, 12])
async def test_another_consumer_receives_all_chunks(taken: int) -> None:
    sent = texts(12, 20_000)
    async with chain() as running, started_host("c-1") as other:
        sending = asyncio.create_task(send_all(running.outlet, sent))
        for _ in range(taken):
            await anext(running.inlet)
        await running.inlet.aclose(lost=True)
        successor = inlet_from(other.plane, "r", attempt=2)
        await running.stage.rebind(running.step, outputs=[output_binding(other.endpoint, 2)])
        assert_same(await receive_all(successor), upper(sent))
        await sending
        await running.step.finished()


async def test_finished_step_sends_its_chunks_to_another_consumer() -> None:
    sent = texts(6, 20_000)
    async with chain() as running, started_host("c-1") as other:
        await asyncio.gather(send_all(running.outlet, sent), running.step.finished())
        await anext(running.inlet)
        await running.c.close()
        successor = inlet_from(other.plane, "r", attempt=2)
        await running.stage.rebind(running.step, outputs=[output_binding(other.endpoint, 2)])
        assert_same(await receive_all(successor), upper(sent))
        stale = running.stage.rebind(running.step, outputs=[output_binding(running.c.endpoint, 1)])
        assert (await error_of(stale)).reason == "STALE_ATTEMPT"


async def test_rebinding_that_cannot_succeed_changes_nothing() -> None:
    sent = texts(4, 100)
    async with chain() as running:
        stage, step, endpoint = running.stage, running.step, running.c.endpoint
        await running.outlet.send(sent[0])
        await anext(running.inlet)
        error = await error_of(stage.rebind(step, inputs=[input_binding("a-1", 2, text=101)]))
        assert (error.reason, error.metadata["tensor"], error.metadata["rows"]) == ("ROWS_MISSING", "text", "100")
        elsewhere = stage_pb2.OutputBinding(edge="m->x", consumer="c-0", endpoint=endpoint, attempt=2)
        error = await error_of(stage.rebind(step, inputs=[input_binding("a-1", 2)], outputs=[elsewhere]))
        assert error.reason == "UNKNOWN_EDGE"
        unknown = Step(stage_pb2.ExecuteStepRequest(request_id="r", step_id="r/9"), None)
        assert (await error_of(stage.rebind(unknown))).reason == "UNKNOWN_STEP"
        await stage.rebind(step, inputs=[input_binding("a-0", 1)], outputs=[output_binding(endpoint, 1, "c-0")])
        await running.convey(sent[1:])


async def test_producer_that_repeats_fewer_rows_fails_the_step() -> None:
    async with chain() as running, started_host("a-1") as successor:
        await running.outlet.send(text(0, 100))
        await anext(running.inlet)
        await running.stage.rebind(running.step, inputs=[input_binding("a-1", 2)])
        later = outlet_to(running.stage.endpoint, successor.plane, "r", attempt=2)
        sending = asyncio.create_task(send_all(later, [text(0, 50)]))
        with raises(StagemeshError, reason="ATTEMPTS_DIFFER"):
            await anext(running.inlet)
        with pytest.raises(grpc.aio.AioRpcError):
            await running.step.finished()
        await asyncio.gather(sending, return_exceptions=True)
        await running.inlet.aclose()


async def test_restarted_consumer_gets_the_flow_again_by_rebinding() -> None:
    sent = texts(8, 20_000)
    async with (
        upper_stage(*QUICK) as stage,
        started_host("a-0") as a,
        started_host("c-0") as c1,
        started_host("c-0") as c2,
        proxied(c1.endpoint) as (proxy, endpoint),
    ):
        inlet = inlet_from(c1.plane, "r")
        step = await stage.start("r", consumer=endpoint)
        sending = asyncio.create_task(send_all(outlet_to(stage.endpoint, a.plane, "r"), sent))
        await anext(inlet)
        proxy.targets[:] = [c2.endpoint]
        proxy.cut()
        successor = inlet_from(c2.plane, "r", attempt=2)
        await stage.rebind(step, outputs=[output_binding(endpoint, 2, "c-0")])
        assert_same(await receive_all(successor), upper(sent))
        await sending
        await step.finished()


async def test_restarted_producer_is_not_taken_for_its_previous_incarnation() -> None:
    sent = texts(5, 20_000)
    async with chain() as running, started_host("a-0") as successor:
        stage, other = running.stage, inlet_from(running.c.plane, "r2")
        await running.outlet.send(sent[0])
        await anext(running.inlet)
        await running.a.close()
        step = await stage.start("r2", consumer=running.c.endpoint)
        outlet = outlet_to(stage.endpoint, successor.plane, "r2")
        _, received = await asyncio.gather(send_all(outlet, sent), receive_all(other))
        assert_same(received, upper(sent))
        await step.finished()
        again = outlet_to(stage.endpoint, successor.plane, "r")
        with pytest.raises(UnavailableError, match="was lost before chunk 1"):
            await send_all(again, sent)
        await stage.stub.CancelStep(stage_pb2.CancelStepRequest(request_id="r"), timeout=5)
        await running.inlet.aclose()


@pytest.mark.parametrize(
    "policy",
    [WholePolicy(), FramesPolicy(10), FramesPolicy(100, (3,)), FramesPolicy(10, (4, 6), left_context_frames=6)],
    ids=["whole", "frames", "initial", "ramp"],
)
async def test_chunk_policies_cut_as_they_do_in_python(policy: FramesPolicy | WholePolicy) -> None:
    sent = texts(6, 37)
    chunker = Chunker(policy)
    expected = [chunk for packet in upper(sent) for chunk in chunker.push(packet)] + chunker.finish()
    async with upper_stage(*QUICK) as stage, started_host("a-0") as a, started_host("c-0") as c:
        inlet = inlet_from(c.plane, "r")
        request = step_request("r", consumer=c.endpoint)
        request.outputs[0].policy.CopyFrom(policy_to_wire(policy))
        step = await stage.call(request)
        _, received = await asyncio.gather(send_all(outlet_to(stage.endpoint, a.plane, "r"), sent), receive_all(inlet))
        assert_same(received, expected)
        await step.finished()
