"""The hidden-states feature: a stage emits the hidden states of each request's tokens.

A worker writes them into the replica's arena. vLLM runs a step with two calls: `execute_model` runs the forward
pass, and `sample_tokens` samples the tokens. The mixins copy the hidden states between these calls.
"""

from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import msgspec
import torch
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.model_executor.models.interfaces import supports_eagle3
from vllm.v1.outputs import ModelRunnerOutput

from stagemesh.common.wire.tensors import DTYPES
from stagemesh.connectors.arena.arena import Arena
from stagemesh.services.engines.vllm.features import EngineRequest, RequestFeature, RequestHook, track_arguments
from stagemesh.services.engines.vllm.options import ACCEPT, LAST, POSITIONS, HiddenStatesOptions, tensor_name
from stagemesh.services.engines.vllm.rows.input_memory import StepRows
from stagemesh.services.engines.vllm.rows.row_receiver import EmittedRows, RowReceiver
from stagemesh.services.engines.vllm.rows.row_writer import Attachment, RequestedRows, RowWriter, Slice, min_share_bytes

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.engine.async_llm import AsyncLLM


CONFIG_KEY = "stagemesh_layers"
"""The key in vLLM's `additional_config` of the emitted inner layers: their numbers by tensor name, in order."""


class HiddenStates(RequestFeature):
    """The request feature for hidden states. Receives rows from a vLLM worker and emits them for their requests.

    After `configure`, all methods must be called on the event loop's thread.
    """

    runner_module = __name__

    def __init__(self, options: HiddenStatesOptions, arena: Arena | None, *, share_bytes: int, stage: str) -> None:
        """Creates the feature. `share_bytes` is the total size of the worker's partitions of the arena, in bytes."""
        self._options, self._stage, self._share_bytes = options, stage, share_bytes
        self._rows = RowReceiver(arena, share_bytes=share_bytes)

    def set_arguments(self, arguments: "AsyncEngineArgs") -> None:
        if arguments.nnodes > 1 and arguments.pipeline_parallel_size > 1:
            raise self._invalid(
                "hidden_states come from the last pipeline rank, which is on another node than the replica; set "
                "pipeline_parallel_size to 1, or run the stage on one node"
            )
        if arguments.speculative_config is not None:
            # The rows of rejected drafts are known only after the step's tokens are sampled.
            arguments.async_scheduling = False

    def configure(self, config: "VllmConfig") -> None:
        """Raises InvalidRequestError if the model cannot provide the requested hidden states.

        Also raises InvalidRequestError if the worker's partitions of the arena are too small for one row.
        """
        model, options = config.model_config, self._options
        layers = options.inner_layers(accept=self._accepted_layer(model))
        pipeline_ranks = config.parallel_config.pipeline_parallel_size
        problem = _layer_problem(model, list(layers.values()), pipeline_ranks=pipeline_ranks)
        if options.positions and not model.uses_mrope:
            problem = "the model does not use M-RoPE; omit positions"
        if problem:
            raise self._invalid(f"hidden_states: {problem}")
        additional = cast("dict[str, object]", config.additional_config)
        additional[CONFIG_KEY] = layers
        tensors, width = len(options.tensors), model.get_hidden_size()
        row_bytes = tensors * width * DTYPES[options.dtype].itemsize
        min_bytes = min_share_bytes(row_bytes=row_bytes, tensors=tensors)
        if self._share_bytes < min_bytes:
            raise self._invalid(
                f"hidden_states.share_bytes is {self._share_bytes}; {tensors} tensors with {width} values per token "
                f"need at least {min_bytes}"
            )

    async def start(self, llm: "AsyncLLM") -> None:
        """Connects the worker that writes rows. See `RowReceiver.connect` for the errors.

        Also raises InvalidRequestError if the model's class does not provide the states of inner layers.
        """
        await self._rows.connect(llm, self._options.tensors, check=self._check_layers)

    def open(self, request: EngineRequest, held: AsyncExitStack) -> RequestHook | None:
        task = request.task
        if task.wanted is not None and not task.wanted.intersection(self._options.tensors):
            return None
        prompt_tokens = len(request.prompt.token_ids)
        first_position = prompt_tokens - 1 if task.tokens == "last" else 0
        if task.resume_from is not None:
            # All states of a request have the same number of rows. The rows before the checkpoint are already emitted.
            first_position += max(task.resume_from.rows.get(name, 0) for name in self._options.tensors)
        if first_position < request.computed_tokens:
            # vLLM does not compute positions that it finds in the prefix cache, except the last position.
            request.params.skip_reading_prefix_cache = True
        end_position = prompt_tokens if self._options.prompt_only else None
        rows = EmittedRows(request, first_position=first_position, end_position=end_position)
        self._rows.open(rows, held)
        return rows

    def close(self) -> None:
        self._rows.close()

    # -- internals

    def _accepted_layer(self, model: "ModelConfig") -> int | None:
        """Returns the number of the layer that the checkpoint's talker accepts, or None if no option requests it."""
        if ACCEPT not in self._options.layers:
            return None
        layer = getattr(getattr(model.hf_config, "talker_config", None), "accept_hidden_layer", None)
        if not isinstance(layer, int):
            raise self._invalid("hidden_states: the checkpoint has no talker that accepts a layer; name a layer number")
        return layer

    def _check_layers(self, model_without_layers: str | None) -> None:
        """Raises InvalidRequestError unless `model_without_layers` is None.

        `model_without_layers` is the name of a model class that cannot provide the states of inner layers.
        """
        if model_without_layers is not None:
            raise self._invalid(
                f"hidden_states: {model_without_layers} provides no states of inner layers; request only `last`"
            )


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


class Batch(NamedTuple):
    """The rows of one step and their states, between `execute_model` and `sample_tokens`."""

    rows: StepRows
    hidden: torch.Tensor
    aux: Sequence[torch.Tensor]


class _EmitsHiddenStates:
    """Base class of the mixins. Writes no rows until `attach_replica` is called."""

    _rows: RowWriter | None = None
    _requested: dict[str, RequestedRows]
    _drafts: Mapping[str, Sequence[int]]
    _model_without_layers: str | None = None

    def attach_replica(self, attachment: bytes) -> str | None:
        """Prepares this worker to write the rows that requests emit. `attachment` is a serialized Attachment.

        Only one worker writes rows: the first tensor rank of the last pipeline rank, because this worker has all rows
        of the last layer. In the other workers, the method has no effect.

        Returns None if the model can provide the inner layers that the stage emits. Otherwise, returns the name of the
        model's class.
        """
        if self._model_without_layers is None and get_pp_group().is_last_rank and get_tp_group().rank_in_group == 0:
            self._requested, self._drafts = {}, {}
            self._rows = RowWriter(msgspec.msgpack.decode(attachment, type=Attachment), device=cast("Any", self).device)
        return self._model_without_layers

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Loads the model and configures it to return the hidden states of the inner layers that the stage emits."""
        super().load_model(*args, **kwargs)  # type: ignore[misc]
        if self._inner_layers:
            model = cast("Any", self).get_model()
            if not supports_eagle3(cast("object", model)):
                self._model_without_layers = type(model).__name__
                return
            model.set_aux_hidden_state_layers(tuple(self._inner_layers.values()))
            self.use_aux_hidden_state_outputs = True

    def execute_model(self, scheduler_output: "SchedulerOutput", *args: Any, **kwargs: Any) -> Any:
        """Records which rows the step's new requests emit, then runs the step's forward pass."""
        if self._rows is not None:
            track_arguments(self._requested, scheduler_output, RequestedRows)
            self._drafts = scheduler_output.scheduled_spec_decode_tokens
        return super().execute_model(scheduler_output, *args, **kwargs)  # type: ignore[misc]

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        """Copies the requested rows, samples the step's tokens, and reports the rows to the replica."""
        batch = self._batch() if self._rows is not None and self._requested else None
        slices = self._slices(batch.rows) if batch is not None else []
        if self._rows is None or batch is None or not slices:
            return super().sample_tokens(*args, **kwargs)  # type: ignore[misc]
        written = self._rows.copy(self._states(batch), slices)
        output = cast("Any", super().sample_tokens(*args, **kwargs))  # type: ignore[misc]
        self._rows.send(written, self._valid_counts(batch.rows, output) if self._drafts else {})
        return output

    @property
    def _inner_layers(self) -> Mapping[str, int]:
        """The numbers of the emitted inner layers, by tensor name and in order.

        Does not include the state after the final norm.
        """
        layers: Mapping[str, int] = cast("Any", self).vllm_config.additional_config.get(CONFIG_KEY, {})
        return layers

    def _batch(self) -> Batch | None:
        """Returns the step whose tokens are not sampled yet, or None if this rank has no hidden states of it."""
        state = cast("Any", self).execute_model_state
        if state is None or state.hidden_states is None:
            return None
        return Batch(self._step_rows(state), state.hidden_states, state.aux_hidden_states or ())

    def _step_rows(self, state: Any) -> StepRows:
        """Returns the rows of the step. `state` is the runner's state between `execute_model` and `sample_tokens`."""
        raise NotImplementedError

    def _positions(self, count: int) -> torch.Tensor:
        """Returns the positions of the step's first `count` rows for M-RoPE, [axes, rows]."""
        raise NotImplementedError

    def _slices(self, rows: StepRows) -> list[Slice]:
        slices: list[Slice] = []
        for i, request_id in enumerate(rows.request_ids):
            requested = self._requested.get(request_id)
            if requested is None:
                continue
            start, end, position = int(rows.starts[i]), int(rows.starts[i + 1]), int(rows.positions[i])
            skipped = max(0, requested.first_position - position)
            if requested.end_position is not None:
                end = min(end, start + requested.end_position - position)
            if start + skipped < end:
                slices.append(Slice(requested.name, position + skipped, start + skipped, end - start - skipped))
        return slices

    def _states(self, batch: Batch) -> dict[str, torch.Tensor]:
        assert self._rows is not None, "only a writer copies rows"
        states = {tensor_name(LAST): batch.hidden}
        states |= dict(zip(self._inner_layers, batch.aux, strict=True))
        if POSITIONS in self._rows.tensors:
            states[POSITIONS] = self._positions(len(batch.hidden)).T
        return {name: states[name] for name in self._rows.tensors}

    def _valid_counts(self, rows: StepRows, output: Any) -> dict[str, int]:
        """Returns the number of valid rows of each request with draft tokens, by request name.

        The rows of rejected draft tokens are invalid. vLLM computes the positions of these rows again.
        """
        assert isinstance(output, ModelRunnerOutput), "the feature disables asynchronous scheduling with drafts"
        counts: dict[str, int] = {}
        for i, request_id in enumerate(rows.request_ids):
            requested, drafts = self._requested.get(request_id), self._drafts.get(request_id)
            if requested is not None and drafts:
                sampled = len(output.sampled_token_ids[output.req_id_to_index[request_id]])
                count = int(rows.starts[i + 1] - rows.starts[i])
                counts[requested.name] = count - len(drafts) + max(0, sampled - 1)
        return counts


class RunnerV1(_EmitsHiddenStates):
    """A mixin that emits hidden states from the model runner in `vllm.v1.worker.gpu_model_runner`.

    Also works with the runner's subclasses, such as the CPU runner.
    """

    def _step_rows(self, state: Any) -> StepRows:  # noqa: ARG002  # the runner itself has them
        return StepRows.of_v1(self)

    def _positions(self, count: int) -> torch.Tensor:
        return cast("torch.Tensor", cast("Any", self).mrope_positions.gpu[:, :count])


class RunnerV2(_EmitsHiddenStates):
    """A mixin that emits hidden states from the model runner in `vllm.v1.worker.gpu.model_runner`."""

    def _step_rows(self, state: Any) -> StepRows:
        return StepRows.of_v2(state.input_batch)

    def _positions(self, count: int) -> torch.Tensor:
        return cast("torch.Tensor", cast("Any", self).model_state.rope_state.get_positions(count))
