"""The embeddings feature: a stage receives embeddings from an upstream stage instead of a prompt.

The replica reads the embeddings of a request from an edge while vLLM already runs the request. vLLM's workers receive
the embeddings through shared memory, which has one slot for each running request. The shared memory is a sparse file:
the pages of a slot are allocated when data is written, and freed when the slot is released. A worker reads a row again
if the row's step is repeated after a preemption. The scheduler runs a step only after the step's rows are in the shared
memory (`run_ahead`).
"""

import asyncio
import mmap
import os
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from stagemesh.common.errors import InvalidChunkError, InvalidRequestError, NotReadyError
from stagemesh.common.tensors import DTYPES, Array, TensorSpec
from stagemesh.connectors.edge import Packet
from stagemesh.services.engines.base import EngineEvent, Task
from stagemesh.services.engines.vllm.core_calls import runner_call
from stagemesh.services.engines.vllm.features import (
    UNLIMITED,
    EngineRequest,
    RequestFeature,
    RequestHook,
    RequestLimit,
    RequestPrompt,
    set_argument,
)
from stagemesh.services.engines.vllm.options import INPUTS_EMBEDS

if TYPE_CHECKING:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

PLACEHOLDER = 0
"""The id of the token that represents an embedding in a prompt."""


class Embedded(msgspec.Struct, frozen=True):
    """The location of a request's embeddings in the shared memory, and the length of the request's prompt.

    The replica sends this object to vLLM's workers with the request (`features.set_argument`).
    """

    slot: int
    prompt_tokens: int
    """The number of prompt tokens.

    Rows at positions below this number replace the embeddings of the placeholder tokens. Later rows are added to the
    embeddings of sampled tokens.
    """


@dataclass(frozen=True)
class EmbeddingTicket:
    """The data that a worker process needs to open the shared memory for embeddings."""

    process_id: int
    file_descriptor: int
    slots: int
    positions: int
    """The number of rows in a slot. Equals the maximum number of tokens in the model's context."""
    width: int
    dtype: str
    """The name of the dtype of the rows. The name is the same in the API and in torch."""

    @property
    def slot_bytes(self) -> int:
        """The size of a slot in bytes, rounded up to whole pages."""
        size_bytes = self.positions * self.width * DTYPES[self.dtype].itemsize
        return -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE


class EmbeddingMemory:
    """The shared memory for embeddings, mapped into one process."""

    def __init__(self, ticket: EmbeddingTicket) -> None:
        """Maps the shared memory into this process. Raises NotReadyError if the memory's file cannot be opened."""
        self.ticket = ticket
        path = f"/proc/{ticket.process_id}/fd/{ticket.file_descriptor}"
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                self._mapping = mmap.mmap(fd, ticket.slots * ticket.slot_bytes)
            finally:
                os.close(fd)
        except OSError as exc:
            raise NotReadyError(
                f"the replica's embeddings cannot be opened ({exc.strerror or exc}); run its workers on its host, in "
                "its pid namespace, as its user",
                reason="ARENA_NOT_SHARED",
            ) from exc

    def rows(self, slot: int, position: int, count: int) -> Array:
        """Returns a view of `count` rows of a slot, [count, width], starting at token position `position`.

        The replica writes rows through the view, and workers read them. A row contains zeros until it is written.
        """
        ticket = self.ticket
        assert 0 <= slot < ticket.slots, f"slot {slot} of {ticket.slots}"
        assert 0 <= position <= position + count <= ticket.positions, f"{count} rows at {position}"
        dtype = DTYPES[ticket.dtype]
        offset = slot * ticket.slot_bytes + position * ticket.width * dtype.itemsize
        return np.frombuffer(self._mapping, dtype, count * ticket.width, offset).reshape(count, ticket.width)

    def clear(self, slot: int) -> None:
        """Frees the memory pages of a slot. The slot contains zeros afterwards."""
        size_bytes = self.ticket.slot_bytes
        self._mapping.madvise(mmap.MADV_REMOVE, slot * size_bytes, size_bytes)


class EmbeddingFlow(RequestHook):
    """Reads one request's embeddings from an edge and writes them into the request's slot of the shared memory."""

    _reading: asyncio.Task[None]

    def __init__(self, flow: AsyncIterable[Packet], memory: EmbeddingMemory, slot: int) -> None:
        self._flow = aiter(flow)
        self._memory, self.slot = memory, slot
        self._spec = TensorSpec(memory.ticket.dtype, ("tokens", memory.ticket.width))
        self._next_position = 0
        self._prompt_tokens = 0
        self._ended = False

    async def read_prompt(self) -> int:
        """Reads packets until the first row and the prompt's length have arrived. Returns this length in tokens.

        The metadata field `prompt_tokens` of a packet contains the prompt's length. If no packet has this field, all
        rows belong to the prompt, and all packets are read.

        Raises InvalidRequestError if the edge delivers no rows or if the prompt is too long for the model. Raises
        InvalidChunkError if a packet is invalid or if rows are missing. If the edge ends with an error, raises this
        error.
        """
        while await self._read() and not (self._prompt_tokens and self._next_position):
            pass
        if not self._next_position:
            raise InvalidRequestError("the edge delivered no embeddings", reason="EMPTY_PROMPT")
        self._prompt_tokens = self._prompt_tokens or self._next_position
        self._check_complete()
        return self._prompt_tokens

    def start(self, limit: RequestLimit, abort: Callable[[], Awaitable[None]]) -> None:
        """Starts a task that reads the remaining packets and increases `limit` as rows arrive.

        Rows beyond the model's maximum length are dropped. If reading fails, the task calls `abort`, and `observe` then
        raises the failure's error.
        """
        self._set_limit(limit)
        self._reading = asyncio.create_task(self._read_rest(limit, abort), name="embeddings")

    def observe(self, *, finished: bool) -> tuple[()]:  # noqa: ARG002  # the request may finish before its flow
        if self._reading.done():
            self._reading.result()
        return ()

    async def finish(self) -> AsyncGenerator[EngineEvent]:
        await self._reading
        async for event in super().finish():
            yield event

    async def stop(self) -> None:
        """Stops the task that reads packets. If reading has failed, does not raise the failure's error."""
        self._reading.cancel()
        await asyncio.wait([self._reading])
        if not self._reading.cancelled():
            self._reading.exception()

    # -- internals

    async def _read_rest(self, limit: RequestLimit, abort: Callable[[], Awaitable[None]]) -> None:
        try:
            while not self._ended:
                await self._read()
                self._check_complete()
                self._set_limit(limit)
        except Exception:
            await abort()
            raise

    def _set_limit(self, limit: RequestLimit) -> None:
        limit.set_arrived(UNLIMITED if self._ended else self._next_position)

    async def _read(self) -> bool:
        """Reads one packet and writes its rows into the slot.

        Returns False if there are no more packets, and True otherwise.
        """
        packet = await anext(self._flow, None)
        if packet is None:
            self._ended = True
            return False
        rows = packet.tensors.get(INPUTS_EMBEDS)
        if rows is None:
            raise InvalidChunkError(
                f"a chunk contains {', '.join(packet.tensors) or 'no tensor'} instead of {INPUTS_EMBEDS}"
            )
        self._spec.check(INPUTS_EMBEDS, rows)
        self._set_prompt_tokens(packet.metadata.get("prompt_tokens"))
        start = packet.metadata.get("token_start", self._next_position)
        if start != self._next_position:
            raise InvalidChunkError(
                f"{INPUTS_EMBEDS} continue at position {start!r} instead of {self._next_position}; send each row once "
                "and in order"
            )
        self._write(rows)
        return True

    def _set_prompt_tokens(self, prompt_tokens: object) -> None:
        if prompt_tokens is None:
            return
        if not isinstance(prompt_tokens, int) or prompt_tokens < 1:
            raise InvalidChunkError(f"prompt_tokens is {prompt_tokens!r}; it must be a whole number from 1")
        if self._prompt_tokens not in (0, prompt_tokens):
            raise InvalidChunkError(f"prompt_tokens is {prompt_tokens} and was {self._prompt_tokens} before")
        self._check_fits(prompt_tokens)
        self._prompt_tokens = prompt_tokens

    def _write(self, rows: Array) -> None:
        if not self._prompt_tokens:
            self._check_fits(self._next_position + len(rows))
        # A slot has one row for each position that the model supports. A request cannot use more rows.
        space = self._memory.ticket.positions - self._next_position
        if space > 0:
            self._memory.rows(self.slot, self._next_position, min(space, len(rows)))[...] = rows[:space]
        self._next_position += len(rows)

    def _check_fits(self, prompt_tokens: int) -> None:
        positions = self._memory.ticket.positions
        if prompt_tokens >= positions:
            raise InvalidRequestError(
                f"the prompt has at least {prompt_tokens} embeddings, but the model accepts {positions} tokens in all; "
                "shorten the prompt",
                reason="PROMPT_TOO_LONG",
            )

    def _check_complete(self) -> None:
        if self._ended and self._next_position < self._prompt_tokens:
            raise InvalidChunkError(
                f"the flow ended after {self._next_position} embeddings of a prompt of {self._prompt_tokens}"
            )


@dataclass(frozen=True, eq=False)
class EmbeddedPrompt(RequestPrompt):
    """A prompt of placeholder tokens. `flow` writes the embeddings that replace the tokens into the shared
    memory.
    """

    flow: EmbeddingFlow = field(kw_only=True)


class Embeddings(RequestFeature):
    """The request feature for embeddings from an upstream stage.

    Assigns a slot of the shared memory to each request. vLLM's workers read the request's embeddings from the slot.
    """

    runner_module = "stagemesh.services.engines.vllm.embeddings.runner"
    _memory: EmbeddingMemory | None = None

    def __init__(self, *, dtype: str, stage: str) -> None:
        self._dtype, self._stage = dtype, stage
        self._free_slots: asyncio.Queue[int] = asyncio.Queue()

    def set_arguments(self, arguments: "AsyncEngineArgs") -> None:
        if arguments.speculative_config is not None:
            raise InvalidRequestError(
                f"stage {self._stage}: embeddings are added to the embeddings of sampled tokens, which "
                "speculative_config guesses; omit one of them",
                reason="INVALID_OPTION",
            )
        if arguments.nnodes > 1:
            raise InvalidRequestError(
                f"stage {self._stage}: embeddings are in the memory of the replica's first node, which workers on "
                "other nodes cannot read; omit embeddings, or run the stage on one node",
                reason="INVALID_OPTION",
            )
        arguments.enable_prompt_embeds = True

    async def start(self, llm: "AsyncLLM") -> None:
        await super().start(llm)
        model, slots = llm.model_config, llm.vllm_config.scheduler_config.max_num_seqs
        fd = os.memfd_create("stagemesh-embeddings", os.MFD_CLOEXEC)
        try:
            ticket = EmbeddingTicket(
                os.getpid(), fd, slots, model.max_model_len, model.get_inputs_embeds_size(), self._dtype
            )
            os.ftruncate(fd, slots * ticket.slot_bytes)
            self._memory = EmbeddingMemory(ticket)
            await runner_call(llm, "attach_embeddings", msgspec.msgpack.encode(ticket))
        finally:
            # Every process has mapped the anonymous file. The kernel frees it after the last of them has terminated.
            os.close(fd)
        for slot in range(slots):
            self._free_slots.put_nowait(slot)

    async def read_prompt(self, task: Task, name: str, held: AsyncExitStack) -> RequestPrompt | None:
        """Waits for a free slot, then reads embeddings until the prompt's length is known.

        Returns a prompt of placeholder tokens, or None if the task does not have an incoming edge. Raises
        InvalidRequestError if the task has more than one incoming edge.
        """
        if not task.inlets:
            return None
        if len(task.inlets) > 1:
            raise InvalidRequestError(
                f"embeddings arrive over {len(task.inlets)} edges ({', '.join(task.inlets)}); join them in an upstream "
                "stage",
                reason="INVALID_EDGE",
            )
        assert self._memory is not None, "`start` has not been called"
        (inlet,) = task.inlets.values()
        slot = await self._free_slots.get()
        held.callback(self._release, self._memory, slot)
        flow = EmbeddingFlow(inlet, self._memory, slot)
        placeholders = [PLACEHOLDER] * await flow.read_prompt()
        # A salt separates the prefix caches of requests, because the same placeholders represent different embeddings.
        return EmbeddedPrompt(placeholders, {"type": "token", "cache_salt": name}, flow=flow)

    def open(self, request: EngineRequest, held: AsyncExitStack) -> RequestHook | None:
        if not isinstance(request.prompt, EmbeddedPrompt):
            return None
        flow = request.prompt.flow
        set_argument(request.params, Embedded(flow.slot, len(request.prompt.token_ids)))
        request.params.skip_reading_prefix_cache = True
        flow.start(request.limit, partial(self.llm.abort, request.name))
        held.push_async_callback(flow.stop)
        return flow

    # -- internals

    def _release(self, memory: EmbeddingMemory, slot: int) -> None:
        memory.clear(slot)
        self._free_slots.put_nowait(slot)
