"""The replica's side of the input rows that a request receives over an edge while vLLM already runs it."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Mapping

from stagemesh.common.errors import InvalidChunkError, InvalidRequestError
from stagemesh.common.tensors import Array
from stagemesh.connectors.edge import Packet
from stagemesh.services.engines.base import EngineEvent
from stagemesh.services.engines.vllm.features import UNLIMITED, RequestHook, RequestLimit
from stagemesh.services.engines.vllm.rows.input_memory import InputMemory


class InputFlow(RequestHook):
    """Reads one request's input rows from an edge and writes them into the request's slot of the shared memory.

    `read_rows` returns the rows of a packet, [rows, width] or [rows], by column. All columns have the same number of
    rows. It raises InvalidChunkError if the packet is invalid.
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
        """Stops the task that reads packets. If reading has failed, does not raise the failure's error."""
        reading = self._reading
        reading.cancel()
        await asyncio.wait([reading])
        if not reading.cancelled():
            reading.exception()
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
        for name, values in rows.items():
            target = self._memory.columns[name][self.slot, self._next_position : self._next_position + space]
            target[...] = values[:space].reshape(target.shape)
        self._next_position += count

    def _check_fits(self, prompt_tokens: int) -> None:
        positions = self._memory.ticket.positions
        if prompt_tokens >= positions:
            raise InvalidRequestError(
                f"the prompt has at least {prompt_tokens} embeddings, but the model accepts {positions} tokens in all; "
                "shorten the prompt, or raise the stage's option max_model_len",
                reason="PROMPT_TOO_LONG",
            )

    def _check_complete(self) -> None:
        if self._ended and self._next_position < self._prompt_tokens:
            raise InvalidChunkError(
                f"the flow ended after {self._next_position} embeddings of a prompt of {self._prompt_tokens}"
            )
