"""The hidden-states feature: a stage emits the hidden states of each request's tokens.

A vLLM worker writes the rows of all requests into the replica's arena. The replica emits each row for the request that
the row belongs to.
"""

import asyncio
import logging
import secrets
import socket
from collections import deque
from collections.abc import AsyncGenerator, Iterator
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from stagemesh.common.errors import InvalidRequestError, StagemeshError, UnavailableError
from stagemesh.common.notification import Notifier
from stagemesh.common.tensors import DTYPES, Tensors
from stagemesh.connectors.arena.worker_writer import PartitionTicket
from stagemesh.connectors.edge import Packet
from stagemesh.services.engines.abilities import PartitionsArena
from stagemesh.services.engines.base import Emission
from stagemesh.services.engines.vllm.core_calls import runner_call
from stagemesh.services.engines.vllm.features import EngineRequest, RequestFeature, RequestHook, set_argument
from stagemesh.services.engines.vllm.hidden_states.row_writer import (
    CONFIG_KEY,
    OVERFLOW_DIVISOR,
    Attachment,
    RequestedRows,
    StepRows,
    min_overflow_bytes,
)
from stagemesh.services.engines.vllm.options import HiddenStatesOptions

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

_MAX_MESSAGE_BYTES = 1 << 20
_CONNECT_S = 10.0
_LATE_S = 10.0
"""The maximum time to wait for the rows of tokens that vLLM has already sampled, in seconds."""

_log = logging.getLogger(__name__)


class RequestStates(RequestHook):
    """Buffers and emits the hidden states of one request. A row is the hidden state of one token position.

    Emits each row once and in order, even if the worker writes some rows again after a preemption.
    """

    def __init__(self, request: EngineRequest, *, first_position: int) -> None:
        self.next_position = first_position
        """The token position of the next row to arrive. All requested rows before this position have arrived."""
        self._request = request
        self._ready: deque[tuple[int, Tensors]] = deque()
        self._error: StagemeshError | None = None
        self._changed = Notifier()

    def push(self, position: int, tensors: Tensors) -> None:
        """Adds consecutive rows that start at token position `position`. Drops rows that have already been added.

        Rows can arrive again after a preemption. If rows before `position` are missing, records an error with `fail`.
        """
        count = _count(tensors)
        skipped = self.next_position - position
        if skipped >= count:
            return
        if skipped < 0:
            self.fail(
                UnavailableError(
                    f"the hidden states of positions {self.next_position} to {position} are missing",
                    reason="HIDDEN_STATES_LOST",
                )
            )
            return
        self._ready.append((self.next_position, {name: tensor[skipped:] for name, tensor in tensors.items()}))
        self.next_position = position + count
        self._changed.fire()

    def fail(self, error: StagemeshError) -> None:
        """Records an error, which later calls of `take` raise. Does nothing if an error is already recorded."""
        self._error = self._error or error
        self._changed.fire()

    def observe(self, *, finished: bool) -> Iterator[Emission]:  # noqa: ARG002  # `finish` emits the rest
        yield from self.take(before=self._request.computed_tokens)
        # Reached after the consumer has received the rows, so that a slow consumer delays only its own request.
        self._request.limit.set_taken(self._request.known_tokens)

    def take(self, *, before: int) -> list[Emission]:
        """Removes the buffered rows of the token positions below `before`, and returns them as emissions.

        If `fail` has recorded an error, raises this error.
        """
        if self._error is not None:
            raise self._error
        taken: list[Emission] = []
        while self._ready and self._ready[0][0] < before:
            position, tensors = self._ready.popleft()
            count = before - position
            if position + _count(tensors) > before:
                self._ready.appendleft((before, {name: tensor[count:] for name, tensor in tensors.items()}))
            rows = {name: tensor[:count] for name, tensor in tensors.items()}
            metadata = {"token_start": position, "prompt_tokens": len(self._request.prompt.token_ids)}
            taken.append(Emission(Packet(rows, metadata)))
        return taken

    async def finish(self) -> AsyncGenerator[Emission]:
        """Yields the remaining rows as they arrive. Called after the request's last output.

        Raises UnavailableError if no row arrives for `_LATE_S` seconds. If `fail` has recorded an error, raises this
        error.
        """
        position = self._request.computed_tokens
        while True:
            if emissions := self.take(before=position):
                for emission in emissions:
                    yield emission
                # More rows may have arrived while the consumer processed these rows.
                continue
            if self.next_position >= position:
                return
            try:
                async with asyncio.timeout(_LATE_S):
                    await self._changed.wait()
            except TimeoutError:
                raise UnavailableError(
                    f"the hidden states from position {self.next_position} on did not arrive; the worker's log has the "
                    "cause",
                    reason="HIDDEN_STATES_LOST",
                ) from None


class HiddenStates(RequestFeature):
    """The request feature for hidden states. Receives rows from a vLLM worker and emits them for their requests.

    After `configure`, all methods must be called on the event loop's thread.
    """

    runner_module = "stagemesh.services.engines.vllm.hidden_states.runner"

    def __init__(
        self, options: HiddenStatesOptions, arena: PartitionsArena | None, *, share_bytes: int, stage: str
    ) -> None:
        """Creates the feature. `share_bytes` is the total size of the worker's partitions of the arena, in bytes."""
        self._options, self._arena, self._stage = options, arena, stage
        self._share_bytes = share_bytes
        self._tickets: list[PartitionTicket] = []
        self._requests: dict[str, RequestStates] = {}
        self._connection: socket.socket | None = None

    def set_arguments(self, arguments: "AsyncEngineArgs") -> None:
        if arguments.nnodes > 1 and arguments.pipeline_parallel_size > 1:
            raise self._invalid(
                "hidden_states come from the last pipeline rank, which is on another node than the replica; set "
                "pipeline_parallel_size to 1, or run the stage on one node"
            )
        arguments.additional_config = {**arguments.additional_config, CONFIG_KEY: self._options.inner_layers}
        if arguments.speculative_config is not None:
            # The rows of rejected drafts are known only after the step's tokens are sampled.
            arguments.async_scheduling = False

    def configure(self, config: "VllmConfig") -> None:
        """Raises InvalidRequestError if the model cannot provide the requested hidden states.

        Also raises InvalidRequestError if the worker's partitions of the arena are too small for one row.
        """
        model, options = config.model_config, self._options
        problem = _layer_problem(
            model, options.inner_layers, pipeline_ranks=config.parallel_config.pipeline_parallel_size
        )
        if problem:
            raise self._invalid(f"hidden_states: {problem}")
        tensors, width = len(options.tensors), model.get_hidden_size()
        row_bytes = tensors * width * DTYPES[options.dtype].itemsize
        min_bytes = OVERFLOW_DIVISOR * min_overflow_bytes(row_bytes=row_bytes, tensors=tensors)
        if self._share_bytes < min_bytes:
            raise self._invalid(
                f"hidden_states.share_bytes is {self._share_bytes}; {tensors} tensors with {width} values per token "
                f"need at least {min_bytes}"
            )

    async def start(self, llm: "AsyncLLM") -> None:
        """Reserves the worker's partitions of the arena, and waits until the worker that writes rows has connected.

        Raises NotReadyError if the arena has too little space, InvalidRequestError if the model's class does not
        provide the states of inner layers, UnavailableError if no worker connects, and CoreRefusalError if a worker
        cannot open the arena.
        """
        assert self._arena is not None, "a stage's runtime passes the arena before it starts the engine"
        overflow_bytes = self._share_bytes // OVERFLOW_DIVISOR
        for size_bytes in (self._share_bytes - overflow_bytes, overflow_bytes):
            self._tickets.append(self._arena.open_partition(size_bytes))
        rows, overflow = self._tickets
        address, token = f"stagemesh-rows-{secrets.token_hex(16)}", secrets.token_bytes(16)
        attachment = Attachment(address, token, rows, overflow, self._options.dtype, self._options.tensors)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK) as listener:
            listener.bind("\0" + address)
            listener.listen(4)
            try:
                async with asyncio.timeout(_CONNECT_S):
                    for model in await runner_call(llm, "attach_replica", msgspec.msgpack.encode(attachment)):
                        self._check_layers(model)
                    self._connection = await _accept(listener, token)
            except TimeoutError:
                raise UnavailableError(
                    "no vLLM worker connected to write hidden states; the worker's log has the cause",
                    reason="HIDDEN_STATES_LOST",
                ) from None
        asyncio.get_running_loop().add_reader(self._connection, self._read_messages, self._arena)

    def open(self, request: EngineRequest, held: AsyncExitStack) -> RequestHook | None:
        task = request.task
        if task.wanted is not None and not task.wanted.intersection(self._options.tensors):
            return None
        prompt_tokens = len(request.prompt.token_ids)
        first_position = prompt_tokens - 1 if task.tokens == "last" else 0
        if task.resume_from is not None:
            # All states of a request have the same number of rows. The rows before the checkpoint are already emitted.
            first_position += max(task.resume_from.rows.get(name, 0) for name in self._options.tensors)
        set_argument(request.params, RequestedRows(request.name, first_position))
        if first_position < request.computed_tokens:
            # vLLM does not compute positions that it finds in the prefix cache, except the last position.
            request.params.skip_reading_prefix_cache = True
        states = RequestStates(request, first_position=first_position)
        self._requests[request.name] = states
        held.callback(self._requests.pop, request.name)
        request.limit.set_taken(request.known_tokens)
        return states

    def close(self) -> None:
        if self._connection is not None:
            asyncio.get_running_loop().remove_reader(self._connection)
            self._connection.close()
            self._connection = None
        while self._arena is not None and self._tickets:
            self._arena.close_partition(self._tickets.pop())

    # -- internals

    def _invalid(self, problem: str) -> InvalidRequestError:
        return InvalidRequestError(f"stage {self._stage}: {problem}", reason="INVALID_OPTION")

    def _check_layers(self, model_without_layers: str | None) -> None:
        """Raises InvalidRequestError unless `model_without_layers` is None.

        `model_without_layers` is the name of a model class that cannot provide the states of inner layers.
        """
        if model_without_layers is not None:
            raise self._invalid(
                f"hidden_states: {model_without_layers} provides no states of inner layers; request only `last`"
            )

    def _read_messages(self, arena: PartitionsArena) -> None:
        """Reads all available messages from the worker, and adds the reported rows to their requests.

        Fails all requests if the worker has closed the connection or if a message is invalid.
        """
        assert self._connection is not None, "a closed connection has no reader"
        try:
            while data := self._connection.recv(_MAX_MESSAGE_BYTES):
                self._push(msgspec.msgpack.decode(data, type=StepRows), arena)
        except BlockingIOError:
            return
        except (OSError, msgspec.MsgspecError, StagemeshError) as exc:
            _log.error("cannot read the worker's message about hidden states: %s", exc)
        # The worker has closed the connection or has violated the protocol.
        asyncio.get_running_loop().remove_reader(self._connection)
        for states in self._requests.values():
            states.fail(
                UnavailableError(
                    "vLLM's worker has stopped writing hidden states; the worker's log has the cause",
                    reason="HIDDEN_STATES_LOST",
                )
            )

    def _push(self, step: StepRows, arena: PartitionsArena) -> None:
        tensors = arena.adopt(step.handle).held()
        if step.overflow:
            tensors = {name: np.array(tensor) for name, tensor in tensors.items()}
        for rows in step.requests:
            states = self._requests.get(rows.name)
            if states is not None and rows.count:
                end = rows.first + rows.count
                states.push(rows.position, {name: tensor[rows.first : end] for name, tensor in tensors.items()})


async def _accept(listener: socket.socket, token: bytes) -> socket.socket:
    """Waits for a connection that sends the token, and returns this connection. Closes all other connections."""
    loop = asyncio.get_running_loop()
    while True:
        connection, _ = await loop.sock_accept(listener)
        connection.setblocking(False)
        if secrets.compare_digest(await loop.sock_recv(connection, 64), token):
            return connection
        connection.close()


def _layer_problem(model: "ModelConfig", inner_layers: list[int], *, pipeline_ranks: int) -> str | None:
    """Returns the reason why a model cannot provide the requested hidden states, or None if the model can.

    `inner_layers` contains sorted layer numbers. `pipeline_ranks` is the number of workers across which the layers are
    split. Does not check whether the model's class provides the states of inner layers. `start` checks this, because
    only the workers load the class.
    """
    if model.runner_type != "generate":
        return "a model that pools samples no tokens and emits nothing; omit the option, or omit runner: pooling"
    if not inner_layers:
        return None
    count = model.hf_text_config.num_hidden_layers
    if inner_layers[-1] >= count:
        return f"layers contains {inner_layers[-1]}; the model has layers 0 to {count - 1} and `last`"
    if pipeline_ranks > 1:
        return (
            f"states of inner layers are not all on one worker with pipeline_parallel_size {pipeline_ranks}; "
            "request only `last`"
        )
    return None


def _count(tensors: Tensors) -> int:
    return len(next(iter(tensors.values())))
