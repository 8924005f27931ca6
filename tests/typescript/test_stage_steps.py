"""The steps of the stage in TypeScript: repeated calls, attempts, refusals, outputs, and stopping."""

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from stagemesh.common.errors import StagemeshError
from stagemesh.conformance import assert_same, receive_all, send_all
from stagemesh.connectors.packets import Packet
from stagemesh.v1 import chunk_pb2, request_pb2, stage_pb2
from stagemesh.v1.stage_pb2 import StreamedOutput
from tests.rpc.call_errors import error_of
from tests.typescript.stage_harness import chain, integer, step_request, texts, upper, upper_stage

NOWHERE = "127.0.0.1:1"


async def test_describe_reports_identity_signature_and_protocol() -> None:
    async with upper_stage() as stage:
        described = await stage.stub.Describe(stage_pb2.DescribeRequest(), timeout=5)
    assert (described.pipeline, described.generation, described.stage, described.replica) == ("p", "g", "upper", "m-0")
    assert described.state == stage_pb2.REPLICA_STATE_READY
    assert list(described.connectors) == [chunk_pb2.CONNECTOR_GRPC]
    assert [each.spec.name for each in described.signature.accepts] == ["text"]
    assert described.incarnation
    assert (described.protocol.lowest_version, described.protocol.highest_version) == (1, 1)


async def test_repeated_call_receives_the_same_events_from_the_first_one_on() -> None:
    sent = texts(5, 1000)
    options = request_pb2.StageParameters(options={"times": integer(2)})
    async with chain(parameters=options, streamed=[StreamedOutput(tensor="text")]) as running:
        await running.outlet.send(sent[0])
        await anext(running.inlet)
        running.step.call.cancel()
        step = await running.stage.call(running.step.request)
        _, received = await asyncio.gather(send_all(running.outlet, sent[1:]), receive_all(running.inlet))
        assert_same(received, [packet for packet in upper(sent) for _ in range(2)][1:])
        events = await step.finished()
        step.request.attach_only = True
        repeated = await (await running.stage.call(step.request)).finished()
    assert repeated == events
    assert [event.output.position for event in events if event.HasField("output")] == [*range(0, 11_000, 1000)]
    (finish,) = [event.output.finish for event in events if event.output.HasField("finish")]
    assert finish.reason == request_pb2.FINISH_REASON_END


async def test_other_content_or_a_lower_attempt_is_refused() -> None:
    async with upper_stage() as stage:
        await stage.start("r", consumer=NOWHERE, attempt=7)
        other = step_request("r", consumer=NOWHERE, attempt=7, seed=1)
        error = await error_of(stage.call(other))
        assert (error.reason, error.metadata["attempt"]) == ("STEP_EXISTS", "7")
        error = await error_of(stage.start("r", consumer=NOWHERE, attempt=6))
        assert (error.reason, error.metadata["attempt"]) == ("STALE_ATTEMPT", "7")
        assert error.metadata["stage"] == "upper"
        unknown = step_request("other", consumer=NOWHERE, attach_only=True)
        assert (await error_of(stage.call(unknown))).reason == "UNKNOWN_STEP"
        await stage.stub.CancelStep(stage_pb2.CancelStepRequest(request_id="r"), timeout=5)


async def test_higher_attempt_stops_the_lower_one() -> None:
    async with upper_stage() as stage:
        lower = await stage.start("r", consumer=NOWHERE, attempt=1)
        await stage.start("r", consumer=NOWHERE, attempt=2)
        assert (await error_of(lower.finished())).reason == "CANCELLED"
        assert (await stage.stub.CancelStep(stage_pb2.CancelStepRequest(request_id="r"), timeout=5)).stopped == 1


Change = Callable[[stage_pb2.ExecuteStepRequest], object]
REFUSALS: dict[str, tuple[str, Change]] = {
    "sampling": ("UNSUPPORTED", lambda step: step.parameters.sampling.SetInParent()),
    "adapter": ("UNSUPPORTED", lambda step: setattr(step.parameters, "adapter", "french")),
    "pausing": ("UNSUPPORTED", lambda step: setattr(step, "max_steps", 3)),
    "resuming": ("UNSUPPORTED", lambda step: step.resume_from.SetInParent()),
    "an unknown option": ("UNKNOWN_OPTION", lambda step: step.parameters.options["speed"].CopyFrom(integer(1))),
    "a value out of bounds": ("INVALID_OPTION", lambda step: step.parameters.options["times"].CopyFrom(integer(0))),
    "a value of another type": ("INVALID_OPTION", lambda step: setattr(step.parameters.options["times"], "text", "1")),
    "a transform": ("UNKNOWN_TRANSFORM", lambda step: setattr(step.inputs[0], "transform", "text.sentences")),
    "a connector": (
        "CONNECTOR_UNAVAILABLE",
        lambda step: setattr(step.outputs[0], "connector", chunk_pb2.CONNECTOR_SHM),
    ),
    "an unknown tensor": ("UNKNOWN_TENSOR", lambda step: step.outputs[0].tensors.append("audio")),
    "an unknown output": ("UNKNOWN_TENSOR", lambda step: step.streamed.add(tensor="audio")),
    "a missing input": ("MISSING_INPUT", lambda step: step.absent.append("text")),
}


async def test_what_the_stage_does_not_support_is_refused() -> None:
    async with upper_stage() as stage:
        for what, (reason, change) in REFUSALS.items():
            request = step_request("r", consumer=NOWHERE)
            change(request)
            assert (await error_of(stage.call(request))).reason == reason, what


async def test_cancelled_step_tells_its_consumer_and_its_producer() -> None:
    async with chain() as running:
        await running.outlet.send(texts(1, 100)[0])
        await anext(running.inlet)
        cancel = stage_pb2.CancelStepRequest(request_id="r", reason="enough")
        answer = await running.stage.stub.CancelStep(cancel, timeout=5)
        assert (answer.stopped, answer.usage.steps) == (1, 1)
        error = await error_of(running.step.finished())
        assert (error.reason, error.message) == ("CANCELLED", "enough")
        while not running.inlet.is_lost:
            await asyncio.sleep(0.001)
        await running.inlet.aclose()
        with pytest.raises(StagemeshError, match=r"the consumer of edge .* has ended"):
            await send_all(running.outlet, texts(2000, 100))
        assert (await running.stage.stub.CancelStep(cancel, timeout=5)).stopped == 0


async def test_positions_of_a_text_count_code_points() -> None:
    content = "naïve 😀 x".encode()
    packets = [Packet({"text": np.frombuffer(content[start : start + 3], np.uint8)}) for start in range(0, 15, 3)]
    async with chain(streamed=[StreamedOutput(tensor="text")]) as running:
        await asyncio.gather(send_all(running.outlet, packets), receive_all(running.inlet))
        outputs = [event.output for event in await running.step.finished() if event.HasField("output")]
    assert "".join(output.text for output in outputs) == "NAïVE 😀 X"
    lengths = [len(output.text) for output in outputs]
    assert [output.position for output in outputs] == [sum(lengths[:index]) for index in range(len(lengths))]


async def test_sigterm_lets_running_steps_finish_and_refuses_new_ones() -> None:
    async with chain() as running:
        stage = running.stage
        stub: Any = health_pb2_grpc.HealthStub(stage.channel)
        health = stub.Watch(health_pb2.HealthCheckRequest())
        assert (await health.read()).status == health_pb2.HealthCheckResponse.SERVING
        stage.process.terminate()
        assert (await health.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
        error = await error_of(stage.start("later", consumer=NOWHERE))
        assert error.reason == "NOT_READY"
        await running.convey(texts(3, 1000))
        assert await stage.process.wait() == 0
