"""The KV hand-over feature: a prefill stage computes prompts, and a decode stage samples tokens from their KV cache.

The prefill stage runs a request for one token, which it drops, and emits a ticket. The decode stage waits for the
ticket, and then runs the request with vLLM's parameters from the ticket, so that vLLM's own connector reads the KV
cache. It computes the prompt itself if no ticket arrives, or if the ticket cannot be used.
"""

import asyncio
import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Annotated, TypeAlias

import msgspec
from vllm.config import KVTransferConfig
from vllm.platforms import current_platform

from stagemesh.common.errors import (
    InvalidChunkError,
    InvalidRequestError,
    StagemeshError,
    UnavailableError,
    needs_extra,
)
from stagemesh.common.process.settings import set_library_variables
from stagemesh.common.process.stage_process import StageConfig
from stagemesh.connectors.nixl.environment import prepare, provide_nixl
from stagemesh.connectors.packets import MAX_DESCRIPTOR_BYTES, OfferedTicket, Packet, Ticket
from stagemesh.connectors.peer_timeouts import is_recoverable
from stagemesh.services.engines.base import Emission, Task
from stagemesh.services.engines.vllm.engine_core import runner_call
from stagemesh.services.engines.vllm.features import EngineRequest, RequestFeature, RequestHook
from stagemesh.services.engines.vllm.options import KV_CACHE, KV_CACHE_KIND, KvHandoverOptions
from stagemesh.services.engines.vllm.requests import CheckedParams

if TYPE_CHECKING:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM


TIME_LIMIT_S = 30.0
"""The time for which the KV cache of a prompt is kept after its offer, and after each acceptance, in seconds."""
_RENEWALS = 3
"""The number of acceptances within a ticket's time limit, while vLLM has not read the KV cache."""
_VLLM_LEASE_S = 86_400
"""vLLM's own lease on the KV cache, in seconds. Longer than any request, because the ticket ends the lease."""
_PARAMS = "kv_transfer_params"
"""The name of the connector's parameters in vLLM's sampling parameters."""
_Name: TypeAlias = Annotated[str, msgspec.Meta(pattern=r"^[ -~]{1,512}\Z")]
_Block: TypeAlias = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
_Ranks: TypeAlias = Annotated[int, msgspec.Meta(ge=1, le=1024)]

_log = logging.getLogger(__name__)


class KvParameters(msgspec.Struct, frozen=True):
    """The parameters with which vLLM's connector in the decode stage finds the KV cache, under vLLM's names."""

    remote_block_ids: Annotated[list[list[_Block]], msgspec.Meta(min_length=1)]
    """The blocks of the prompt in each group of the KV cache."""
    remote_engine_id: _Name
    remote_request_id: _Name
    remote_host: Annotated[str, msgspec.Meta(pattern=rf"^[ -~]{{0,{MAX_DESCRIPTOR_BYTES}}}\Z")]
    """The handshake (`connector.handshake_text`)."""
    remote_port: Annotated[int, msgspec.Meta(ge=0, le=65_535)]
    tp_size: _Ranks
    dcp_size: _Ranks
    pp_size: _Ranks
    remote_num_tokens: Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]


class KvDescriptor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The descriptor of a ticket of the kind "vllm.kv"."""

    fingerprint: bytes
    """The fingerprint of the prompt (`RequestPrompt.fingerprint`)."""
    parameters: KvParameters


class _KvHandover(RequestFeature):
    """Base class of the features of both stages. Configures vLLM's connector."""

    runner_module = "stagemesh.services.engines.vllm.kv_handover.connector"

    def __init__(self, options: KvHandoverOptions, *, config: StageConfig) -> None:
        self._options, self._stage, self._permits_plain_tcp = options, config.stage, config.permits_plain_tcp

    def set_arguments(self, arguments: "AsyncEngineArgs") -> None:
        if arguments.kv_transfer_config is not None:
            raise self._invalid("kv_transfer_config and kv_handover exclude each other; remove kv_transfer_config")
        if arguments.data_parallel_size > 1:
            raise self._invalid("data_parallel_size must be 1 with kv_handover; use more replicas")
        prepare(permits_tcp=self._permits_plain_tcp)
        # vLLM would set this variable when it loads the library.
        set_library_variables({"UCX_RCACHE_MAX_UNRELEASED": "1024"})
        with needs_extra("nixl", of=f"stage {self._stage}: kv_handover"):
            provide_nixl()
        arguments.kv_transfer_config = KVTransferConfig(
            kv_connector="NixlConnector",
            kv_connector_module_path="stagemesh.services.engines.vllm.kv_handover.connector",
            kv_role="kv_producer" if self._options.role == "prefill" else "kv_consumer",
            kv_buffer_device=current_platform.device_type,
            kv_load_failure_policy="recompute",
            kv_connector_extra_config={"kv_lease_duration": _VLLM_LEASE_S},
        )

    def is_short(self, request: EngineRequest) -> bool:
        """Returns whether the decode stage computes the prompt of a request itself, because the prompt is short."""
        return len(request.prompt.token_ids) < self._options.min_tokens


class Prefill(_KvHandover):
    """The request feature of a prefill stage. Emits a ticket for each prompt, and frees its KV cache on release."""

    def __init__(self, options: KvHandoverOptions, *, config: StageConfig) -> None:
        super().__init__(options, config=config)
        self._block_bytes = 0
        self._released: list[str] = []
        self._sending: asyncio.Task[None] | None = None

    async def start(self, llm: "AsyncLLM") -> None:
        await super().start(llm)
        self._block_bytes = sum(await runner_call(llm, "block_bytes"))

    def completes(self, request: EngineRequest) -> bool:
        return self.is_short(request)

    def open(self, request: EngineRequest, held: AsyncExitStack) -> RequestHook | None:
        if self.is_short(request):
            return None
        request.params = CheckedParams(
            max_tokens=1,
            temperature=0.0,
            ignore_eos=True,
            detokenize=False,
            extra_args={_PARAMS: {"do_remote_decode": True}},
        )
        offer = _Offer(request, self)
        held.callback(offer.end)
        return offer

    def offer(self, request: EngineRequest, values: Mapping[str, object]) -> OfferedTicket:
        """Returns the ticket for the KV cache of a finished request.

        `values` are the parameters that vLLM's connector has returned. Raises InvalidChunkError if they are too large
        for a ticket.
        """
        parameters = msgspec.convert(values, KvParameters)
        return OfferedTicket(
            KV_CACHE_KIND,
            msgspec.msgpack.encode(KvDescriptor(request.prompt.fingerprint, parameters)),
            size_bytes=sum(map(len, parameters.remote_block_ids)) * self._block_bytes,
            time_limit_s=TIME_LIMIT_S,
            on_release=lambda: self.release(request.name),
        )

    def release(self, name: str) -> None:
        """Frees the KV cache of the request `name`. Requests that end within one iteration of the event loop are sent
        to vLLM together.
        """
        self._released.append(name)
        if self._sending is None:
            self._sending = asyncio.create_task(self._send(), name="release KV caches")

    async def _send(self) -> None:
        try:
            while self._released:
                names, self._released = self._released, []
                await runner_call(self.llm, "release_prompts", names)
        except UnavailableError:
            # The KV cache has ended with vLLM's engine core, and `VllmEngine.wait_failed` reports that.
            self._released.clear()
        except StagemeshError as exc:
            _log.warning("stage %s: cannot free the KV cache of prompts: %s", self._stage, exc.message)
        finally:
            self._sending = None


class _Offer(RequestHook):
    """Emits the ticket of one request. Frees the KV cache if there is no ticket when the request ends."""

    def __init__(self, request: EngineRequest, feature: Prefill) -> None:
        self._request, self._feature = request, feature
        self._has_ticket = False

    def observe(self, *, finished: bool) -> Iterator[Emission]:
        # The decode stage samples this token again, with the parameters of the request.
        self._request.sampled.clear()
        parameters = self._request.kv_transfer_params
        if not finished or parameters is None:
            return
        try:
            ticket = self._feature.offer(self._request, parameters)
        except InvalidChunkError as exc:
            _log.warning("request %s: the decode stage computes the prompt: %s", self._request.name, exc.message)
            return
        self._has_ticket = True
        yield Emission(Packet({}, tickets={KV_CACHE: ticket}))

    def end(self) -> None:
        if not self._has_ticket:
            self._feature.release(self._request.name)


class Decode(_KvHandover):
    """The request feature of a decode stage. Runs each request from the KV cache that its ticket describes."""

    def __init__(self, options: KvHandoverOptions, *, config: StageConfig) -> None:
        super().__init__(options, config=config)
        self._accepted: dict[str, _AcceptedTicket] = {}
        """The tickets of requests that vLLM has not received yet, by the requests' names in vLLM."""

    async def prepare(self, request: EngineRequest, held: AsyncExitStack) -> None:
        """Waits for the ticket of a request, and accepts it.

        Raises InvalidRequestError (INVALID_TICKET) if the ticket's descriptor cannot be read.
        """
        if not self.is_short(request) and (cause := await self._accept(request, held)):
            _log.warning("stage %s computes the prompt of request %s itself: %s", self._stage, request.name, cause)

    async def _accept(self, request: EngineRequest, held: AsyncExitStack) -> str:
        """Returns why the stage computes the prompt of the request itself, or "" if the ticket was accepted."""
        try:
            async with asyncio.timeout(self._options.wait_s):
                ticket = await _receive(request.task)
        except TimeoutError:
            return f"its KV cache did not arrive within {self._options.wait_s:g} s"
        except StagemeshError as exc:
            if not is_recoverable(exc):
                raise
            return exc.message
        if ticket is None:
            return "the prefill stage has sent no KV cache"
        accepted = _AcceptedTicket(ticket, request.name)
        held.push_async_callback(accepted.close)
        if accepted.descriptor.fingerprint != request.prompt.fingerprint:
            return "the prefill stage has computed another prompt"
        try:
            await accepted.renew()
        except UnavailableError as exc:
            return exc.message
        self._accepted[request.name] = accepted
        held.callback(self._accepted.pop, request.name, None)
        return ""

    def open(self, request: EngineRequest, held: AsyncExitStack) -> RequestHook | None:  # noqa: ARG002  # see `prepare`
        accepted = self._accepted.pop(request.name, None)
        if accepted is None:
            return None
        parameters = {"do_remote_prefill": True, **msgspec.structs.asdict(accepted.descriptor.parameters)}
        request.params.extra_args = {**(request.params.extra_args or {}), _PARAMS: parameters}
        accepted.keep(self.llm)
        return accepted


class _AcceptedTicket(RequestHook):
    """A ticket that is accepted regularly until vLLM has read the KV cache, and is then released."""

    def __init__(self, ticket: Ticket, name: str) -> None:
        """Reads the ticket's descriptor. Raises InvalidRequestError (INVALID_TICKET) if that fails."""
        self.descriptor = _read_descriptor(ticket)
        self._ticket: Ticket | None = ticket
        self._time_limit_s, self._name = ticket.time_limit_s, name
        self._until_s = 0.0
        """The time on the event loop's clock until which the KV cache is kept."""
        self._lost: UnavailableError | None = None
        self._renewing: asyncio.Task[None] | None = None

    async def renew(self) -> None:
        """Accepts the ticket. Raises UnavailableError if the KV cache has been freed or its stage is lost."""
        assert self._ticket is not None, "the ticket is renewed until it is released"
        self._until_s = await self._ticket.accept()

    def keep(self, llm: "AsyncLLM") -> None:
        """Accepts the ticket regularly, until `observe` or `close`. Aborts vLLM's request if that fails."""
        self._renewing = asyncio.create_task(self._keep(llm), name=f"keep the KV cache of {self._name}")

    def observe(self, *, finished: bool) -> Iterable[Emission]:  # noqa: ARG002  # the first output ends the reading
        """Releases the ticket after vLLM's first output, which shows that vLLM has read the KV cache.

        Raises UnavailableError if the KV cache may have been freed before vLLM read it.
        """
        if self._lost is not None:
            raise self._lost
        if self._ticket is not None:
            if asyncio.get_running_loop().time() > self._until_s:
                raise UnavailableError("the KV cache was read after its ticket's time limit", reason="TICKET_EXPIRED")
            self._release()
        return ()

    async def close(self) -> None:
        """Releases the ticket, unless it is released already."""
        self._release()
        if self._renewing is not None:
            await asyncio.wait([self._renewing])

    def _release(self) -> None:
        ticket, self._ticket = self._ticket, None
        if ticket is not None:
            ticket.release()
        if self._renewing is not None:
            self._renewing.cancel()

    async def _keep(self, llm: "AsyncLLM") -> None:
        try:
            while True:
                await asyncio.sleep(self._time_limit_s / _RENEWALS)
                await self.renew()
        except UnavailableError as exc:
            self._lost = exc
            await llm.abort(self._name)


def handover_feature(options: KvHandoverOptions, *, config: StageConfig) -> RequestFeature:
    """Returns the feature for the stage's role."""
    return Prefill(options, config=config) if options.role == "prefill" else Decode(options, config=config)


async def _receive(task: Task) -> Ticket | None:
    """Returns the ticket that a task receives, or None if its edge ends without one.

    Raises the error of the edge if the edge fails.
    """
    for inlet in task.inlets.values():
        async for packet in inlet:
            if KV_CACHE in packet.tickets:
                return packet.tickets[KV_CACHE]
    return None


def _read_descriptor(ticket: Ticket) -> KvDescriptor:
    try:
        return msgspec.msgpack.decode(ticket.descriptor, type=KvDescriptor)
    except msgspec.MsgspecError as exc:
        ticket.release()
        raise InvalidRequestError(
            f"the descriptor of the ticket {KV_CACHE} cannot be read ({exc}); run the same version in both stages",
            reason="INVALID_TICKET",
        ) from exc
