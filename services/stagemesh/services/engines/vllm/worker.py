"""The worker class of the vllm engine, which adds the features' mixins to vLLM's model runner.

The engine argument `worker_cls` contains the name of the class.
"""

import atexit
import gc
from importlib import import_module
from typing import TYPE_CHECKING, Any, cast

import torch
from vllm.distributed.parallel_state import get_pp_group
from vllm.platforms import current_platform
from vllm.v1.worker.gpu.model_runner import GPUModelRunner as GPUModelRunnerV2

from stagemesh.services.engines.vllm.features import RUNNER_MODULES

if TYPE_CHECKING:
    from vllm.v1.worker.gpu_worker import Worker
elif current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as Worker
else:
    from vllm.v1.worker.gpu_worker import Worker


class StageWorker(Worker):
    """vLLM's worker for a GPU or a CPU, extended with the features' mixins for the worker's model runner."""

    def init_device(self) -> None:
        """Creates vLLM's model runner and adds the features' mixins to its class."""
        super().init_device()
        runner: Any = self.model_runner
        kind: type[Any] = runner.__class__
        version = "RunnerV2" if issubclass(kind, GPUModelRunnerV2) else "RunnerV1"
        config = cast("dict[str, list[str]]", self.vllm_config.additional_config)
        mixins = [getattr(import_module(module), version) for module in config[RUNNER_MODULES]]
        if current_platform.is_cpu():
            mixins.append(FixesCpuRunner)
        runner.__class__ = type(f"Stage{kind.__name__}", (*mixins, kind), {})

    def call_runner(self, method: str, *args: object) -> Any:
        """Calls a method of the model runner and returns the method's result.

        The replica calls this method through vLLM's `collective_rpc`.
        """
        return getattr(self.model_runner, method)(*args)

    def shutdown(self) -> None:
        """Shuts the worker down.

        Freezes all objects at exit, so that the final garbage collection skips them, which saves seconds.
        """
        super().shutdown()
        atexit.register(gc.freeze)


class FixesCpuRunner:
    """A mixin for vLLM's V1 model runner on a CPU that fixes two of the runner's errors."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Loads the model and allocates the buffers for tensors from the previous pipeline rank.

        vLLM allocates these buffers in a warm-up that it skips on a CPU.
        """
        super().load_model(*args, **kwargs)  # type: ignore[misc]
        runner: Any = self
        if not get_pp_group().is_first_rank and runner.intermediate_tensors is None:
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
            )

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        """Samples tokens without the random generators of requests whose prefill is unfinished.

        vLLM samples for every request of a step and discards the token of an unfinished prefill. vLLM then rewinds the
        request's generator by the offset that a GPU would use. A CPU generator cannot be rewound, which terminates the
        engine ("CPU Generator does not use offset"). With this fix, the discarded token is sampled with the shared
        generator.
        """
        runner: Any = self
        generators: dict[int, torch.Generator] = runner.input_batch.generators
        unfinished = runner.discard_request_mask.np[: runner.input_batch.num_reqs].nonzero()[0]
        removed = {row: generators.pop(row) for row in unfinished.tolist() if row in generators}
        try:
            return super().sample_tokens(*args, **kwargs)  # type: ignore[misc]
        finally:
            generators.update(removed)
