"""Which models give which hidden states."""

from collections.abc import Sequence

from vllm.config import ModelConfig
from vllm.model_executor.model_loader.utils import get_model_cls
from vllm.model_executor.models.interfaces import supports_eagle3

from stagemesh.connectors.errors import InvalidRequestError


def check_layers(config: ModelConfig, inner_layers: Sequence[int], *, stage: str, pipeline_ranks: int) -> None:
    """Raises InvalidRequestError for hidden states that a stage's model does not give, saying which it does.

    `inner_layers` are in order; `pipeline_ranks` is how many workers the layers are spread over.
    """
    problem = _problem(config, inner_layers, pipeline_ranks=pipeline_ranks)
    if problem:
        raise InvalidRequestError(f"stage {stage}: hidden_states: {problem}", reason="INVALID_OPTION")


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
    model = get_model_cls(config)
    if not supports_eagle3(model):
        return f"{model.__name__} gives no states of inner layers; ask for `last` alone"
    return None
