"""Starts diffusion engines and stages, as processes or in this process, and builds requests to them."""

import hashlib
import subprocess
from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from pydantic import JsonValue

from stagemesh.common.process.stage_process import StageConfig
from stagemesh.common.wire.tensors import Array, read_inline, to_messages
from stagemesh.connectors.data_plane import DataPlane
from stagemesh.services.engines.base import Task
from stagemesh.services.engines.diffusion import FRAMES, signature_of
from stagemesh.services.engines.diffusion.engine import DiffusionEngine
from stagemesh.services.engines.diffusion.options import stage_options
from stagemesh.services.stage.runtime import StageRuntime
from stagemesh.v1 import request_pb2, stage_pb2
from tests.children import config_command, killed_at_end, read_endpoint
from tests.diffusion.tiny.calls import WAN_FRAMES, ImageSpec
from tests.engines import support
from tests.engines.support import collect, packets, stage_config
from tests.rpc.health_calls import wait_status
from tests.stage.replicas import Replica, served

READY_TIMEOUT_S = 120


def diffusion_config(model: str, folder: Path, **options: JsonValue) -> StageConfig:
    """Returns a stage that runs one request's step at a time and alternates between requests."""
    frames: dict[str, JsonValue] = (
        {"max_frames": WAN_FRAMES, "num_frames": WAN_FRAMES} if model.startswith("wan") else {}
    )
    given: dict[str, JsonValue] = {
        "dtype": "float32",
        "device": "cpu",
        "height": 64,
        "width": 64,
        "max_side": 1024,
        "num_inference_steps": 4,
        "guidance_scale": 3.0,
        "max_batch": 1,
        "max_wait_steps": 0,
    }
    return stage_config("diffusion", model=str(folder), options=given | frames | options)


def started(config: StageConfig) -> AbstractAsyncContextManager[DiffusionEngine]:
    """Starts an engine in this process."""
    return support.started(DiffusionEngine(config))


def painting(folder: Path, **options: JsonValue) -> AbstractAsyncContextManager[DiffusionEngine]:
    """Starts an engine of a model for images in this process."""
    return started(diffusion_config("qwen-image", folder, **options))


def image_options(spec: ImageSpec) -> dict[str, float]:
    """Returns a request's options for an image."""
    return {"height": spec.height, "width": spec.width, "num_inference_steps": spec.steps, "guidance_scale": spec.scale}


def image_task(spec: ImageSpec, request_id: str = "r", **changed: Any) -> Task:
    """Returns a request for an image as numbers."""
    plain = Task(
        request_id,
        spec.seed,
        prompt=spec.prompt,
        negative_prompt=spec.negative_prompt,
        options=image_options(spec),
        wanted=frozenset({FRAMES}),
    )
    return replace(plain, **changed)


async def made_frames(engine: DiffusionEngine, task: Task) -> Array:
    """Runs a task and returns the frames of its last image."""
    made: Array = packets(await collect(engine.submit(task)))[-1].tensors[FRAMES]
    return made


@contextmanager
def stage_process(config: StageConfig, folder: Path) -> Generator[str]:
    """Starts a stage process. Yields its endpoint once it is ready."""
    command = config_command("stagemesh.services.stage", config, folder / f"{config.replica}.json")
    with killed_at_end(subprocess.Popen(command, stderr=subprocess.PIPE, text=True)) as process:
        endpoint = read_endpoint(process)
        with grpc.insecure_channel(endpoint) as channel:
            wait_status(channel, timeout_s=READY_TIMEOUT_S)
        yield endpoint


@asynccontextmanager
async def served_diffusion(config: StageConfig) -> AsyncGenerator[Replica]:
    """Starts a stage in this process. Yields it once it is ready."""
    plane = DataPlane(replica=config.replica, pipeline=config.pipeline, generation="1", arena_bytes=64 << 20)
    runtime = StageRuntime(DiffusionEngine(config), plane, config, signature_of(stage_options(config.options)))
    try:
        await runtime.start()
        async with served(runtime) as replica:
            yield replica
    finally:
        await runtime.close()


def step_request(
    spec: ImageSpec,
    request_id: str = "r",
    *,
    attempt: int = 1,
    max_steps: int | None = None,
    resume_from: stage_pb2.Checkpoint | None = None,
    inputs: Sequence[stage_pb2.InputBinding] = (),
    outputs: Sequence[stage_pb2.OutputBinding] = (),
) -> stage_pb2.ExecuteStepRequest:
    """Returns a request for an image as numbers."""
    return stage_pb2.ExecuteStepRequest(
        request_id=request_id,
        step_id=f"{request_id}/tested/{attempt}",
        attempt=attempt,
        input=request_pb2.Input(text=spec.prompt, negative_prompt=spec.negative_prompt),
        parameters=request_pb2.StageParameters(options=to_messages(image_options(spec))),
        seed=spec.seed,
        streamed=[stage_pb2.StreamedOutput(tensor="frames")],
        max_engine_steps=max_steps,
        resume_from=resume_from,
        inputs=inputs,
        outputs=outputs,
    )


def frames_of(events: Sequence[stage_pb2.ExecuteStepResponse]) -> Array:
    """Returns the result of a finished step, float32[frames, 3, height, width]."""
    assert events[-1].WhichOneof("event") == "finished"
    *_, last = (event.output for event in events if event.output.HasField("tensor"))
    assert last.name == "frames"
    return read_inline(last.tensor)


def md5(numbers: Array) -> str:
    """Returns the digest of float32 numbers."""
    assert numbers.dtype == np.float32
    return hashlib.md5(numbers.tobytes(), usedforsecurity=False).hexdigest()
