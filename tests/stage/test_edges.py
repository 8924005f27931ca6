"""Two stages and the edge between them, over the real data plane."""

import asyncio
import math
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc
import numpy as np
import pytest

from stagemesh.common.errors import InvalidRequestError, StagemeshError
from stagemesh.conformance import until
from stagemesh.connectors import peer_timeouts
from stagemesh.connectors.packets import Packet
from stagemesh.connectors.stream import connection
from stagemesh.rpc.channels import open_channel
from stagemesh.rpc.error_mapping import from_rpc_error
from stagemesh.services.engines.base import Emission, Task, Usage
from stagemesh.services.models.text import Sentences
from stagemesh.services.stage.step.checks import ResultCheck
from stagemesh.v1 import stage_pb2
from tests.stage.gated_engine import GatedEngine
from tests.stage.replicas import CONNECTORS, EDGE, Replica, served_stage, stage_config, step_request

Received = tuple[str, stage_pb2.StepFinished]
"""The text and the last event of a step."""


class OddEngine(GatedEngine):
    """Emits a tensor that no stage accepts."""

    async def submit(self, task: Task) -> AsyncGenerator[Emission | Usage, None]:
        yield Emission(Packet({"text": np.zeros((2, 2), np.float32)}))
        yield Usage()


class HastyEngine(GatedEngine):
    """Ends after the first packet."""

    async def submit(self, task: Task) -> AsyncGenerator[Emission | Usage, None]:
        (inlet,) = task.inlets.values()
        yield Emission(await anext(aiter(inlet)))
        yield Usage(engine_steps=1)


@pytest.mark.parametrize("connector", CONNECTORS)
async def test_text_crosses_an_edge_unchanged(connector: str) -> None:
    async with _pair(stage_config(steps=5, size_bytes=20_000)) as (thinker, talker):
        (sent, thought), (received, talked) = await _run(thinker, talker, connector=connector)
        assert sent == received
        assert len(sent) == 5 * 20_000
        edge = thought.edges[0]
        assert (edge.edge, edge.connector, edge.chunks, edge.size_bytes) == (EDGE, CONNECTORS[connector], 5, 100_000)
        assert (talked.usage.engine_steps, len(talked.edges)) == (5, 0)


async def test_an_engine_may_end_before_its_input() -> None:
    async with (
        served_stage(stage_config(steps=500, size_bytes=50_000)) as thinker,
        served_stage(stage_config("talker", function="relay"), engine=HastyEngine()) as talker,
    ):
        (sent, thought), (received, talked) = await _run(thinker, talker)
    assert (len(received), received) == (50_000, sent[:50_000])
    assert (thought.usage.engine_steps, talked.usage.engine_steps) == (500, 1)


async def test_producers_connect_by_the_name_in_the_consumers_certificate(monkeypatch: pytest.MonkeyPatch) -> None:
    opened = list[str]()

    def open_named(endpoint: str, *, server_name: str) -> grpc.aio.Channel:
        opened.append(server_name)
        return open_channel(endpoint, server_name=server_name)

    monkeypatch.setattr(connection, "open_channel", open_named)
    async with _pair(stage_config(steps=3)) as (thinker, talker):
        probe = stage_pb2.ProbeEdgeRequest(
            consumer="talker-0", endpoint=talker.endpoint, server_name="probed.example", connector=CONNECTORS["grpc"]
        )
        await thinker.stub.ProbeEdge(probe, timeout=10)
        (sent, _), (received, _) = await _run(thinker, talker, server_name="talker.example")
    assert (opened, sent) == (["probed.example", "talker.example"], received)


async def test_the_time_between_rows_is_reported() -> None:
    async with _pair(stage_config(steps=5, step_s=0.01, size_bytes=10)) as (thinker, talker):
        assert not thinker.runtime.load().playout.frame_intervals_s
        await _run(thinker, talker)
        (interval_s,) = thinker.runtime.load().playout.frame_intervals_s.values()
    # Each step emits 10 rows.
    assert 0.0002 <= interval_s < 0.1


async def test_the_transform_runs_at_the_consumer() -> None:
    async with _pair(stage_config(steps=3, size_bytes=7)) as (thinker, talker):
        (sent, _), (received, talked) = await _run(thinker, talker, transform="text.sentences")
    assert received.split() == sent.split()
    assert talked.usage.engine_steps < 3


async def test_the_transform_runs_at_the_producer_before_the_policy() -> None:
    async with _pair(stage_config(steps=3, size_bytes=7)) as (thinker, talker):
        (sent, _), (sentences, _) = await _run(thinker, talker, transform="text.sentences")
        policy = stage_pb2.ChunkPolicy(frames=stage_pb2.FramesPolicy(frames=4))
        how = {"transform_at_producer": "text.sentences", "request": "r2"}
        (_, thought), (whole, _) = await _run(thinker, talker, **how)
        (_, cut_thought), (cut, _) = await _run(thinker, talker, policy=policy, **how | {"request": "r3"})
    assert sentences == whole == cut
    assert sent.split() == whole.split()
    assert (thought.edges[0].chunks, cut_thought.edges[0].chunks) == (1, math.ceil(len(whole) / 4))


@pytest.mark.parametrize("transform", ["", "text.sentences"])
async def test_a_packet_for_two_stages_is_stored_once_and_transformed_for_one(transform: str) -> None:
    async with (
        _pair(stage_config(steps=5, size_bytes=20_000)) as (thinker, talker),
        served_stage(stage_config("framer", function="frames")) as framer,
    ):
        thinking, talking = _requests(talker, transform_at_producer=transform)
        other = "thinker->framer"
        thinking.outputs.add(
            edge=other, attempt=1, consumer="framer-0", endpoint=framer.endpoint, connector=CONNECTORS["shm"]
        )
        framing = stage_pb2.ExecuteStepRequest(request_id="r", step_id="r/framer/1", attempt=1)
        framing.inputs.add(edge=other, attempt=1, producer="thinker-0")
        received, framed, sent = await _execute((talker, talking), (framer, framing), (thinker, thinking))
        assert "".join(sent[0].split()) == "".join(received[0].split())
        assert transform or sent[0] == received[0]
        assert framed[1].usage.engine_steps == 5
        assert [edge.size_bytes for edge in sent[1].edges] == [len(received[0]), 100_000]
        assert transform or thinker.runtime.data_plane.arena.copied_bytes == 100_000


async def test_a_join_waits_for_joined_edges_and_not_for_edges_apart() -> None:
    async with (
        served_stage(stage_config(steps=3)) as thinker,
        served_stage(stage_config("framer", function="frames")) as framer,
        served_stage(stage_config("mixer", function="mix")) as mixer,
    ):
        for request, apart in (("r1", False), ("r2", True)):
            assert await _mixed(request, thinker, framer, mixer, apart=apart) == (6 if apart else 3)


async def _mixed(request: str, thinker: Replica, framer: Replica, mixer: Replica, *, apart: bool) -> int:
    """Returns the steps of a mixer that receives a text and its frames."""
    thinking = step_request(request)
    framing = stage_pb2.ExecuteStepRequest(request_id=request, step_id=f"{request}/framer/1", attempt=1)
    mixing = stage_pb2.ExecuteStepRequest(request_id=request, step_id=f"{request}/mixer/1", attempt=1)
    for edge, step, consumer in (("text", thinking, mixer), ("frames", framing, mixer), ("raw", thinking, framer)):
        name = consumer.runtime.config.replica
        step.outputs.add(edge=edge, attempt=1, consumer=name, endpoint=consumer.endpoint, connector=CONNECTORS["shm"])
    framing.inputs.add(edge="raw", attempt=1, producer="thinker-0")
    mixing.inputs.add(edge="text", attempt=1, producer="thinker-0", apart=apart)
    mixing.inputs.add(edge="frames", attempt=1, producer="framer-0", apart=apart)
    mixed, _, _ = await _execute((mixer, mixing), (framer, framing), (thinker, thinking))
    return int(mixed[1].usage.engine_steps)


@pytest.mark.parametrize(
    ("end", "failed"), [("transform", ["talker"]), ("transform_at_producer", ["talker", "thinker"])]
)
async def test_an_unknown_transform_is_named(end: str, failed: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_timeouts, "REBIND_S", 0.1)
    async with _pair() as (thinker, talker):
        errors = await _failures(thinker, talker, **{end: "text.shout"})
    for stage in failed:
        assert errors[stage].reason == "UNKNOWN_TRANSFORM"
        assert "known: " in errors[stage].message


@pytest.mark.parametrize("end", ["transform", "transform_at_producer"])
async def test_an_error_of_a_transform_names_it(end: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_: Sentences, packet: Packet) -> Sequence[Packet]:
        raise ZeroDivisionError(len(packet.tensors))

    monkeypatch.setattr(Sentences, "push", fail)
    monkeypatch.setattr(peer_timeouts, "REBIND_S", 0.1)
    async with _pair() as (thinker, talker):
        errors = await _failures(thinker, talker, **{end: "text.sentences"})
    error = errors["talker" if end == "transform" else "thinker"]
    assert error.reason == "ENGINE_ERROR"
    assert f"transform text.sentences of edge {EDGE} raised ZeroDivisionError" in error.message


async def test_a_result_of_another_shape_is_not_sent() -> None:
    async with _pair(engine=OddEngine()) as (thinker, talker):
        errors = await _failures(thinker, talker)
    error = errors["thinker"]
    assert (error.reason, error.metadata["tensor"]) == ("INVALID_RESULT", "text")
    assert "of stage thinker made a wrong result: tensor 'text' is float32[2, 2]; expected uint8[bytes]" in str(error)
    assert errors["talker"].reason == "INVALID_RESULT"


async def test_a_chunk_of_another_shape_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    # An external stage may not check what it makes.
    monkeypatch.setattr(ResultCheck, "check", lambda *_: None)
    async with _pair(engine=OddEngine()) as (thinker, talker):
        errors = await _failures(thinker, talker)
    assert "edge thinker->talker: tensor 'text' is float32[2, 2]; expected uint8[bytes]" in errors["talker"].message
    assert errors["talker"].reason == "INVALID_CHUNK"
    assert errors["talker"].metadata["edge"] == EDGE
    assert errors["thinker"].reason == "INVALID_CHUNK"


@pytest.mark.parametrize("failing", ["thinker", "talker"])
async def test_a_failure_reaches_the_other_stage(failing: str) -> None:
    fails: Any = {"fail_at_step": 1}
    config = stage_config(steps=1000, step_s=0.001, **fails if failing == "thinker" else {})
    async with _pair(config, **fails if failing == "talker" else {}) as (thinker, talker):
        errors = await _failures(thinker, talker)
    assert f"stage {failing} fails at step 1" in errors["talker"].message
    if failing == "thinker":
        assert errors["talker"].metadata["stage"] == "thinker"
    else:
        assert "thinker->talker" in errors["thinker"].message


async def test_a_reason_of_a_stages_own_crosses_an_edge_unchanged() -> None:
    engine = GatedEngine()
    engine.error = InvalidRequestError("too loud", reason="X_TOO_LOUD")
    engine.gate.set()
    async with _pair(engine=engine) as (thinker, talker):
        errors = await _failures(thinker, talker)
    assert {name: (type(error), error.reason) for name, error in errors.items()} == dict.fromkeys(
        ("thinker", "talker"), (InvalidRequestError, "X_TOO_LOUD")
    )


async def test_ended_steps_free_all_resources() -> None:
    async with _pair(stage_config(steps=3, size_bytes=20_000)) as (thinker, talker):
        await _run(thinker, talker)
        producer, consumer = thinker.runtime, talker.runtime
        await until(lambda: not (producer.load().arena_used_bytes or consumer.load().credit_bytes), timeout_s=1)
        assert (producer.load().running, consumer.load().running) == (0, 0)


@asynccontextmanager
async def _pair(config: Any = None, *, engine: Any = None, **options: float) -> AsyncGenerator[tuple[Replica, Replica]]:
    """Serves a thinker, and a talker with `options`."""
    async with (
        served_stage(config, engine=engine) as thinker,
        served_stage(stage_config("talker", function="relay", **options)) as talker,
    ):
        yield thinker, talker


def _requests(
    talker: Replica,
    *,
    connector: str = "shm",
    policy: stage_pb2.ChunkPolicy | None = None,
    transform: str = "",
    transform_at_producer: str = "",
    server_name: str = "",
    request: str = "r",
) -> tuple[stage_pb2.ExecuteStepRequest, stage_pb2.ExecuteStepRequest]:
    thinking = step_request(request)
    thinking.outputs.add(
        edge=EDGE,
        consumer="talker-0",
        endpoint=talker.endpoint,
        server_name=server_name,
        attempt=1,
        connector=CONNECTORS[connector],
        policy=policy,
        transform=transform_at_producer,
    )
    talking = step_request(request, stage="talker", text="")
    talking.inputs.add(edge=EDGE, attempt=1, producer="thinker-0", transform=transform)
    return thinking, talking


async def _run(thinker: Replica, talker: Replica, **how: object) -> tuple[Received, Received]:
    """Returns what the thinker and the talker output."""
    thinking, talking = _requests(talker, **how)  # type: ignore[arg-type]
    received, sent = await _execute((talker, talking), (thinker, thinking))
    return sent, received


async def _execute(*steps: tuple[Replica, stage_pb2.ExecuteStepRequest]) -> list[Received]:
    """Executes the steps of a request. Raises the first error. Name consumers before their producers."""
    results = await _attempt(*steps)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if not isinstance(result, BaseException)]


async def _attempt(*steps: tuple[Replica, stage_pb2.ExecuteStepRequest]) -> list[Received | BaseException]:
    """Starts each step when the step before it is accepted or has failed. Returns their results and errors."""
    tasks: list[asyncio.Task[Received]] = []
    for replica, request in steps:
        begun = asyncio.Event()
        tasks.append(asyncio.create_task(_receive(replica, request, begun=begun)))
        await begun.wait()
    return await asyncio.gather(*tasks, return_exceptions=True)


async def _receive(replica: Replica, request: stage_pb2.ExecuteStepRequest, *, begun: asyncio.Event) -> Received:
    """Executes a step. `begun` is set when the step is accepted or has failed."""
    text, finished = "", stage_pb2.StepFinished()
    try:
        async for event in replica.stub.ExecuteStep(request, timeout=20):
            begun.set()
            text += event.output.text
            finished = event.finished
    finally:
        begun.set()
    return text, finished


async def _failures(thinker: Replica, talker: Replica, **how: object) -> dict[str, StagemeshError]:
    """Returns the errors of the stages."""
    thinking, talking = _requests(talker, **how)  # type: ignore[arg-type]
    results = await _attempt((talker, talking), (thinker, thinking))
    return {
        name: from_rpc_error(result, peer=name)
        for name, result in zip(("talker", "thinker"), results, strict=True)
        if isinstance(result, grpc.aio.AioRpcError)
    }
