"""A stage process generates the same bits as the pipeline's `__call__`: alone, in turns, paused and transferred."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Generator
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch

from stagemesh.common.process.stage_process import StageConfig
from stagemesh.rpc.channels import open_channel
from stagemesh.services.stage.step.spec import STATE_EDGE
from stagemesh.v1 import chunk_pb2, stage_pb2, stage_pb2_grpc
from tests.diffusion.stages import diffusion_config, frames_of, md5, served_diffusion, stage_process, step_request
from tests.diffusion.tiny.calls import ImageSpec, classic_image, load
from tests.diffusion.tiny.pipelines import WRITERS

pytestmark = pytest.mark.timeout(300)

Stub: TypeAlias = "stage_pb2_grpc.StageServiceAsyncStub"
PROMPTS = ("a red cube", "x", "two dogs and a very long tail", "Ein Haus am See, im Nebel", "7 + 3 = 10?")
SIZES = ((64, 64), (32, 80), (96, 48))
SPECS = [
    ImageSpec(prompt=prompt, seed=number, height=height, width=width, steps=2)
    for number, (prompt, (height, width)) in enumerate((p, s) for p in PROMPTS for s in SIZES)
]
LONG = ImageSpec(prompt="a long way", seed=11, height=48, width=64, steps=5)
BY_TURNS = [LONG, *(replace(spec, steps=3 + i) for i, spec in enumerate(SPECS[4:13:4]))]


@dataclass(frozen=True)
class Subject:
    """A model, its data type, and a process that serves it."""

    model: str
    config: StageConfig
    endpoint: str
    dtype: torch.dtype
    digests: dict[ImageSpec, str] = field(default_factory=dict[ImageSpec, str])
    """The digests of images of `__call__` that were made before."""

    @cached_property
    def pipeline(self) -> Any:
        """The classic pipeline."""
        assert self.config.model is not None
        return load(Path(self.config.model), self.dtype)

    def expected(self, spec: ImageSpec) -> str:
        """Returns the digest of the image of `__call__`."""
        if spec not in self.digests:
            self.digests[spec] = md5(classic_image(self.model, self.pipeline, spec).float().numpy())
        return self.digests[spec]


@pytest.fixture(
    scope="module", params=[*((model, "float32") for model in WRITERS), ("qwen-image", "bfloat16")], ids="-".join
)
def subject(
    request: pytest.FixtureRequest, tiny_diffusion: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Generator[Subject]:
    model, dtype = request.param
    config = diffusion_config(model, tiny_diffusion(model), dtype=dtype)
    with stage_process(config, tmp_path_factory.mktemp("stage")) as endpoint:
        yield Subject(model, config, endpoint, getattr(torch, dtype))


@pytest.fixture
async def stub(subject: Subject) -> AsyncGenerator[Stub]:
    async with open_channel(subject.endpoint) as channel:
        yield stage_pb2_grpc.StageServiceStub(channel)


async def events_of(stub: Stub, request: stage_pb2.ExecuteStepRequest) -> list[stage_pb2.ExecuteStepResponse]:
    return [event async for event in stub.ExecuteStep(request, timeout=120)]


async def digest(stub: Stub, request: stage_pb2.ExecuteStepRequest) -> str:
    return md5(frames_of(await events_of(stub, request)))


async def paused(stub: Stub, spec: ImageSpec, request_id: str, *, steps: int) -> stage_pb2.Checkpoint:
    *_, last = await events_of(stub, step_request(spec, request_id, max_steps=steps))
    assert last.paused.checkpoint.engine_steps == steps
    return last.paused.checkpoint


async def test_sequential_requests_match_the_call(subject: Subject, stub: Stub) -> None:
    made = [await digest(stub, step_request(spec, f"alone-{i}")) for i, spec in enumerate(SPECS)]
    assert made == [subject.expected(spec) for spec in SPECS]
    assert len(set(made)) == len(SPECS)


@pytest.mark.parametrize("number", [2, 3, 4])
async def test_alternating_requests_match_the_call(subject: Subject, stub: Stub, number: int) -> None:
    specs = BY_TURNS[:number]
    requests = [step_request(spec, f"turns-{number}-{i}") for i, spec in enumerate(specs)]
    made = await asyncio.gather(*(digest(stub, request) for request in requests))
    assert made == [subject.expected(spec) for spec in specs]


async def test_a_paused_request_matches_the_call(subject: Subject, stub: Stub) -> None:
    checkpoint = await paused(stub, LONG, "pause", steps=2)
    between = await digest(stub, step_request(SPECS[0], "between"))
    made = await digest(stub, step_request(LONG, "pause", attempt=2, resume_from=checkpoint))
    assert [made, between] == [subject.expected(LONG), subject.expected(SPECS[0])]


async def test_a_request_resumed_by_its_steps_matches_the_call(subject: Subject, stub: Stub) -> None:
    await paused(stub, LONG, "kept", steps=3)
    made = await digest(stub, step_request(LONG, "kept", attempt=2, resume_from=stage_pb2.Checkpoint(engine_steps=3)))
    assert made == subject.expected(LONG)


async def test_a_request_transferred_twice_matches_the_call(subject: Subject, stub: Stub) -> None:
    async with served_diffusion(replace(subject.config, replica="tested-1")) as here:
        checkpoint = await paused(stub, LONG, "moves", steps=1)
        request = step_request(LONG, "moves", attempt=2, max_steps=2, resume_from=checkpoint)
        *_, last = await events_of(here.stub, request)
        request = step_request(LONG, "moves", attempt=3, resume_from=last.paused.checkpoint)
        made = [await digest(each, request) for each in (stub, here.stub)]
    assert made == [subject.expected(LONG)] * 2


async def test_a_request_transferred_over_the_data_plane_matches_the_call(subject: Subject, stub: Stub) -> None:
    """Transfers the state with PutChunk, whose size no message limits. GetChunk reads the same state."""
    moved = replace(subject.config, replica="tested-2")
    async with served_diffusion(moved) as here:
        state = stage_pb2.InputBinding(edge=STATE_EDGE, producer=moved.replica, attempt=2)
        goes_on = step_request(
            LONG, "flows", attempt=2, resume_from=stage_pb2.Checkpoint(engine_steps=2), inputs=[state]
        )
        made = asyncio.create_task(digest(stub, goes_on))
        target = stage_pb2.OutputBinding(
            edge=STATE_EDGE,
            consumer=subject.config.replica,
            endpoint=subject.endpoint,
            connector=chunk_pb2.CONNECTOR_AUTO,
            attempt=2,
        )
        *_, last = await events_of(here.stub, step_request(LONG, "flows", attempt=2, max_steps=2, outputs=[target]))
        key = chunk_pb2.EdgeKey(request_id="flows", edge=STATE_EDGE, attempt=2)
        read = [part async for part in here.stub.GetChunk(stage_pb2.GetChunkRequest(key=key), timeout=10)]
        assert await made == subject.expected(LONG)
    pieces = b"".join(part.fragment.payload for part in read)
    inline = b"".join(tensor.inline for part in read for tensor in part.chunk.data.tensors)
    assert pieces + inline == last.paused.checkpoint.tensors[0].inline
    assert read[-1].chunk.end.count == 1
