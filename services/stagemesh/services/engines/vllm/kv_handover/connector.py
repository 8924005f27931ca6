"""vLLM's NIXL connector, changed so that a hand-over ticket alone decides when a prompt's KV cache is freed, and the
mixins for vLLM's model runners through which the replica reaches it.

vLLM itself frees the blocks of a prompt when one consumer reports that it has read them, or when a lease of
vLLM's own expires. A consumer that dies after its report could then not be replaced, and the blocks of a
cancelled request would be kept until the lease expires. A ticket is released exactly once, even if either end
dies. Therefore the workers free blocks when the replica tells them to, and ignore the reports.

vLLM would also serve the handshake, the data by which workers reach each other's memory, to everyone at a port. Here it
travels in the tickets, in the place of the prefill stage's host.

vLLM creates `NixlConnector` by its name. Some of vLLM's checks compare this name. Do not rename it.
"""

import base64
import os
import time
import zlib
from collections.abc import Mapping
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import msgspec

from stagemesh.connectors.nixl.environment import provide_nixl
from stagemesh.connectors.packets import MAX_DESCRIPTOR_BYTES
from stagemesh.services.engines.vllm.engine_core import record_failure

provide_nixl()

from vllm.distributed.kv_transfer import get_kv_transfer_group  # noqa: E402  # imports nixl
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import (  # noqa: E402
    NixlPullConnector,
    NixlPullConnectorScheduler,
    NixlPullConnectorWorker,
    base_worker,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.utils import get_base_request_id  # noqa: E402

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import ReqMeta
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request


_MAX_TEXT_BYTES = MAX_DESCRIPTOR_BYTES * 3 // 4
"""The maximum size of a handshake's text. The rest of the ticket's descriptor is for the numbers of blocks."""
_MAX_HANDSHAKE_BYTES = 1 << 22


def handshake_text(payloads: Mapping[tuple[int, int], object]) -> str:
    """Returns the text that contains the payload of each worker, by its pipeline rank and tensor rank.

    Raises ValueError if the text is too large for a ticket.
    """
    encoder = msgspec.msgpack.Encoder()
    data = encoder.encode([(*ranks, encoder.encode(payload)) for ranks, payload in payloads.items()])
    text = base64.b64encode(zlib.compress(data)).decode()
    if len(text) > _MAX_TEXT_BYTES:
        raise ValueError(
            f"the handshake of {len(payloads)} workers has {len(text)} bytes, and a ticket has space for "
            f"{_MAX_TEXT_BYTES}; lower tensor_parallel_size or pipeline_parallel_size, or do not split the stage"
        )
    return text


class HandshakeAnswers:
    """Answers the queries of vLLM's worker from a handshake's text, in the place of a ZMQ socket."""

    def __init__(self, path: str) -> None:
        """`path` is the address that vLLM makes of the text. Raises ValueError or zlib.error if it is damaged."""
        text = path.removeprefix("tcp://").rpartition(":")[0]
        data = zlib.decompressobj().decompress(base64.b64decode(text, validate=True), _MAX_HANDSHAKE_BYTES)
        payloads = msgspec.msgpack.decode(data, type=list[tuple[int, int, bytes]])
        self._payloads = {tuple(ranks): payload for *ranks, payload in payloads}
        self._answer = b""

    def setsockopt(self, *_: object) -> None:
        """Does nothing, because answers need no time."""

    def send(self, query: bytes) -> None:
        """Accepts the query for the payload of one worker. Raises KeyError if the text does not contain it."""
        _, *ranks = msgspec.msgpack.decode(query)
        self._answer = self._payloads[tuple(ranks)]

    def recv_multipart(self) -> list[bytes]:
        """Returns the payload, and this process's clock, because vLLM computes an offset that it does not need here."""
        return [self._answer, msgspec.msgpack.encode(time.perf_counter())]


def _connect(_: object, path: str) -> nullcontext[HandshakeAnswers]:
    return nullcontext(HandshakeAnswers(path))


_module: Any = base_worker
_module.zmq_ctx = _connect


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
    """Loads at most the tokens that the prefill stage has computed, and does not listen at a port.

    A request that resumes from a checkpoint has the checkpoint's tokens after its prompt. vLLM would load their blocks,
    too, although the prefill stage does not have them.
    """

    def set_xfer_handshake_metadata(self, metadata: Mapping[tuple[int, int], object]) -> None:
        """Puts the handshake into the host that vLLM writes into the tickets. Raises ValueError if it is too large."""
        try:
            self.side_channel_host = handshake_text(metadata)
        except ValueError as exc:
            record_failure(exc)
            raise

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

    def _read_blocks_for_req(self, req_id: str, meta: "ReqMeta") -> None:
        """Reads a prompt's blocks. vLLM computes the prompt if the ticket does not describe such blocks."""
        try:
            super()._read_blocks_for_req(req_id, meta)
        except Exception as exc:  # noqa: BLE001  # vLLM asserts what a ticket must contain
            self._log_failure(failure_type="invalid_ticket", req_id=req_id, error=exc, meta=meta)
            if req_id in self._recving_metadata:
                self._handle_failed_transfer(req_id, None, self._recv_failures, record_failed_transfer=False)

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


class RunnerV1:
    """A mixin for both of vLLM's model runners."""

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


RunnerV2 = RunnerV1
