"""The base class of the features with which a stage receives input rows from an upstream stage.

The replica reads the rows of a request from an edge while vLLM already runs the request. vLLM's workers
receive the rows through shared memory (`input_memory`). A worker reads a row again if the row's step is repeated after
a preemption. The scheduler runs a step only after the step's rows are in the shared memory (`run_ahead`).
"""

import asyncio
import os
from abc import abstractmethod
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from stagemesh.common.errors import InvalidChunkError, InvalidRequestError
from stagemesh.common.tasks import end_tasks
from stagemesh.common.wire.tensors import Array
from stagemesh.connectors.packets import Packet
from stagemesh.services.engines.base import EngineEvent, Task
from stagemesh.services.engines.vllm import features
from stagemesh.services.engines.vllm.engine_core import runner_call
from stagemesh.services.engines.vllm.rows.input_memory import Column, InputMemory, InputSlot, InputTicket
from stagemesh.services.engines.vllm.run_ahead_limit import UNLIMITED, RequestLimit

if TYPE_CHECKING:
    from vllm.config import ModelConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM


class InputFlow(features.RequestHook):
    """Reads one request's input rows from an edge and writes them into the request's slot of the shared memory.

    `read_rows` returns the rows of a packet, [rows, width] or [rows], by column. All columns have the same number of
    rows. `read_rows` raises InvalidChunkError if the packet is invalid.
    """

    _reading: asyncio.Task[None]

    def __init__(
        self,
        flow: AsyncIterable[Packet],
        memory: InputMemory,
        slot: int,
        read_rows: Callable[[Packet], Mapping[str, Array]],
    ) -> None:
        self._flow = aiter(flow)
        self._memory, self.slot = memory, slot
        self._read_rows = read_rows
        self._prompt_only = frozenset(column.name for column in memory.ticket.columns if column.prompt_only)
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

    def write(self, column: str, position: int, values: Array) -> None:
        """Writes values of one column, [rows, width], from token position `position` onwards."""
        target = self._memory.columns[column][self.slot, position : position + len(values)]
        target[...] = values[: len(target)]

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
        """Stops the task that reads packets. Does not raise the error of a failed reading."""
        await end_tasks([self._reading])
        # The task's error references this object, and a packet that was being read.
        del self._reading

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
        rows = self._read_rows(packet)
        self._set_prompt_tokens(packet.metadata.get("prompt_tokens"))
        start = packet.metadata.get("token_start", self._next_position)
        if start != self._next_position:
            raise InvalidChunkError(
                f"{', '.join(packet.tensors)} continue at position {start!r} instead of {self._next_position}; send "
                "each row once and in order"
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

    def _write(self, rows: Mapping[str, Array]) -> None:
        count = len(next(iter(rows.values())))
        if not self._prompt_tokens:
            self._check_fits(self._next_position + count)
        # A slot has one row for each position that the model supports. A request cannot use more rows.
        space = min(count, max(0, self._memory.ticket.positions - self._next_position))
        prompt_space = space
        if self._prompt_tokens:
            prompt_space = min(space, max(0, self._prompt_tokens - self._next_position))
        for name, values in rows.items():
            written = prompt_space if name in self._prompt_only else space
            target = self._memory.columns[name][self.slot, self._next_position : self._next_position + written]
            target[...] = values[:written].reshape(target.shape)
        self._next_position += count

    def _check_fits(self, prompt_tokens: int) -> None:
        positions = self._memory.ticket.positions
        if prompt_tokens >= positions:
            raise InvalidRequestError(
                f"this model's maximum context length is {positions} tokens, but the prompt has at least "
                f"{prompt_tokens} embeddings; shorten the prompt, or raise the stage's option max_model_len",
                reason="PROMPT_TOO_LONG",
            )

    def _check_complete(self) -> None:
        if self._ended and self._next_position < self._prompt_tokens:
            raise InvalidChunkError(f"the flow ended after {self._next_position} of {self._prompt_tokens} embeddings")


PLACEHOLDER = 0
"""The id of the token that represents an input row in a prompt."""


@dataclass(frozen=True, eq=False)
class RowsPrompt(features.RequestPrompt):
    """A prompt of placeholder tokens. `flow` writes the rows that replace the tokens into the shared memory."""

    flow: InputFlow = field(kw_only=True)


class InputRows(features.RequestFeature):
    """Base class of the features. Assigns each request a slot of the shared memory.

    vLLM's workers read the request's rows from the slot.
    """

    _memory: InputMemory | None = None

    def __init__(self, *, stage: str) -> None:
        self._stage = stage
        self._free_slots: asyncio.Queue[int] = asyncio.Queue()

    @abstractmethod
    def columns(self, model: "ModelConfig") -> list[Column]:
        """Returns the columns of the input rows of a model."""

    @abstractmethod
    def read_rows(self, task: Task, packet: Packet) -> Mapping[str, Array]:
        """Returns the rows of a task's packet, [rows, width] or [rows], by column.

        Raises InvalidChunkError if the packet is invalid, and InvalidRequestError if the task's options are invalid.
        """

    def set_arguments(self, arguments: "AsyncEngineArgs") -> None:
        if arguments.speculative_config is not None:
            raise self._invalid(
                "rows from the edge are added to the embeddings of sampled tokens, which speculative_config guesses; "
                "omit it"
            )
        if arguments.nnodes > 1:
            raise self._invalid(
                "rows from the edge are in the memory of the replica's first node, which workers on other nodes cannot "
                "read; run the stage on one node"
            )
        arguments.enable_prompt_embeds = True

    async def start(self, llm: "AsyncLLM") -> None:
        await super().start(llm)
        model, slots = llm.model_config, llm.vllm_config.scheduler_config.max_num_seqs
        fd = os.memfd_create("stagemesh-rows", os.MFD_CLOEXEC)
        try:
            ticket = InputTicket(os.getpid(), fd, slots, model.max_model_len, self.columns(model))
            os.ftruncate(fd, slots * ticket.slot_bytes)
            self._memory = InputMemory(ticket)
            await runner_call(llm, "attach_inputs", msgspec.msgpack.encode(ticket))
        finally:
            # Every process has mapped the anonymous file. The kernel frees it after the last of them has terminated.
            os.close(fd)
        for slot in range(slots):
            self._free_slots.put_nowait(slot)

    async def read_prompt(self, task: Task, name: str, held: AsyncExitStack) -> features.RequestPrompt | None:
        """Waits for a free slot, then reads rows until the prompt's length is known.

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
        flow = InputFlow(inlet, self._memory, slot, partial(self.read_rows, task))
        placeholders = [PLACEHOLDER] * await flow.read_prompt()
        # A salt separates the prefix caches of requests, because the same placeholders represent different rows.
        return RowsPrompt(placeholders, {"type": "token", "cache_salt": name}, flow=flow)

    def open(self, request: features.EngineRequest, held: AsyncExitStack) -> features.RequestHook | None:
        if not isinstance(request.prompt, RowsPrompt):
            return None
        flow = request.prompt.flow
        features.set_argument(request.params, InputSlot(flow.slot, len(request.prompt.token_ids)))
        request.params.skip_reading_prefix_cache = True
        flow.start(request.limit, partial(self.llm.abort, request.name))
        held.push_async_callback(flow.stop)
        return flow

    # -- internals

    def _release(self, memory: InputMemory, slot: int) -> None:
        memory.clear(slot)
        self._free_slots.put_nowait(slot)
