"""The memory that the replica and vLLM's workers share for the input rows of requests, and the base classes of the
mixins for vLLM's model runners that read it.

A row belongs to one token position of a request. It has one or more columns, for example the row's embedding. The
memory has one slot for each running request. It is a sparse file: the pages of a slot are allocated when data is
written, and freed when the slot is released.
"""

import mmap
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from stagemesh.common.wire.tensors import DTYPES, Array
from stagemesh.connectors.arena.memory import open_memory
from stagemesh.services.engines.vllm.features import track_arguments

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput


@dataclass(frozen=True)
class Column:
    """A column of the input rows: `width` values of one dtype for each token position."""

    name: str
    dtype: str
    """The name of the dtype. The name is the same in the API and in torch."""
    width: int
    prompt_only: bool = False
    """Whether only rows of the prompt have values. For later rows, values from the edge are ignored."""

    def size_bytes(self, positions: int) -> int:
        """Returns the size of the column in a slot with `positions` rows, in bytes, rounded up to whole pages."""
        return -(-positions * self.width * DTYPES[self.dtype].itemsize // mmap.PAGESIZE) * mmap.PAGESIZE


@dataclass(frozen=True)
class InputTicket:
    """The data that a worker process needs to open the shared memory for input rows."""

    process_id: int
    file_descriptor: int
    slots: int
    positions: int
    """The number of rows in a slot. Equals the maximum number of tokens in the model's context."""
    columns: list[Column]

    @property
    def slot_bytes(self) -> int:
        """The size of a slot in bytes."""
        return sum(column.size_bytes(self.positions) for column in self.columns)


class InputMemory:
    """The shared memory for input rows, mapped into one process."""

    def __init__(self, ticket: InputTicket) -> None:
        """Maps the shared memory into this process. Raises NotReadyError if the memory's file cannot be opened."""
        self.ticket = ticket
        self._mapping = open_memory(ticket.process_id, ticket.file_descriptor)

    @cached_property
    def columns(self) -> dict[str, Array]:
        """Views of the columns, [slots, positions, width], by name.

        The replica writes rows through the views, and workers read them. A row contains zeros until it is written.
        """
        views: dict[str, Array] = {}
        offset, slot_bytes = 0, self.ticket.slot_bytes
        for column in self.ticket.columns:
            dtype, positions = DTYPES[column.dtype], self.ticket.positions
            row_bytes = column.width * dtype.itemsize
            views[column.name] = np.ndarray(
                (self.ticket.slots, positions, column.width),
                dtype,
                self._mapping,
                offset,
                strides=(slot_bytes, row_bytes, dtype.itemsize),
            )
            offset += column.size_bytes(positions)
        return views

    def clear(self, slot: int) -> None:
        """Frees the memory pages of a slot. The slot contains zeros afterwards."""
        size_bytes = self.ticket.slot_bytes
        self._mapping.madvise(mmap.MADV_REMOVE, slot * size_bytes, size_bytes)


class InputSlot(msgspec.Struct, frozen=True):
    """The location of a request's input rows in the shared memory, and the length of the request's prompt.

    The replica sends this object to vLLM's workers with the request (`features.set_argument`).
    """

    slot: int
    prompt_tokens: int
    """The number of prompt tokens. Rows at positions below this number are the prompt."""


class StepRows(NamedTuple):
    """The rows of one step of a model runner. The requests are in the order of their rows."""

    request_ids: Sequence[str]
    starts: npt.NDArray[np.int32]
    """The index of each request's first row, followed by the total number of rows. The array may be longer."""
    positions: npt.NDArray[np.int32]
    """The token position of each request's first row. The array may be longer than the number of requests."""

    @classmethod
    def of_v1(cls, runner: Any) -> "StepRows":
        """Returns the rows of the step that the runner in `vllm.v1.worker.gpu_model_runner` computes."""
        batch = runner.input_batch
        return cls(batch.req_ids, runner.query_start_loc.np, batch.num_computed_tokens_cpu)

    @classmethod
    def of_v2(cls, batch: Any) -> "StepRows":
        """Returns the rows of a batch of the runner in `vllm.v1.worker.gpu.model_runner`."""
        return cls(batch.req_ids, batch.query_start_loc_np, batch.num_computed_tokens_np)


class TakesRows:
    """A mixin for model runners. Leaves the inputs unchanged until `attach_inputs` is called.

    A subclass implements `embed`, and calls it when vLLM has prepared the input embeddings of a step.
    """

    _inputs: InputMemory | None = None
    _slots: dict[str, InputSlot]

    def attach_inputs(self, ticket: bytes) -> None:
        """Opens the shared memory for input rows. `ticket` is a serialized InputTicket."""
        self._inputs = InputMemory(msgspec.msgpack.decode(ticket, type=InputTicket))
        self._slots = {}

    def execute_model(self, scheduler_output: "SchedulerOutput", *args: Any, **kwargs: Any) -> Any:
        """Records which of the step's new requests have input rows, then runs the step's forward pass."""
        if self._inputs is not None:
            track_arguments(self._slots, scheduler_output, InputSlot)
        return super().execute_model(scheduler_output, *args, **kwargs)  # type: ignore[misc]

    def embed(self, inputs_embeds: torch.Tensor, rows: StepRows) -> None:
        """Writes the requests' rows into the input embeddings of a step, `inputs_embeds` [tokens, width]."""
        raise NotImplementedError


class TakesRowsV1(TakesRows):
    """A mixin that writes rows into the inputs of the model runner in `vllm.v1.worker.gpu_model_runner`.

    Also works with the runner's subclasses, such as the CPU runner.
    """

    def _preprocess(self, *args: Any, **kwargs: Any) -> Any:
        made = cast("Any", super())._preprocess(*args, **kwargs)  # noqa: SLF001  # our own class
        inputs_embeds: torch.Tensor | None = made[1]
        if self._inputs is not None and self._slots and inputs_embeds is not None:
            runner = cast("Any", self)
            self.embed(inputs_embeds, StepRows.of_v1(runner))
            self._hide_placeholders(runner.input_batch)
        return made

    def _hide_placeholders(self, batch: Any) -> None:
        """Removes the placeholder tokens from the prompts that the sampler uses for repetition penalties."""
        prompts = batch.sampling_metadata.prompt_token_ids
        if prompts is not None:
            for i, request_id in enumerate(batch.req_ids):
                if request_id in self._slots:
                    prompts[i] = batch.vocab_size


class TakesRowsV2(TakesRows):
    """A mixin that writes rows into the inputs of the model runner in `vllm.v1.worker.gpu.model_runner`."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Loads the model, and wraps vLLM's function that prepares the input embeddings of a step.

        After vLLM's function, the wrapper writes the rows from the shared memory.
        """
        super().load_model(*args, **kwargs)  # type: ignore[misc]
        state = cast("Any", self).model_state
        prepare = state.prepare_inputs_embeds

        def prepare_and_embed(scheduled: Any, batch: Any, request_states: Any) -> torch.Tensor | None:
            inputs_embeds: torch.Tensor | None = prepare(scheduled, batch, request_states)
            if inputs_embeds is not None:
                self.embed(inputs_embeds, StepRows.of_v2(batch))
            return inputs_embeds

        state.prepare_inputs_embeds = prepare_and_embed


def as_tensor(rows: npt.NDArray[np.generic], dtype: str) -> torch.Tensor:
    """Returns a view of rows of the shared memory as a tensor. `dtype` is the name of the column's dtype."""
    # numpy has no bfloat16. The API represents its bits as uint16.
    return torch.from_numpy(rows).view(getattr(torch, dtype)) if rows.dtype == np.uint16 else torch.from_numpy(rows)
