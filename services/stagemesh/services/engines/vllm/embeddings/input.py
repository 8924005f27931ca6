"""Embeddings from upstream: the replica's end, which reads a request's flow while the request runs."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import msgspec

from stagemesh.common.errors import InvalidChunkError, InvalidRequestError
from stagemesh.common.tensors import Array, TensorSpec
from stagemesh.connectors.edge import Packet
from stagemesh.services.engines.base import Task
from stagemesh.services.engines.vllm.core_calls import worker_call
from stagemesh.services.engines.vllm.embeddings.memory import (
    EMBEDDED_ARGUMENT,
    Embedded,
    EmbeddingMemory,
    encode_ticket,
    make_memory,
)
from stagemesh.services.engines.vllm.options import INPUTS_EMBEDS
from stagemesh.services.engines.vllm.run_ahead.limits import UNLIMITED, RequestLimit

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM


class EmbeddedInput:
    """One request's rows, read from its flow into its place in the memory."""

    def __init__(self, flow: AsyncIterable[Packet], memory: EmbeddingMemory, place: int) -> None:
        self._flow = aiter(flow)
        self._memory, self._place = memory, place
        self._spec = TensorSpec(memory.ticket.dtype, ("tokens", memory.ticket.width))
        self._next_position = 0
        self._prompt_tokens = 0
        self._ended = False

    async def begin(self) -> int:
        """How many positions the prompt has, once that is known and its first row is there.

        Where the rows do not say it, they are all the prompt's. Raises InvalidRequestError, InvalidChunkError, and
        what the flow ended with.
        """
        while await self._read() and not (self._prompt_tokens and self._next_position):
            pass
        if not self._next_position:
            raise InvalidRequestError("the edge brought no embeddings", reason="EMPTY_PROMPT")
        self._prompt_tokens = self._prompt_tokens or self._next_position
        self._check_complete()
        return self._prompt_tokens

    def enter(self, params: "SamplingParams", limit: RequestLimit) -> None:
        """Has vLLM take the embeddings, as far as they have come."""
        embedded = msgspec.to_builtins(Embedded(self._place, self._prompt_tokens))
        params.extra_args = {**(params.extra_args or {}), EMBEDDED_ARGUMENT: embedded}
        # What other requests' placeholders have left in the cache has nothing to do with these.
        params.skip_reading_prefix_cache = True
        self._feed(limit)

    @asynccontextmanager
    async def feeding(self, limit: RequestLimit, abort: Callable[[], Awaitable[None]]) -> AsyncGenerator[None]:
        """Reads on meanwhile, and to the end of the flow; rows that come too late for the request are dropped.

        Calls `abort` when the flow fails, and raises at the end of the block what it failed with.
        """
        feeding = asyncio.create_task(self._follow(limit, abort), name="embeddings")
        try:
            yield
            await feeding
        finally:
            feeding.cancel()
            await asyncio.wait([feeding])
            if not feeding.cancelled():
                feeding.exception()

    # -- inner workings

    async def _follow(self, limit: RequestLimit, abort: Callable[[], Awaitable[None]]) -> None:
        try:
            while not self._ended:
                await self._read()
                self._check_complete()
                self._feed(limit)
        except Exception:
            await abort()
            raise

    def _feed(self, limit: RequestLimit) -> None:
        limit.feed(UNLIMITED if self._ended else self._next_position)

    async def _read(self) -> bool:
        """Takes one packet in; False at the end."""
        packet = await anext(self._flow, None)
        if packet is None:
            self._ended = True
            return False
        rows = packet.tensors.get(INPUTS_EMBEDS)
        if rows is None:
            raise InvalidChunkError(f"a chunk brings {', '.join(packet.tensors) or 'no tensor'} and no {INPUTS_EMBEDS}")
        self._spec.check(INPUTS_EMBEDS, rows)
        self._note_prompt(packet.metadata.get("prompt_tokens"))
        start = packet.metadata.get("token_start", self._next_position)
        if start != self._next_position:
            raise InvalidChunkError(
                f"{INPUTS_EMBEDS} go on at position {start!r} where {self._next_position} was to come; send each row "
                "once and in order"
            )
        self._write(rows)
        return True

    def _note_prompt(self, prompt_tokens: object) -> None:
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
        # No request gets further than its place reaches.
        room = self._memory.ticket.positions - self._next_position
        if room > 0:
            self._memory.rows(self._place, self._next_position, min(room, len(rows)))[...] = rows[:room]
        self._next_position += len(rows)

    def _check_fits(self, prompt_tokens: int) -> None:
        positions = self._memory.ticket.positions
        if prompt_tokens >= positions:
            raise InvalidRequestError(
                f"the prompt has {prompt_tokens} embeddings or more, but the model takes {positions} tokens in all; "
                "shorten the prompt",
                reason="PROMPT_TOO_LONG",
            )

    def _check_complete(self) -> None:
        if self._ended and self._next_position < self._prompt_tokens:
            raise InvalidChunkError(
                f"the flow ended after {self._next_position} embeddings of a prompt of {self._prompt_tokens}"
            )


class Embeddings:
    """Those of an engine's requests."""

    def __init__(self, llm: "AsyncLLM", *, dtype: str) -> None:
        self._llm = llm
        config = llm.vllm_config
        places = config.scheduler_config.max_num_seqs
        width = config.model_config.get_inputs_embeds_size()
        self._memory = make_memory(places=places, positions=config.model_config.max_model_len, width=width, dtype=dtype)
        self._places: asyncio.Queue[int] = asyncio.Queue()
        for place in range(places):
            self._places.put_nowait(place)

    async def attach(self) -> None:
        """Has the workers read the memory."""
        await worker_call(self._llm, "attach_embeddings", encode_ticket(self._memory.ticket))

    @asynccontextmanager
    async def reading(self, task: Task) -> AsyncGenerator[EmbeddedInput]:
        """A place for a request; waits while as many as run at once have one, and leaves the flow alone meanwhile."""
        if len(task.inlets) > 1:
            raise InvalidRequestError(
                f"embeddings come over {len(task.inlets)} edges ({', '.join(task.inlets)}); join them in one before",
                reason="INVALID_EDGE",
            )
        (flow,) = task.inlets.values()
        place = await self._places.get()
        try:
            yield EmbeddedInput(flow, self._memory, place)
        finally:
            self._memory.clear(place)
            self._places.put_nowait(place)

    def close(self) -> None:
        """Once the workers have ended."""
        self._memory.close()
