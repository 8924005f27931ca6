"""What vLLM's model runners do with embeddings from upstream: put them in the place of those of the tokens.

Mixed into a runner's class once the runner is there, so it has no `__init__`. The rows that a step needs are in memory
before it is scheduled.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from stagemesh.services.engines.vllm.embeddings.memory import EMBEDDED_ARGUMENT, Embedded, EmbeddingMemory

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput


class TakesEmbeddings:
    """The part that is the same for all runners. `attach_embeddings` makes it work; before that it does nothing."""

    _embeddings: EmbeddingMemory | None = None
    _embedded: dict[str, Embedded]

    def attach_embeddings(self, memory: EmbeddingMemory) -> None:
        """From now on, requests may have their embeddings there."""
        self._embeddings, self._embedded = memory, {}

    def execute_model(self, scheduler_output: "SchedulerOutput", *args: Any, **kwargs: Any) -> Any:
        """Notes which requests are embedded."""
        if self._embeddings is not None:
            for request_id in scheduler_output.finished_req_ids:
                self._embedded.pop(request_id, None)
            for new in scheduler_output.scheduled_new_reqs:
                extra = new.sampling_params.extra_args if new.sampling_params else None
                if extra and EMBEDDED_ARGUMENT in extra:
                    self._embedded[new.req_id] = msgspec.convert(extra[EMBEDDED_ARGUMENT], Embedded)
        return super().execute_model(scheduler_output, *args, **kwargs)  # type: ignore[misc]

    def _embed(
        self,
        inputs_embeds: torch.Tensor,
        request_ids: Sequence[str],
        starts: npt.NDArray[np.int32],
        positions: npt.NDArray[np.int32],
    ) -> None:
        """Changes a step's embeddings, [tokens, width]; the rows of request i begin at `starts[i]`, `positions[i]`."""
        if self._embeddings is None or not self._embedded:
            return
        memory = self._embeddings
        for i, request_id in enumerate(request_ids):
            embedded = self._embedded.get(request_id)
            if embedded is None:
                continue
            first, end, position = int(starts[i]), int(starts[i + 1]), int(positions[i])
            rows = _tensor(memory, memory.rows(embedded.place, position, end - first)).to(inputs_embeds)
            replaced = min(max(0, embedded.prompt_tokens - position), end - first)
            inputs_embeds[first : first + replaced] = rows[:replaced]
            inputs_embeds[first + replaced : end] += rows[replaced:]


class EmbeddedV1(TakesEmbeddings):
    """For `vllm.v1.worker.gpu_model_runner` and what derives from it, on CPU too."""

    def _preprocess(self, *args: Any, **kwargs: Any) -> Any:
        made = cast("Any", super())._preprocess(*args, **kwargs)  # noqa: SLF001  # our own class
        inputs_embeds: torch.Tensor | None = made[1]
        if self._embeddings is not None and self._embedded and inputs_embeds is not None:
            runner = cast("Any", self)
            batch = runner.input_batch
            count = batch.num_reqs
            starts, positions = runner.query_start_loc.np[: count + 1], batch.num_computed_tokens_cpu[:count]
            self._embed(inputs_embeds, batch.req_ids, starts, positions)
            self._hide_placeholders(batch)
        return made

    def _hide_placeholders(self, batch: Any) -> None:
        """The tokens that stand for embeddings are none of the prompt's to a repetition penalty."""
        prompts = batch.sampling_metadata.prompt_token_ids
        if prompts is not None:
            for i, request_id in enumerate(batch.req_ids):
                if request_id in self._embedded:
                    prompts[i] = batch.vocab_size


class EmbeddedV2(TakesEmbeddings):
    """For `vllm.v1.worker.gpu.model_runner` and what derives from it."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Comes between the runner and what makes a step's embeddings."""
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
    # numpy has no bfloat16; the contract carries its bits.
    return torch.from_numpy(rows).view(dtype) if rows.dtype == np.uint16 else torch.from_numpy(rows)
