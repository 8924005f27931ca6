"""What vLLM's model runners do beside running: hidden states leave them for the replica's arena.

`EmitsHiddenStates` is mixed into a runner's class once the runner is there, so it has no `__init__`. It looks at a step
between its two halves, `execute_model` and `sample_tokens`; where a runner keeps what is looked at is known to the
adapters, one for each kind of runner.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from vllm.distributed.parallel_state import get_pp_group
from vllm.model_executor.models.interfaces import supports_eagle3
from vllm.v1.outputs import ModelRunnerOutput

from stagemesh.services.engines.vllm.hidden_states.row_messages import CONFIG_KEY, EXTRA_ARGUMENT, RequestedRows
from stagemesh.services.engines.vllm.hidden_states.row_writer import RowWriter, Slice
from stagemesh.services.engines.vllm.options import LAST, tensor_name

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput


class Batch(NamedTuple):
    """A step between its halves: the requests in the order of their rows."""

    request_ids: Sequence[str]
    starts: npt.NDArray[np.int32]
    """The first row of each, and the end of the last."""
    positions: npt.NDArray[np.int32]
    """Of each request's first row among its tokens."""
    hidden: torch.Tensor
    aux: Sequence[torch.Tensor]


class EmitsHiddenStates:
    """The part that is the same for all runners. `attach` makes it work; before that it does nothing."""

    without_layers: str | None = None
    """The model's name, where it does not give the inner layers' states that the stage asks for."""
    _rows: RowWriter | None = None
    _wishes: dict[str, RequestedRows]
    _drafts: Mapping[str, Sequence[int]]

    def attach(self, rows: RowWriter) -> None:
        """From now on, requests that wish for it have their hidden states written."""
        self._rows, self._wishes, self._drafts = rows, {}, {}

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Has the model give its inner layers' states too, where the stage asks for them."""
        super().load_model(*args, **kwargs)  # type: ignore[misc]
        if self._inner_layers:
            model = cast("Any", self).get_model()
            if not supports_eagle3(cast("object", model)):
                self.without_layers = type(model).__name__
                return
            model.set_aux_hidden_state_layers(tuple(self._inner_layers))
            self.use_aux_hidden_state_outputs = True

    def execute_model(self, scheduler_output: "SchedulerOutput", *args: Any, **kwargs: Any) -> Any:
        """Notes what new requests wish for."""
        if self._rows is not None:
            for request_id in scheduler_output.finished_req_ids:
                self._wishes.pop(request_id, None)
            for new in scheduler_output.scheduled_new_reqs:
                extra = new.sampling_params.extra_args if new.sampling_params else None
                if extra and EXTRA_ARGUMENT in extra:
                    self._wishes[new.req_id] = msgspec.convert(extra[EXTRA_ARGUMENT], RequestedRows)
            self._drafts = scheduler_output.scheduled_spec_decode_tokens
        return super().execute_model(scheduler_output, *args, **kwargs)  # type: ignore[misc]

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        """Copies the wished for rows before sampling goes on, and sends them after it."""
        batch = self._batch() if self._rows is not None and self._wishes else None
        slices = self._slices(batch) if batch is not None else []
        if self._rows is None or batch is None or not slices:
            return super().sample_tokens(*args, **kwargs)  # type: ignore[misc]
        written = self._rows.copy(self._states(batch), slices)
        output = cast("Any", super().sample_tokens(*args, **kwargs))  # type: ignore[misc]
        self._rows.send(written, self._valid_counts(batch, output) if self._drafts else {})
        return output

    @property
    def _inner_layers(self) -> Sequence[int]:
        """The layers before the last whose states are emitted, in order."""
        layers: Sequence[int] = cast("Any", self).vllm_config.additional_config.get(CONFIG_KEY, ())
        return layers

    def _batch(self) -> Batch | None:
        """The step that waits for its second half; None where there is none on this rank."""
        raise NotImplementedError

    def _slices(self, batch: Batch) -> list[Slice]:
        slices: list[Slice] = []
        for i, request_id in enumerate(batch.request_ids):
            wish = self._wishes.get(request_id)
            if wish is None:
                continue
            start, end, position = int(batch.starts[i]), int(batch.starts[i + 1]), int(batch.positions[i])
            skipped = max(0, wish.first_position - position)
            if start + skipped < end:
                slices.append(Slice(wish.name, position + skipped, start + skipped, end - start - skipped))
        return slices

    def _states(self, batch: Batch) -> dict[str, torch.Tensor]:
        assert self._rows is not None, "rows are copied by a writer"
        states = {tensor_name(LAST): batch.hidden}
        states |= {tensor_name(layer): rows for layer, rows in zip(self._inner_layers, batch.aux, strict=True)}
        return {name: states[name] for name in self._rows.tensors}

    def _valid_counts(self, batch: Batch, output: Any) -> dict[str, int]:
        """How many rows of the requests with draft tokens count: those of rejected drafts come again."""
        assert isinstance(output, ModelRunnerOutput), "drafts and asynchronous scheduling are refused together"
        counts: dict[str, int] = {}
        for i, request_id in enumerate(batch.request_ids):
            wish, drafts = self._wishes.get(request_id), self._drafts.get(request_id)
            if wish is not None and drafts:
                sampled = len(output.sampled_token_ids[output.req_id_to_index[request_id]])
                counts[wish.name] = int(batch.starts[i + 1] - batch.starts[i]) - len(drafts) + max(0, sampled - 1)
        return counts


class RunnerV1(EmitsHiddenStates):
    """For `vllm.v1.worker.gpu_model_runner` and what derives from it, on CPU too."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Makes the room for what the pipeline rank before sends: vLLM leaves it to a warm-up that a CPU skips."""
        super().load_model(*args, **kwargs)
        runner = cast("Any", self)
        if not get_pp_group().is_first_rank and runner.intermediate_tensors is None:
            runner.intermediate_tensors = runner.model.make_empty_intermediate_tensors(
                batch_size=runner.max_num_tokens, dtype=runner.model_config.dtype, device=runner.device
            )

    def _batch(self) -> Batch | None:
        runner = cast("Any", self)
        state = runner.execute_model_state
        if state is None or state.hidden_states is None:
            return None
        count = runner.input_batch.num_reqs
        return Batch(
            runner.input_batch.req_ids,
            runner.query_start_loc.np[: count + 1],
            runner.input_batch.num_computed_tokens_cpu[:count],
            state.hidden_states,
            state.aux_hidden_states or (),
        )


class RunnerV2(EmitsHiddenStates):
    """For `vllm.v1.worker.gpu.model_runner` and what derives from it."""

    def _batch(self) -> Batch | None:
        runner = cast("Any", self)
        state = runner.execute_model_state
        if state is None or state.hidden_states is None:
            return None
        batch = state.input_batch
        return Batch(
            batch.req_ids,
            batch.query_start_loc_np[: batch.num_reqs + 1],
            batch.num_computed_tokens_np[: batch.num_reqs],
            state.hidden_states,
            state.aux_hidden_states or (),
        )
