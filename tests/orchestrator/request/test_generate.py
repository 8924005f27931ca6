"""Requests over scripted stages: what each stage receives, what the client receives, and what is stored."""

import asyncio
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from stagemesh.common.errors import UnavailableError
from stagemesh.common.wire.tensors import to_messages
from stagemesh.v1 import chunk_pb2, orchestrator_pb2, request_pb2, stage_pb2
from tests.orchestrator.mesh import CHAIN, DIAMOND, Mesh, ask, mesh, texts
from tests.orchestrator.scripted_stage import ACCEPTED, FINISHED, Response, ScriptedStage, after, say_hello


@pytest.fixture
async def diamond(tmp_path: Path) -> AsyncIterator[Mesh]:
    async with mesh(tmp_path, DIAMOND) as diamond:
        yield diamond


async def test_outputs_and_progress_of_all_stages_arrive_in_one_stream(chain: Mesh) -> None:
    events = await chain.generate()
    assert (texts(events, "first"), texts(events, "last")) == ("a done", "c done")
    assert {event.progress.stage for event in events if event.HasField("progress")} == {"a", "b", "c"}
    parts = [event.output for event in events if event.output.name == "last"]
    assert [part.position for part in parts] == [0, 2, 6]
    assert [part.finish.reason for part in parts] == [0, 0, request_pb2.FINISH_REASON_END]


async def test_admission_comes_first_and_the_end_last(chain: Mesh) -> None:
    events = await chain.generate(request_id="r1")
    admitted, finished = events[0].admitted, events[-1].finished
    assert admitted.request_id == "r1"
    assert admitted.choices[0].replicas == {"a": "a-0", "b": "b-0", "c": "c-0"}
    assert {stage.requests[0].seed for stage in chain.stages.values()} == {admitted.seed}
    assert set(finished.choices[0].stages) == {"a", "b", "c"}
    assert finished.timings.finished_s >= finished.timings.first_output_s


async def test_a_request_runs_on_the_replicas_that_it_prefers(tmp_path: Path) -> None:
    async with mesh(tmp_path, replicas=3) as chain:
        for preferred in ({"a": "a-2", "b": "b-1"}, {"a": "a-1", "b": "b-2", "c": "gone", "other": "c-1"}):
            events = await chain.generate(preferred_replicas=preferred)
            replicas = events[0].admitted.choices[0].replicas
            assert {stage: replicas[stage] for stage in ("a", "b")} == {stage: preferred[stage] for stage in ("a", "b")}


async def test_stages_that_no_output_needs_do_not_run(diamond: Mesh) -> None:
    events = await diamond.generate(outputs=["side"])
    assert texts(events, "side") == "left done"
    assert _asked(diamond) == {"top", "left"}
    assert [binding.consumer for binding in diamond.stages["top"].requests[0].outputs] == ["left-0"]


async def test_all_edges_of_a_diamond_are_bound(diamond: Mesh) -> None:
    await diamond.generate(outputs=["end"])
    top, join = (diamond.stages[name].requests[0] for name in ("top", "join"))
    assert [binding.connector for binding in top.outputs] == [chunk_pb2.CONNECTOR_AUTO, chunk_pb2.CONNECTOR_GRPC]
    inputs = [(binding.edge, binding.producer) for binding in join.inputs]
    assert inputs == [("left->join", "left-0"), ("right->join", "right-0")]


CONDITIONAL = """
pipeline: conditional
options: {side: {default: 0, minimum: 0, maximum: 1}}
stages:
  top: {engine: fake, function: source}
  text: {engine: fake, function: relay, when: {option: side, is: 1}}
  frames: {engine: fake, function: frames}
  join: {engine: fake, function: mix, join: [frames]}
edges:
  - {from: top, to: text}
  - {from: top, to: frames}
  - {from: text, to: join}
  - {from: frames, to: join}
outputs: {end: join}
"""


async def test_a_stage_is_notified_of_absent_tensors(tmp_path: Path) -> None:
    async with mesh(tmp_path, CONDITIONAL) as conditional:
        events = await conditional.generate()
        assert not conditional.stages["text"].requests
        (asked,) = conditional.stages["join"].requests
    assert set(events[0].admitted.choices[0].replicas) == {"top", "frames", "join"}
    assert list(asked.absent) == ["text"]
    assert [(binding.edge, binding.apart) for binding in asked.inputs] == [("frames->join", False)]


async def test_an_option_of_the_pipeline_reaches_no_stage(tmp_path: Path) -> None:
    async with mesh(tmp_path, CONDITIONAL) as conditional:
        await conditional.generate(parameters=request_pb2.Parameters(options=to_messages({"side": 1.0})))
        (asked,) = conditional.stages["join"].requests
        error = await conditional.failure(parameters=request_pb2.Parameters(options=to_messages({"side": 2.0})))
    assert not asked.parameters.options
    assert not asked.absent
    assert {binding.edge: binding.apart for binding in asked.inputs} == {"text->join": True, "frames->join": False}
    assert "option 'side' is 2; it must be a number from 0 to 1" in error.message


_SETS_CHUNK = {"join": request_pb2.StageParameters(chunk=request_pb2.ChunkParameters(initial_frames=4))}
_FIRST_CHUNKS: dict[str, tuple[dict[str, Any], int]] = {
    "of the pipeline": ({}, 2),
    "of the request": ({"parameters": {"stages": _SETS_CHUNK}}, 4),
}


@pytest.mark.parametrize(("fields", "initial"), _FIRST_CHUNKS.values(), ids=_FIRST_CHUNKS)
async def test_chunk_policies_reach_the_producers(diamond: Mesh, fields: dict[str, Any], initial: int) -> None:
    await diamond.generate(**fields)
    left, right = (diamond.stages[name].requests[0].outputs[0].policy for name in ("left", "right"))
    assert left.WhichOneof("cut") == "whole"
    assert (right.frames.frames, *right.frames.ramp) == (5, initial)


async def test_only_the_first_stages_get_the_prompt(diamond: Mesh) -> None:
    await diamond.generate()
    with_input = {name for name, stage in diamond.stages.items() if stage.requests[0].HasField("input")}
    assert with_input == {"top"}


async def test_a_given_seed_is_kept(chain: Mesh) -> None:
    events = await chain.generate(parameters={"seed": 0})
    assert events[0].admitted.seed == 0


async def test_every_stage_gets_the_clients_deadline(chain: Mesh) -> None:
    async for _ in chain.stub.Generate(ask(), timeout=7):
        pass
    assert [round(stage.time_left_s) for stage in chain.stages.values()] == [7, 7, 7]


async def _accept(stage: ScriptedStage, request: stage_pb2.ExecuteStepRequest) -> AsyncIterator[Response]:
    yield ACCEPTED
    yield FINISHED


def _asked(diamond: Mesh) -> set[str]:
    return {name for name, stage in diamond.stages.items() if stage.requests}


async def test_producers_start_only_when_all_their_consumers_have_accepted(tmp_path: Path) -> None:
    gates = {name: asyncio.Event() for name in ("join", "left", "right")}
    scripts = {name: after(gate, _accept) for name, gate in gates.items()}
    async with mesh(tmp_path, DIAMOND, scripts=scripts) as diamond, asyncio.TaskGroup() as group:
        group.create_task(diamond.generate())
        await diamond.stages["join"].started.wait()
        assert _asked(diamond) == {"join"}
        gates["join"].set()
        await asyncio.gather(*(diamond.stages[name].started.wait() for name in ("left", "right")))
        assert _asked(diamond) == {"join", "left", "right"}
        gates["left"].set()
        await diamond.stages["left"].idle.wait()
        assert "top" not in _asked(diamond)
        gates["right"].set()
        await diamond.stages["top"].started.wait()


_TEN_YEARS_S = 10 * 365 * 86_400.0


@pytest.mark.parametrize("jump_s", [_TEN_YEARS_S, -_TEN_YEARS_S])
async def test_the_clock_of_a_request_may_jump(tmp_path: Path, jump_s: float, monkeypatch: pytest.MonkeyPatch) -> None:
    set_back, real = asyncio.Event(), time.time

    async def patient(stage: ScriptedStage, request: stage_pb2.ExecuteStepRequest) -> AsyncIterator[Response]:
        yield ACCEPTED
        await set_back.wait()
        async for response in say_hello(stage, request):
            yield response

    async with mesh(tmp_path, scripts=dict.fromkeys("abc", patient)) as chain:
        call = chain.stub.Generate(ask(request_id="r"), timeout=20)
        await chain.until_started()
        monkeypatch.setattr(time, "time", lambda: real() + jump_s)
        set_back.set()
        events = [event async for event in call]
        assert texts(events, "last") == "c done"
        assert 0.0 <= events[-1].finished.timings.finished_s < 20.0
        await chain.until_idle()


_RAW = "application/octet-stream"
_STORED = CHAIN.replace("first: a", f"first: {{from: a, media_type: {_RAW}, stored: true}}")
_END = request_pb2.Finish(reason=request_pb2.FINISH_REASON_END)


def _pipeline(folder: Path) -> str:
    return f"{_STORED}media: {{store: {folder / 'store'}}}\n"


class _Moves:
    """Runs a stage that is moved to another replica once, before or after it has reported its stored file."""

    def __init__(self, *, reports_first: bool) -> None:
        self.reports_first = reports_first
        self.asked: list[list[stage_pb2.StreamedOutput]] = []

    async def __call__(self, stage: ScriptedStage, request: stage_pb2.ExecuteStepRequest) -> AsyncIterator[Response]:
        self.asked.append(list(request.streamed))
        is_first = len(self.asked) == 1
        yield ACCEPTED
        if request.streamed and (self.reports_first or not is_first):
            file = request_pb2.MediaFile(uri=request.streamed[0].uri, size_bytes=1)
            yield Response(output=request_pb2.Output(name="text", file=file, finish=_END))
        if is_first:
            raise UnavailableError("moves", reason="DRAINED", metadata={"stage": stage.name})
        yield FINISHED


def _files(events: list[orchestrator_pb2.GenerateResponse]) -> list[str]:
    return [event.output.file.uri for event in events if event.output.HasField("file")]


async def test_each_attempt_stores_an_object_of_its_own(tmp_path: Path) -> None:
    script = _Moves(reports_first=False)
    async with mesh(tmp_path, _pipeline(tmp_path), scripts={"a": script}, replicas=2) as chain:
        files = _files(await chain.generate(request_id="r"))
    first, second = [streamed.uri for (streamed,) in script.asked]
    folder, _, name = first.rpartition("/")
    assert folder.startswith(f"file://{tmp_path}/store/outputs/r.")
    assert (name, second) == ("first.1.bin", f"{folder}/first.2.bin")
    assert files == [second]
    assert {streamed.media_type for (streamed,) in script.asked} == {_RAW}


async def test_a_restarted_stage_does_not_store_again_what_the_client_has(tmp_path: Path) -> None:
    script = _Moves(reports_first=True)
    async with mesh(tmp_path, _pipeline(tmp_path), scripts={"a": script}, replicas=2) as chain:
        files = _files(await chain.generate())
    assert [len(asked) for asked in script.asked] == [1, 0]
    assert files == [script.asked[0][0].uri]


async def test_two_runs_of_a_request_store_different_objects(tmp_path: Path) -> None:
    uris: list[str] = []
    for _ in range(2):
        async with mesh(tmp_path, _pipeline(tmp_path)) as chain:
            await chain.generate(request_id="r")
            uris.append(chain.stages["a"].requests[0].streamed[0].uri)
    assert uris[0] != uris[1]
