"""The hidden-states feature: a stage emits the hidden states of each request's tokens."""

from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, cast

from stagemesh.common.errors import InvalidRequestError
from stagemesh.common.tensors import DTYPES
from stagemesh.services.engines.abilities import PartitionsArena
from stagemesh.services.engines.vllm.features import EngineRequest, RequestFeature, RequestHook
from stagemesh.services.engines.vllm.options import ACCEPT, HiddenStatesOptions
from stagemesh.services.engines.vllm.rows.row_receiver import EmittedRows, RowReceiver, min_share_bytes

if TYPE_CHECKING:
    from vllm.config import ModelConfig, VllmConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

CONFIG_KEY = "stagemesh_layers"
"""The key in vLLM's `additional_config` of the emitted inner layers: their numbers by tensor name, in order."""


class HiddenStates(RequestFeature):
    """The request feature for hidden states. Receives rows from a vLLM worker and emits them for their requests.

    After `configure`, all methods must be called on the event loop's thread.
    """

    runner_module = "stagemesh.services.engines.vllm.hidden_states.runner"

    def __init__(
        self, options: HiddenStatesOptions, arena: PartitionsArena | None, *, share_bytes: int, stage: str
    ) -> None:
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
