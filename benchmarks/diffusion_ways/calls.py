"""Runs an image on a pipeline step by step, or on a stage."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import grpc
import torch

from stagemesh.common.wire.tensors import to_messages
from stagemesh.rpc.channels import CHANNEL_OPTIONS
from stagemesh.services.engines.diffusion.model.modular_pipeline import ModularStepPipeline
from stagemesh.services.engines.diffusion.state import DiffusionRequestState
from stagemesh.v1 import request_pb2, stage_pb2, stage_pb2_grpc
from tests.diffusion.pipeline_runs import frames_of, inputs_of
from tests.diffusion.tiny.calls import ImageSpec


def begun(pipeline: ModularStepPipeline, spec: ImageSpec) -> DiffusionRequestState:
    """Returns a request before its first step."""
    state = DiffusionRequestState(f"r{spec.seed}", inputs_of("qwen-image", spec))
    pipeline.prepare_encode(state)
    return state


def step(pipeline: ModularStepPipeline, spec: ImageSpec) -> torch.Tensor:
    """Returns an image that is generated step by step."""
    state = begun(pipeline, spec)
    while not state.denoised:
        (noise,) = pipeline.denoise_step([state])
        pipeline.step_scheduler(state, noise)
    return frames_of(pipeline.post_decode(state))


class StageClient:
    """Calls a stage, with one request or several concurrent requests."""

    def __init__(self, endpoint: str) -> None:
        self._channel = grpc.insecure_channel(endpoint, options=CHANNEL_OPTIONS)
        self._stub = stage_pb2_grpc.StageServiceStub(self._channel)
        self._pool = ThreadPoolExecutor(16)
        self._number = 0

    def close(self) -> None:
        """Closes the channel."""
        self._pool.shutdown()
        self._channel.close()

    def draw(self, spec: ImageSpec) -> float:
        """Requests an image. Returns the seconds until it arrived."""
        return self.start(spec)()

    def start(self, spec: ImageSpec) -> Callable[[], float]:
        """Requests an image. Returns a function that waits for it and returns the seconds since the request."""
        began_s = time.perf_counter()
        future = self._pool.submit(self._run, self._request(spec))
        return lambda: future.result() - began_s

    def draw_all(self, specs: Sequence[ImageSpec]) -> float:
        """Requests images concurrently. Returns the seconds until the last one arrived."""
        return max([finish() for finish in [self.start(spec) for spec in specs]])

    def _run(self, request: stage_pb2.ExecuteStepRequest) -> float:
        for _ in self._stub.ExecuteStep(request, timeout=300):
            pass
        return time.perf_counter()

    def _request(self, spec: ImageSpec) -> stage_pb2.ExecuteStepRequest:
        self._number += 1
        options = {
            "height": spec.height,
            "width": spec.width,
            "num_inference_steps": spec.steps,
            "guidance_scale": spec.scale,
        }
        return stage_pb2.ExecuteStepRequest(
            request_id=f"r{self._number}",
            step_id=f"r{self._number}",
            attempt=1,
            input=request_pb2.Input(text=spec.prompt, negative_prompt=spec.negative_prompt),
            parameters=request_pb2.StageParameters(options=to_messages(options)),
            seed=spec.seed,
            streamed=[stage_pb2.StreamedOutput(tensor="frames")],
        )
