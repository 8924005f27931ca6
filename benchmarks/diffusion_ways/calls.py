"""Runs one request by a pipeline's steps and by a stage that serves the pipeline."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

import grpc
import torch

from stagemesh.rpc.channels import CHANNEL_OPTIONS
from stagemesh.services.engines.diffusion.model.modular import ModularStepPipeline
from stagemesh.services.engines.diffusion.state import DiffusionRequestState
from stagemesh.v1 import request_pb2, stage_pb2, stage_pb2_grpc
from tests.diffusion.tiny_calls import Wish
from tests.diffusion.turns import inputs_of


def begun(pipeline: ModularStepPipeline, wish: Wish) -> DiffusionRequestState:
    """Returns the state of a request before its first step."""
    state = DiffusionRequestState(f"r{wish.seed}", inputs_of("qwen-image", wish))
    pipeline.prepare_encode(state)
    return state


def step(pipeline: ModularStepPipeline, wish: Wish) -> torch.Tensor:
    """Runs a request step by step."""
    state = begun(pipeline, wish)
    while not state.denoised:
        (noise,) = pipeline.denoise_step([state])
        pipeline.step_scheduler(state, noise)
    return pipeline.post_decode(state)


class StageClient:
    """Calls a stage with one request or several concurrent ones."""

    def __init__(self, endpoint: str) -> None:
        self._channel = grpc.insecure_channel(endpoint, options=CHANNEL_OPTIONS)
        self._stub = stage_pb2_grpc.StageServiceStub(self._channel)
        self._pool = ThreadPoolExecutor(16)
        self._number = 0

    def close(self) -> None:
        """Closes the channel."""
        self._pool.shutdown()
        self._channel.close()

    def draw(self, wish: Wish) -> float:
        """Runs a request and returns the seconds until its image arrived."""
        return self.start(wish)()

    def start(self, wish: Wish) -> Callable[[], float]:
        """Starts a request and returns a function that waits for the image and returns the seconds since the start."""
        began_s = time.perf_counter()
        future = self._pool.submit(self._run, self._request(wish))
        return lambda: future.result() - began_s

    def draw_all(self, wishes: Sequence[Wish]) -> float:
        """Runs all requests at once and returns the seconds until the last image arrived."""
        return max([finish() for finish in [self.start(wish) for wish in wishes]])

    def _run(self, request: stage_pb2.ExecuteStepRequest) -> float:
        for _ in self._stub.ExecuteStep(request, timeout=300):
            pass
        return time.perf_counter()

    def _request(self, wish: Wish) -> stage_pb2.ExecuteStepRequest:
        self._number += 1
        options = {
            "height": wish.height,
            "width": wish.width,
            "num_inference_steps": wish.steps,
            "guidance_scale": wish.scale,
        }
        return stage_pb2.ExecuteStepRequest(
            request_id=f"r{self._number}",
            step_id=f"r{self._number}",
            attempt=1,
            input=request_pb2.Input(text=wish.prompt, negative_prompt=wish.negative_prompt),
            parameters=request_pb2.Parameters(seed=wish.seed, options=options),
            streamed=["frames"],
        )
