"""Mixins for vLLM's model runners that write embeddings from an upstream stage into a step's input embeddings.

The scheduler runs a step only after the step's embeddings are in the shared memory (`run_ahead`).
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from stagemesh.services.engines.vllm.embeddings.feature import Embedded, EmbeddingMemory, EmbeddingTicket
from stagemesh.services.engines.vllm.features import track_arguments

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput


class _TakesEmbeddings:
    """Base class of the mixins. Leaves the inputs unchanged until `attach_embeddings` is called."""

    _embedding_memory: EmbeddingMemory | None = None
    _embedded: dict[str, Embedded]

    def attach_embeddings(self, ticket: bytes) -> None:
        """Opens the shared memory for embeddings. `ticket` is a serialized EmbeddingTicket."""
        self._embedding_memory, self._embedded = (
            EmbeddingMemory(msgspec.msgpack.decode(ticket, type=EmbeddingTicket)),
            {},
        )

    def execute_model(self, scheduler_output: "SchedulerOutput", *args: Any, **kwargs: Any) -> Any:
        """Records which of the step's new requests have embeddings, then runs the step's forward pass."""
        if self._embedding_memory is not None:
            track_arguments(self._embedded, scheduler_output, Embedded)
        return super().execute_model(scheduler_output, *args, **kwargs)  # type: ignore[misc]

    def _embed(
        self,
        inputs_embeds: torch.Tensor,
        request_ids: Sequence[str],
        starts: npt.NDArray[np.int32],
        positions: npt.NDArray[np.int32],
    ) -> None:
        """Writes embeddings into the input embeddings of a step, `inputs_embeds` [tokens, width].

        Replaces the rows of placeholder tokens. Adds embeddings to the rows of sampled tokens. For the request
        `request_ids[i]`, `starts[i]` is the index of the first row in the step, and `positions[i]` is the token
        position of this row in the request.
        """
        memory = self._embedding_memory
        if memory is None or not self._embedded:
            return
        for i, request_id in enumerate(request_ids):
            embedded = self._embedded.get(request_id)
            if embedded is None:
                continue
            first, end, position = int(starts[i]), int(starts[i + 1]), int(positions[i])
            rows = _tensor(memory, memory.rows(embedded.slot, position, end - first)).to(inputs_embeds)
            replaced = min(max(0, embedded.prompt_tokens - position), end - first)
            inputs_embeds[first : first + replaced] = rows[:replaced]
            inputs_embeds[first + replaced : end] += rows[replaced:]


class RunnerV1(_TakesEmbeddings):
    """A mixin that writes embeddings into the inputs of the model runner in `vllm.v1.worker.gpu_model_runner`.

    Also works with the runner's subclasses, such as the CPU runner.
    """

    def _preprocess(self, *args: Any, **kwargs: Any) -> Any:
        made = cast("Any", super())._preprocess(*args, **kwargs)  # noqa: SLF001  # our own class
        inputs_embeds: torch.Tensor | None = made[1]
        if self._embedding_memory is not None and self._embedded and inputs_embeds is not None:
            runner = cast("Any", self)
            batch = runner.input_batch
            count = batch.num_reqs
            starts, positions = runner.query_start_loc.np[: count + 1], batch.num_computed_tokens_cpu[:count]
            self._embed(inputs_embeds, batch.req_ids, starts, positions)
            self._hide_placeholders(batch)
        return made

    def _hide_placeholders(self, batch: Any) -> None:
        """Removes the placeholder tokens from the prompts that the sampler uses for repetition penalties."""
        prompts = batch.sampling_metadata.prompt_token_ids
        if prompts is not None:
            for i, request_id in enumerate(batch.req_ids):
                if request_id in self._embedded:
                    prompts[i] = batch.vocab_size


class RunnerV2(_TakesEmbeddings):
    """A mixin that writes embeddings into the inputs of the model runner in `vllm.v1.worker.gpu.model_runner`."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Loads the model, and wraps vLLM's function that prepares the input embeddings of a step.

        After vLLM's function, the wrapper writes the embeddings from the shared memory.
        """
        super().load_model(*args, **kwargs)  # type: ignore[misc]
        state = cast("Any", self).model_state
        prepare = state.prepare_inputs_embeds

        def prepare_and_embed(scheduled: Any, batch: Any, request_states: Any) -> torch.Tensor | None:
            inputs_embeds: torch.Tensor | None = prepare(scheduled, batch, request_states)
            if inputs_embeds is not None:
                starts, positions = batch.query_start_loc_np, batch.num_computed_tokens_np
                self._embed(inputs_embeds, batch.req_ids, starts, positions)
            return inputs_embeds

        state.prepare_inputs_embeds = prepare_and_embed


def _tensor(memory: EmbeddingMemory, rows: npt.NDArray[np.generic]) -> torch.Tensor:
    dtype: torch.dtype = getattr(torch, memory.ticket.dtype)
    # numpy has no bfloat16. The API represents its bits as uint16.
    return torch.from_numpy(rows).view(dtype) if rows.dtype == np.uint16 else torch.from_numpy(rows)
