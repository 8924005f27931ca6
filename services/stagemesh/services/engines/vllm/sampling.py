"""A task's sampling in vLLM's terms."""

from collections.abc import Mapping
from typing import Any

from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.tokenizers import TokenizerLike

from stagemesh.common.errors import InvalidRequestError, UnsupportedError
from stagemesh.services.engines.base import SamplingOptions, Structure, Task

DEFAULT_MAX_TOKENS = 256
TOKEN_IDS = "token_ids"  # noqa: S105  # tokens of a vocabulary


class CheckedParams(SamplingParams):
    """Sampling that `check` has checked off the event loop; vLLM's own check, on the loop, has nothing left to do."""

    def verify(self, *args: object, **kwargs: object) -> None:
        """Does nothing."""

    def update_from_tokenizer(self, tokenizer: TokenizerLike) -> None:
        """Does nothing."""


def sampling_params(
    task: Task, *, prompt_length: int, max_model_len: int, defaults: Mapping[str, Any]
) -> CheckedParams:
    """How vLLM is to sample for a task, yet to be checked; `defaults` are the model's own, in vLLM's names.

    Raises InvalidRequestError for values that vLLM refuses, and for a prompt that leaves too little room;
    UnsupportedError for what vLLM cannot do.
    """
    sampling = task.sampling
    if sampling.structure is not None and task.resume_from is not None:
        raise UnsupportedError(
            f"a request with {sampling.structure.kind} cannot go on from a checkpoint: vLLM would begin the structure "
            "anew; leave resume_from unset to start over"
        )
    wanted = sampling.max_tokens or max(1, sampling.min_tokens)
    room = max_model_len - prompt_length
    if room < wanted:
        raise InvalidRequestError(
            f"the prompt has {prompt_length} tokens and {wanted} are to follow, but the model takes {max_model_len} in "
            "all; shorten the prompt or lower max_tokens",
            reason="PROMPT_TOO_LONG",
        )
    usual = max(sampling.min_tokens, int(defaults.get("max_tokens", DEFAULT_MAX_TOKENS)))
    values: dict[str, Any] = {
        **defaults,
        **{name: value for name, value in _given(sampling).items() if value is not None},
        "max_tokens": min(room, usual) if sampling.max_tokens is None else sampling.max_tokens,
    }
    try:
        return CheckedParams(
            seed=task.seed,
            output_kind=RequestOutputKind.DELTA,
            # Nobody hears them without the tokens.
            logprobs=sampling.logprobs if is_wanted(task, TOKEN_IDS) else None,
            **values,
        )
    except (ValueError, VLLMValidationError) as exc:
        raise InvalidRequestError(f"sampling: {exc}", reason="INVALID_SAMPLING") from exc


def is_wanted(task: Task, tensor: str) -> bool:
    """Whether somebody takes an emitted tensor."""
    return task.wanted is None or tensor in task.wanted


def check(params: CheckedParams, config: VllmConfig, tokenizer: TokenizerLike) -> None:
    """Raises InvalidRequestError for what vLLM would find wrong later, and for what would end its engine.

    Takes as long as a schema is large, and leaves the interpreter to others meanwhile.
    """
    vocabulary = config.model_config.get_vocab_size()
    for token in params.stop_token_ids or ():
        _check_token(token, vocabulary, what="stop_token_ids: token id")
    try:
        SamplingParams.verify(
            params, config.model_config, config.speculative_config, config.structured_outputs_config, tokenizer
        )
        SamplingParams.update_from_tokenizer(params, tokenizer)
    except (ValueError, VLLMValidationError) as exc:
        raise InvalidRequestError(f"sampling: {exc}", reason="INVALID_SAMPLING") from exc
    # vLLM takes the tokenizer's word for it that the model has such tokens.
    for tokens in params.bad_words_token_ids or ():
        for token in tokens:
            _check_token(token, vocabulary, what="bad_words: token id")


def _check_token(token: int, vocabulary: int, *, what: str) -> None:
    if not 0 <= token < vocabulary:
        raise InvalidRequestError(
            f"{what} {token} is outside the model's vocabulary of {vocabulary}", reason="UNKNOWN_TOKEN"
        )


def _given(sampling: SamplingOptions) -> dict[str, Any]:
    return {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "presence_penalty": sampling.presence_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "stop": list(sampling.stop) or None,
        "stop_token_ids": list(sampling.stop_token_ids) or None,
        "min_tokens": sampling.min_tokens or None,
        "ignore_eos": sampling.ignore_eos or None,
        "bad_words": list(sampling.bad_words) or None,
        "structured_outputs": sampling.structure and _structured(sampling.structure),
    }


def _structured(structure: Structure) -> StructuredOutputsParams:
    match structure.kind:
        case "json_schema":
            return StructuredOutputsParams(json=structure.texts[0])
        case "regex":
            return StructuredOutputsParams(regex=structure.texts[0])
        case "grammar":
            return StructuredOutputsParams(grammar=structure.texts[0])
        case "choice":
            return StructuredOutputsParams(choice=list(structure.texts))
