"""Mixins for vLLM's model runners, through which the replica reaches the KV connector of a worker."""

from typing import Any

from vllm.distributed.kv_transfer import get_kv_transfer_group


class _HandsOver:
    def release_prompts(self, names: list[str]) -> None:
        """Frees the KV cache of prompts. `names` are the requests' names in the replica."""
        self._connector_worker.release(names)

    def block_bytes(self) -> int:
        """Returns the number of bytes that a block of the KV cache occupies in this worker."""
        size_bytes: int = self._connector_worker.block_bytes()
        return size_bytes

    @property
    def _connector_worker(self) -> Any:
        connector: Any = get_kv_transfer_group()
        return connector.connector_worker


class RunnerV1(_HandsOver):
    """A mixin for the model runner in `vllm.v1.worker.gpu_model_runner`."""


class RunnerV2(_HandsOver):
    """A mixin for the model runner in `vllm.v1.worker.gpu.model_runner`."""
