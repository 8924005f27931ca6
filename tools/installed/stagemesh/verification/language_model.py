"""The reference of a vllm stage with a language model: transformers' AutoModelForCausalLM."""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from stagemesh.common.wire.tensors import Array
from stagemesh.verification.base import (
    ForcedTokens,
    Outputs,
    language_model_precision,
    load_model,
    missing,
    states_precision,
    to_numpy,
)
from stagemesh.verification.comparison import Compared, compare_choices, compare_exactly, compare_numbers
from stagemesh.verification.job import Comparison, VerificationRequest, VerifiedStage
from stagemesh.verification.references import HIDDEN_STATES, PROMPT_IDS, TOKEN_IDS


class LanguageModel:
    """A `Reference` that computes the model once for the prompt and the tokens of the stage."""

    def __init__(self, stages: Mapping[str, VerifiedStage], device: str) -> None:
        self._stage = stages["text"]
        folder, self._precision = self._stage.stage.model, language_model_precision(self._stage)
        self._tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        dtype = getattr(torch, self._precision)
        self._model = load_model(AutoModelForCausalLM, folder, dtype=dtype, device=device)

    def compare(self, number: int, request: VerificationRequest, outputs: Outputs) -> Iterator[Comparison]:
        """Yields the comparisons of the prompt's tokens, of the sampled tokens, and of the hidden states."""
        prompt = tokenize(self._tokenizer, request.prompt)
        tokens = outputs.get(self._stage, TOKEN_IDS)
        yield compare_prompt(self._what(number, PROMPT_IDS), outputs.get(self._stage, PROMPT_IDS), prompt)
        what = self._what(number, TOKEN_IDS)
        if tokens is None:
            yield missing(what)
            return
        forced = ForcedTokens(tokens.tolist())
        states = self._run(prompt, tokens, forced)
        yield compare_choices(what, forced.choices)
        for name in self._stage.outputs:
            if name.startswith(HIDDEN_STATES):
                yield self._compare_states(number, name, outputs.get(self._stage, name), states)

    # -- internals

    def _what(self, number: int, output: str) -> Compared:
        precision = states_precision(self._stage) if output.startswith(HIDDEN_STATES) else self._precision
        return Compared(number, self._stage.stage.name, output, precision)

    @torch.inference_mode()
    def _run(self, prompt: Array, tokens: Array, forced: ForcedTokens) -> tuple[torch.Tensor, ...]:
        """Records the model's choices. Returns the hidden states of all layers, each [tokens, width]."""
        ids = torch.from_numpy(np.concatenate([prompt, tokens])[None]).long().to(self._model.device)
        result = self._model(ids, output_hidden_states=True)
        for logits in result.logits[0, len(prompt) - 1 :]:
            forced(ids, logits[None])
        return tuple(layer[0] for layer in result.hidden_states)

    def _compare_states(
        self, number: int, name: str, ours: Array | None, states: tuple[torch.Tensor, ...]
    ) -> Comparison:
        what = self._what(number, name)
        if ours is None:
            return missing(what)
        layer = name.removeprefix(HIDDEN_STATES).removeprefix("_")
        if layer and not layer.isdecimal():
            return what.skip("the reference does not know this layer; name it by its number")
        # The stage does not compute the state of the last token, unless another token followed it.
        return compare_numbers(what, ours, to_numpy(states[int(layer) if layer else -1])[: len(ours)])


def tokenize(tokenizer: Any, prompt: str) -> Array:
    """Returns the tokens of a prompt, int32[tokens], with the model's chat template if it has one."""
    if not tokenizer.chat_template:
        return np.asarray(tokenizer(prompt).input_ids, np.int32)
    messages = [{"role": "user", "content": prompt}]
    text = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    return np.asarray(tokenizer(text, add_special_tokens=False).input_ids, np.int32)


def compare_prompt(what: Compared, ours: Array | None, theirs: Array) -> Comparison:
    """Compares the tokens of the prompt."""
    return missing(what) if ours is None else compare_exactly(what, ours, theirs)
