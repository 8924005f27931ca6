"""vLLM's NIXL connector, changed so that a hand-over ticket alone decides when a prompt's KV cache is freed, and the
mixins for vLLM's model runners through which the replica reaches it.

vLLM itself frees the blocks of a prompt when one consumer reports that it has read them, or when a lease of
vLLM's own expires. A consumer that dies after its report could then not be replaced, and the blocks of a
cancelled request would be kept until the lease expires. A ticket is released exactly once, even if either end
dies. Therefore the workers free blocks when the replica tells them to, and ignore the reports.

vLLM creates `NixlConnector` by its name. Some of vLLM's checks compare this name. Do not rename it.
"""

import os
from typing import TYPE_CHECKING, Any

from stagemesh.connectors.nixl.environment import provide_nixl

provide_nixl()

from vllm.distributed.kv_transfer import get_kv_transfer_group  # noqa: E402  # imports nixl
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import (  # noqa: E402
    NixlPullConnector,
    NixlPullConnectorScheduler,
    NixlPullConnectorWorker,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.utils import get_base_request_id  # noqa: E402

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request


class NixlConnector(NixlPullConnector):
    """The connector of a prefill or decode stage, in vLLM's scheduler or in one of its workers."""

    def __init__(self, vllm_config: "VllmConfig", role: "KVConnectorRole", kv_cache_config: "KVCacheConfig") -> None:
        # On a CPU vLLM binds this thread, which computes the model, to the processor with the highest number. Several
        # engines of a host would share this one processor.
        processors = os.sched_getaffinity(0)
        super().__init__(vllm_config, role, kv_cache_config)
        os.sched_setaffinity(0, processors)
        if self.connector_scheduler is not None:
            self.connector_scheduler.__class__ = _Scheduler
        if self.connector_worker is not None:
            self.connector_worker.__class__ = _Worker


class _Scheduler(NixlPullConnectorScheduler):
    """Loads at most the tokens that the prefill stage has computed.

    A request that resumes from a checkpoint has the checkpoint's tokens after its prompt. vLLM would load their blocks,
    too, although the prefill stage does not have them.
    """

    def get_num_new_matched_tokens(self, request: "Request", num_computed_tokens: int) -> tuple[int, bool]:
        count, is_async = super().get_num_new_matched_tokens(request, num_computed_tokens)
        params = request.kv_transfer_params
        if count and params is not None and params.get("remote_num_tokens"):
            count = min(count, params["remote_num_tokens"] - num_computed_tokens)
        return (count, is_async) if count > 0 else (0, False)


class _Worker(NixlPullConnectorWorker):
    """Keeps the blocks of a prompt until the replica releases them.

    vLLM creates the object as its own class. Therefore this class must not have an `__init__`.
    """

    @property
    def _released(self) -> set[str]:
        """The names of requests whose blocks must be freed."""
        return vars(self).setdefault("_released_requests", set())  # type: ignore[no-any-return]

    def release(self, names: list[str]) -> None:
        """Frees the blocks of prompts in the next step. `names` are the requests' names in the replica.

        Ignores requests without blocks. A request that has just ended may get its blocks' lease in the next step.
        """
        known = {get_base_request_id(request_id) for request_id in self._reqs_to_process}
        self._released.update(known.intersection(names))

    def block_bytes(self) -> int:
        """Returns the number of bytes that a block occupies in this worker, over all layers."""
        storages = [cache.untyped_storage() for cache in self.device_kv_caches.values()]
        return sum({each.data_ptr(): each.nbytes() for each in storages}.values()) // self.num_blocks

    def _get_new_notifs(self) -> set[str]:
        """Returns the ids of the requests whose blocks are freed now."""
        self.nixl_wrapper.get_new_notifs()
        if not self._released:
            return set()
        freed = {request_id for request_id in self._reqs_to_send if get_base_request_id(request_id) in self._released}
        for request_id in freed:
            del self._reqs_to_send[request_id]
            self._reqs_to_process.discard(request_id)
            self._released.discard(get_base_request_id(request_id))
        return freed


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
