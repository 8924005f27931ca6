"""Whether a stage can emit the hidden states that it is to emit: its model gives them, and there is room for them."""

from collections.abc import Sequence

from vllm.config import ModelConfig

from stagemesh.common.errors import InvalidRequestError
from stagemesh.common.tensors import DTYPES
from stagemesh.services.engines.vllm.hidden_states.row_messages import PASSING_PART, least_passing_bytes
from stagemesh.services.engines.vllm.options import HiddenStatesOptions


def check_layers(config: ModelConfig, inner_layers: Sequence[int], *, stage: str, pipeline_ranks: int) -> None:
    """Raises InvalidRequestError for hidden states that a stage's model does not give, saying which it does.

    `inner_layers` are in order; `pipeline_ranks` is how many workers the layers are spread over. Whether a model gives
    any of them at all is known to its class alone, which is not loaded here: the worker says so.
    """
    problem = _problem(config, inner_layers, pipeline_ranks=pipeline_ranks)
    if problem:
        raise InvalidRequestError(f"stage {stage}: hidden_states: {problem}", reason="INVALID_OPTION")


def check_room(states: HiddenStatesOptions, *, share_bytes: int, width: int, stage: str) -> None:
    """Raises InvalidRequestError where not even a token's rows, `width` values a layer, fit a share of that size."""
    tensors = len(states.tensors)
    row_bytes = tensors * width * DTYPES[states.dtype].itemsize
    least_bytes = PASSING_PART * least_passing_bytes(row_bytes=row_bytes, tensors=tensors)
    if share_bytes < least_bytes:
        raise InvalidRequestError(
            f"stage {stage}: hidden_states.share_bytes is {share_bytes}; for {tensors} times {width} values a token it "
            f"must be at least {least_bytes}",
            reason="INVALID_OPTION",
        )


def _problem(config: ModelConfig, inner_layers: Sequence[int], *, pipeline_ranks: int) -> str | None:
    if config.runner_type != "generate":
        return "a model that pools samples no tokens and emits nothing; leave the option out, or runner: pooling"
    if not inner_layers:
        return None
    count = config.hf_text_config.num_hidden_layers
    if inner_layers[-1] >= count:
        return f"layers holds {inner_layers[-1]}; the model has layers 0 to {count - 1} and `last`"
    if pipeline_ranks > 1:
        return (
            f"states of inner layers are not all on one worker with pipeline_parallel_size {pipeline_ranks}; "
            "ask for `last` alone"
        )
    return None
