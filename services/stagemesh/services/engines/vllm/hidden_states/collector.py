"""The replica's end: takes word of the rows that workers wrote, and hands each request its own, in order."""

import asyncio
import logging
import secrets
import socket
from collections import deque
from collections.abc import AsyncGenerator, Mapping
from typing import TYPE_CHECKING, cast

import msgspec
import numpy as np

from stagemesh.common.errors import InvalidRequestError, StagemeshError, UnavailableError
from stagemesh.common.notifier import Notifier
from stagemesh.common.tensors import Array, Tensors
from stagemesh.connectors.arena.worker_writer import PartitionTicket
from stagemesh.connectors.edge import Packet
from stagemesh.services.engines.abilities import PartitionsArena
from stagemesh.services.engines.base import Task
from stagemesh.services.engines.vllm.hidden_states.row_messages import (
    EXTRA_ARGUMENT,
    PASSING_PART,
    Attachment,
    RequestedRows,
    StepRows,
    decode_rows,
    encode_attachment,
)
from stagemesh.services.engines.vllm.options import HiddenStatesOptions

if TYPE_CHECKING:
    from vllm import SamplingParams
    from vllm.v1.engine.async_llm import AsyncLLM

_MAX_MESSAGE_BYTES = 1 << 20
_GREETING_S = 10.0
_LATE_S = 10.0
"""How long rows may come after the tokens that they made."""

_log = logging.getLogger(__name__)


class RequestStates:
    """One request's rows: each position once and in order, whatever comes again."""

    def __init__(self, *, first_position: int, prompt_tokens: int) -> None:
        self.next_position = first_position
        """All rows before it have come."""
        self._prompt_tokens = prompt_tokens
        self._ready: deque[Packet] = deque()
        self._error: StagemeshError | None = None
        self._changed = Notifier()

    def push(self, position: int, tensors: Tensors) -> None:
        """Rows from `position` on; those that came before are dropped, as after a preemption."""
        count = len(next(iter(tensors.values())))
        skipped = self.next_position - position
        if skipped >= count:
            return
        if skipped < 0:
            self.fail(
                UnavailableError(f"the hidden states of positions {self.next_position} to {position} are missing")
            )
            return
        rows = {name: tensor[skipped:] for name, tensor in tensors.items()}
        metadata = {"token_start": self.next_position, "prompt_tokens": self._prompt_tokens}
        self._ready.append(Packet(rows, metadata))
        self.next_position = position + count
        self._changed.fire()

    def fail(self, error: StagemeshError) -> None:
        """No more will come."""
        self._error = self._error or error
        self._changed.fire()

    def take(self, *, before: int) -> list[Packet]:
        """The rows before a position that have come and were not taken. Raises what it failed with."""
        if self._error is not None:
            raise self._error
        taken: list[Packet] = []
        while self._ready and _start(self._ready[0]) < before:
            packet = self._ready.popleft()
            count = before - _start(packet)
            if count < _length(packet):
                self._ready.appendleft(_cut(packet, count, None))
                packet = _cut(packet, 0, count)
            taken.append(packet)
        return taken

    async def up_to(self, position: int) -> AsyncGenerator[Packet]:
        """The rest, until all rows before `position` have come. Raises UnavailableError where they do not."""
        while True:
            if packets := self.take(before=position):
                for packet in packets:
                    yield packet
                # More may have come meanwhile.
                continue
            if self.next_position >= position:
                return
            try:
                async with asyncio.timeout(_LATE_S):
                    await self._changed.wait()
            except TimeoutError:
                raise UnavailableError(
                    f"the hidden states from position {self.next_position} on did not come; see the worker's log"
                ) from None


class HiddenStates:
    """Listens to an engine's writing worker. Made and used on the event loop."""

    def __init__(self, options: HiddenStatesOptions, shares: PartitionsArena, *, share_bytes: int) -> None:
        """Raises NotReadyError where the arena has no room for the share."""
        self.options = options
        self._shares = shares
        self._passing: PartitionTicket = shares.open_share(share_bytes // PASSING_PART)
        self._ticket: PartitionTicket = shares.open_share(share_bytes - share_bytes // PASSING_PART)
        self._token = secrets.token_bytes(16)
        self._address = f"stagemesh-rows-{secrets.token_hex(16)}"
        self._requests: dict[str, RequestStates] = {}
        self._connection: socket.socket | None = None
        self._loop = asyncio.get_running_loop()

    async def attach(self, llm: "AsyncLLM") -> None:
        """Has the engine's worker write; raises UnavailableError where none does.

        Raises InvalidRequestError where the model does not give what is to be written.
        """
        await self._check_model(llm)
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK)
        with listener:
            listener.bind("\0" + self._address)
            listener.listen(4)
            attachment = Attachment(
                self._address, self._token, self._ticket, self._passing, self.options.dtype, self.options.tensors
            )
            told = asyncio.create_task(_tell(llm, encode_attachment(attachment)))
            try:
                async with asyncio.timeout(_GREETING_S):
                    self._connection = await self._greeted(listener)
                    await told
            except TimeoutError:
                raise UnavailableError("no worker of vLLM came to write hidden states; its log says why") from None
            finally:
                told.cancel()
        self._loop.add_reader(self._connection, self._readable)

    def open(
        self, name: str, task: Task, params: "SamplingParams", *, prompt_tokens: int, known_tokens: int
    ) -> RequestStates | None:
        """The rows of a request that is about to begin; None where nobody takes any. `params` tell the worker.

        `known_tokens` are those of the prompt and of the checkpoint from which it goes on.
        """
        if task.wanted is not None and not task.wanted.intersection(self.options.tensors):
            return None
        first_position = prompt_tokens - 1 if task.tokens == "last" else 0
        if task.resume_from is not None:
            # All of a request's states have equally many rows; those that were emitted are not wanted again.
            first_position += max(task.resume_from.rows.get(name, 0) for name in self.options.tensors)
        wish = msgspec.to_builtins(RequestedRows(name, first_position))
        params.extra_args = {**(params.extra_args or {}), EXTRA_ARGUMENT: wish}
        if first_position < known_tokens - 1:
            # What is found there is not computed, and gives no rows. The last one never is.
            params.skip_reading_prefix_cache = True
        states = RequestStates(first_position=first_position, prompt_tokens=prompt_tokens)
        self._requests[name] = states
        return states

    def forget(self, name: str) -> None:
        """The request is over; what still comes of it is dropped."""
        self._requests.pop(name, None)

    def close(self) -> None:
        """Once the workers have ended. Closing twice is harmless."""
        if self._connection is not None:
            self._loop.remove_reader(self._connection)
            self._connection.close()
            self._connection = None
        for ticket in (self._ticket, self._passing):
            self._shares.close_share(ticket)

    # -- inner workings

    async def _check_model(self, llm: "AsyncLLM") -> None:
        without = cast("list[str | None]", await llm.collective_rpc("model_without_layers"))
        for model in without:
            if model is not None:
                raise InvalidRequestError(
                    f"hidden_states: {model} gives no states of inner layers; ask for `last` alone",
                    reason="INVALID_OPTION",
                )

    async def _greeted(self, listener: socket.socket) -> socket.socket:
        """The connection that knows the token."""
        while True:
            connection, _ = await self._loop.sock_accept(listener)
            connection.setblocking(False)
            if secrets.compare_digest(await self._loop.sock_recv(connection, 64), self._token):
                return connection
            connection.close()

    def _readable(self) -> None:
        """Takes what is there; one step's message after the other."""
        assert self._connection is not None, "a closed connection is not watched"
        try:
            while data := self._connection.recv(_MAX_MESSAGE_BYTES):
                self._take(decode_rows(data))
        except BlockingIOError:
            return
        except (OSError, msgspec.MsgspecError, StagemeshError) as exc:
            _log.error("the worker's word of hidden states cannot be taken: %s", exc)
        # It has ended, or does not keep to what was agreed.
        self._loop.remove_reader(self._connection)
        for states in self._requests.values():
            states.fail(UnavailableError("vLLM's worker writes no more hidden states; its log says why"))

    def _take(self, step: StepRows) -> None:
        tensors = self._shares.adopt(step.handle)
        if step.passes:
            tensors = {name: np.array(tensor) for name, tensor in tensors.items()}
        for one in step.requests:
            states = self._requests.get(one.name)
            if states is not None and one.count:
                states.push(one.position, _rows(tensors, one.first, one.count))


async def _tell(llm: "AsyncLLM", attachment: bytes) -> None:
    await llm.collective_rpc("attach_replica", args=([attachment],))


def _start(packet: Packet) -> int:
    start = packet.metadata["token_start"]
    assert isinstance(start, int), "made by `push`"
    return start


def _length(packet: Packet) -> int:
    return len(next(iter(packet.tensors.values())))


def _cut(packet: Packet, first: int, end: int | None) -> Packet:
    tensors = {name: tensor[first:end] for name, tensor in packet.tensors.items()}
    return Packet(tensors, {**packet.metadata, "token_start": _start(packet) + first})


def _rows(tensors: Mapping[str, Array], first: int, count: int) -> dict[str, Array]:
    return {name: tensor[first : first + count] for name, tensor in tensors.items()}
