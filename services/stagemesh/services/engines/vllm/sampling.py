"""Converts a task's sampling options to vLLM's sampling parameters, and verifies the parameters."""

from collections.abc import Mapping
from dataclasses import fields
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
    """Sampling parameters that `check` verifies on another thread.

    Disables vLLM's own verification, which would run on the event loop.
    """

    def verify(self, *args: object, **kwargs: object) -> None:
        """Does nothing, because `check` has already verified the parameters."""

    def update_from_tokenizer(self, tokenizer: TokenizerLike) -> None:
        """Does nothing, because `check` has already applied the tokenizer's values."""


def sampling_params(
    task: Task, *, prompt_length: int, max_model_len: int, defaults: Mapping[str, Any]
) -> CheckedParams:
    """Returns vLLM's sampling parameters for a task. The caller must pass them to `check` before use.

    `prompt_length` and `max_model_len` are in tokens. `defaults` are the model's own defaults, by vLLM's parameter
    names. Raises InvalidRequestError if vLLM rejects a value or if the prompt leaves too little space for the output,
    and UnsupportedError if a task with a structure resumes from a checkpoint.
    """
    sampling = task.sampling
    if sampling.structure is not None and task.resume_from is not None:
        raise UnsupportedError(
            f"a request with {sampling.structure.kind} cannot resume from a checkpoint: vLLM would restart the "
            "structure; omit resume_from to start over"
        )
    wanted = sampling.max_tokens or max(1, sampling.min_tokens)
    space = max_model_len - prompt_length
    if space < wanted:
        raise InvalidRequestError(
            f"the prompt has {prompt_length} tokens and the output {wanted}, but the model accepts {max_model_len} in "
            "all; shorten the prompt or lower max_tokens",
            reason="PROMPT_TOO_LONG",
        )
    usual = max(sampling.min_tokens, int(defaults.get("max_tokens", DEFAULT_MAX_TOKENS)))
    values: dict[str, Any] = {
        **defaults,
        **_given(sampling),
        "max_tokens": min(space, usual) if sampling.max_tokens is None else sampling.max_tokens,
    }
    try:
        return CheckedParams(
            seed=task.seed,
            output_kind=RequestOutputKind.DELTA,
            # Log-probabilities are emitted only with the tokens.
            logprobs=sampling.logprobs if is_wanted(task, TOKEN_IDS) else None,
            **values,
        )
    except (ValueError, VLLMValidationError) as exc:
        raise InvalidRequestError(f"sampling: {exc}", reason="INVALID_SAMPLING") from exc


def is_wanted(task: Task, tensor: str) -> bool:
    """Returns whether the caller or an edge requests the emitted tensor that is named `tensor`."""
    return task.wanted is None or tensor in task.wanted


def check(params: CheckedParams, config: VllmConfig, tokenizer: TokenizerLike) -> None:
    """Verifies sampling parameters and sets the parameters that depend on the tokenizer.

    Raises InvalidRequestError for a value that vLLM would reject later or that would terminate vLLM's engine. The check
    takes longer for a larger JSON schema. Other threads can run during the check.
    """
    vocabulary = config.model_config.get_vocab_size()
    for token in params.stop_token_ids or ():
        _check_token(token, vocabulary, field="stop_token_ids")
    try:
        SamplingParams.verify(
            params, config.model_config, config.speculative_config, config.structured_outputs_config, tokenizer
        )
        SamplingParams.update_from_tokenizer(params, tokenizer)
    except (ValueError, VLLMValidationError) as exc:
        raise InvalidRequestError(f"sampling: {exc}", reason="INVALID_SAMPLING") from exc
    # vLLM does not check that the model has these tokens.
    for tokens in params.bad_words_token_ids or ():
        for token in tokens:
            _check_token(token, vocabulary, field="bad_words")


def _check_token(token: int, vocabulary: int, *, field: str) -> None:
    if not 0 <= token < vocabulary:
        raise InvalidRequestError(
            f"{field}: token id {token} is outside the model's vocabulary of {vocabulary}", reason="UNKNOWN_TOKEN"
        )


def _given(sampling: SamplingOptions) -> dict[str, Any]:
    """Returns the options that a request sets, by vLLM's names, except `max_tokens` and `logprobs`."""
    values: dict[str, Any] = {field.name: getattr(sampling, field.name) for field in fields(sampling)}
    structure: Structure | None = values.pop("structure")
    if structure is not None:
        kind = "json" if structure.kind == "json_schema" else structure.kind
        texts = list(structure.texts) if kind == "choice" else structure.texts[0]
        arguments: dict[str, Any] = {kind: texts}
        values["structured_outputs"] = StructuredOutputsParams(**arguments)
    del values["max_tokens"], values["logprobs"]
    # vLLM expects lists.
    values |= {name: list(values[name]) for name in ("stop", "stop_token_ids", "bad_words")}
    return {name: value for name, value in values.items() if value is not None}
