"""The base class of the features with which a stage receives input rows from an upstream stage.

The replica reads the rows of a request from an edge while vLLM already runs the request (`input_flow`). vLLM's workers
receive the rows through shared memory (`input_memory`). A worker reads a row again if the row's step is repeated after
a preemption. The scheduler runs a step only after the step's rows are in the shared memory (`run_ahead`).
"""

import asyncio
import os
from abc import abstractmethod
from collections.abc import Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

import msgspec

from stagemesh.common.errors import InvalidRequestError
from stagemesh.common.tensors import Array
from stagemesh.connectors.edge import Packet
from stagemesh.services.engines.base import Task
from stagemesh.services.engines.vllm.core_calls import runner_call
from stagemesh.services.engines.vllm.features import (
    EngineRequest,
    RequestFeature,
    RequestHook,
    RequestPrompt,
    set_argument,
)
from stagemesh.services.engines.vllm.rows.input_flow import InputFlow
from stagemesh.services.engines.vllm.rows.input_memory import Column, InputMemory, InputTicket

if TYPE_CHECKING:
    from vllm.config import ModelConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

PLACEHOLDER = 0
"""The id of the token that represents an input row in a prompt."""


class InputSlot(msgspec.Struct, frozen=True):
    """The location of a request's input rows in the shared memory, and the length of the request's prompt.

    The replica sends this object to vLLM's workers with the request (`features.set_argument`).
    """

    slot: int
    prompt_tokens: int
    """The number of prompt tokens. Rows at positions below this number are the prompt."""


@dataclass(frozen=True, eq=False)
class RowsPrompt(RequestPrompt):
    """A prompt of placeholder tokens. `flow` writes the rows that replace the tokens into the shared memory."""

    flow: InputFlow = field(kw_only=True)


class InputRows(RequestFeature):
    """Assigns a slot of the shared memory to each request. vLLM's workers read the request's rows from the slot."""

    _memory: InputMemory | None = None

    def __init__(self, *, stage: str) -> None:
        self._stage = stage
        self._free_slots: asyncio.Queue[int] = asyncio.Queue()

    @abstractmethod
    def columns(self, model: "ModelConfig") -> list[Column]:
        """Returns the columns of a row."""

    @abstractmethod
    def read_rows(self, task: Task, packet: Packet) -> Mapping[str, Array]:
        """Returns the rows of a task's packet, [rows, width] or [rows], by column.

        Raises InvalidChunkError if the packet is invalid, and InvalidRequestError if the task's options are.
        """

    def set_arguments(self, arguments: "AsyncEngineArgs") -> None:
        if arguments.speculative_config is not None:
            raise InvalidRequestError(
                f"stage {self._stage}: rows from the edge are added to the embeddings of sampled tokens, which "
                "speculative_config guesses; omit it",
                reason="INVALID_OPTION",
            )
        if arguments.nnodes > 1:
            raise InvalidRequestError(
                f"stage {self._stage}: rows from the edge are in the memory of the replica's first node, which workers "
                "on other nodes cannot read; run the stage on one node",
                reason="INVALID_OPTION",
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

    async def read_prompt(self, task: Task, name: str, held: AsyncExitStack) -> RequestPrompt | None:
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

    def open(self, request: EngineRequest, held: AsyncExitStack) -> RequestHook | None:
        if not isinstance(request.prompt, RowsPrompt):
            return None
        flow = request.prompt.flow
        set_argument(request.params, InputSlot(flow.slot, len(request.prompt.token_ids)))
        request.params.skip_reading_prefix_cache = True
        flow.start(request.limit, partial(self.llm.abort, request.name))
        held.push_async_callback(flow.stop)
        return flow

    # -- internals

    def _release(self, memory: InputMemory, slot: int) -> None:
        memory.clear(slot)
        self._free_slots.put_nowait(slot)
