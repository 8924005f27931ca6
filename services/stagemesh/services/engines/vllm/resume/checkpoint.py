"""A request that goes on from a checkpoint: vLLM is given its tokens as the prompt's end, and counts them as output.

Limits are lowered by what is there already; the text goes on within a character or a stop text, because its decoder is
led through the tokens first. What the sampler knows of them is `resuming_runner`'s share.
"""

import copy
import hashlib
from collections.abc import Sequence
from typing import TypeVar

import numpy as np
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.detokenizer import IncrementalDetokenizer
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.engine.parallel_sampling import ParentRequest

from stagemesh.common.errors import InvalidRequestError
from stagemesh.services.engines.base import Checkpoint

RESUMED_ARGUMENT = "stagemesh_resumed"
"""The key of `SamplingParams.extra_args` under which stands how many tokens at a prompt's end are output."""
_PROMPT = "prompt"
_Params = TypeVar("_Params", bound=SamplingParams)
_DIGEST_BYTES = 8


def checkpoint(prompt: Sequence[int], token_ids: Sequence[int], *, media: bytes = b"") -> Checkpoint:
    """What a request has reached; it also names its prompt, by a digest, so that no other is continued from it.

    `media` are their digest.
    """
    return Checkpoint(len(token_ids), tuple(token_ids), {_PROMPT: _digest(prompt, media)})


def crossed(interval: int, before: int, after: int) -> bool:
    """Whether a multiple of `interval` lies within (before, after]; never for 0."""
    return interval > 0 and before // interval != after // interval


def resumed_tokens(
    resume_from: Checkpoint | None, *, prompt: Sequence[int], vocabulary: int, max_tokens: int, media: bytes = b""
) -> list[int]:
    """The tokens of a checkpoint, none without one.

    Raises InvalidRequestError where this request could not have made them. A checkpoint without a digest, made by
    hand, is taken to belong to the prompt.
    """
    if resume_from is None:
        return []
    tokens = list(resume_from.token_ids)
    if resume_from.steps != len(tokens):
        raise _invalid(f"counts {resume_from.steps} steps and has {len(tokens)} tokens; send it back as it came")
    digest = resume_from.tensors.get(_PROMPT)
    if digest is not None and not np.array_equal(digest, _digest(prompt, media)):
        raise _invalid("belongs to another prompt; send the one that it was made with")
    beyond = next((token for token in tokens if not 0 <= token < vocabulary), None)
    if beyond is not None:
        raise _invalid(f"has token id {beyond}, which is outside the model's vocabulary of {vocabulary}")
    if len(tokens) >= max_tokens:
        raise _invalid(f"has {len(tokens)} tokens already and max_tokens is {max_tokens}; nothing is left to do")
    return tokens


def continued(params: _Params, *, resumed: int) -> _Params:
    """The sampling of the rest, after so many tokens."""
    if not resumed:
        return params
    assert params.max_tokens is not None, "a stage's requests are limited"
    rest = copy.copy(params)
    rest.max_tokens = params.max_tokens - resumed
    rest.min_tokens = max(0, params.min_tokens - resumed)
    rest.extra_args = {**(params.extra_args or {}), RESUMED_ARGUMENT: [resumed, params.min_tokens]}
    return rest


def resumed_count(params: SamplingParams | None) -> int:
    """How many tokens at the end of a request's prompt are output."""
    found = params.extra_args.get(RESUMED_ARGUMENT) if params and params.extra_args else None
    return int(found[0]) if found else 0


class ResumingOutputProcessor(OutputProcessor):
    """vLLM's own, whose text of a resumed request goes on where the checkpoint was made; has no `__init__`."""

    def add_request(
        self,
        request: EngineCoreRequest,
        prompt: str | None,
        parent_req: ParentRequest | None = None,
        request_index: int = 0,
        queue: RequestOutputCollector | None = None,
    ) -> None:
        """Refuses, by VLLMValidationError, a checkpoint that holds a token or a text that ends the request."""
        resumed = resumed_count(request.sampling_params)
        decoder = self._led_through(request, resumed) if resumed else None
        super().add_request(request, prompt, parent_req, request_index, queue)
        if decoder is not None:
            state = self.request_states[request.request_id]
            state.detokenizer, state.sent_tokens_offset = decoder, resumed

    def _led_through(self, request: EngineCoreRequest, resumed: int) -> IncrementalDetokenizer:
        """A decoder in the state in which it was when the checkpoint was made."""
        params = request.sampling_params
        assert params is not None
        assert params.extra_args is not None
        assert request.prompt_token_ids is not None, "a resumed prompt is of tokens"
        whole = copy.copy(request)
        whole.prompt_token_ids, tokens = request.prompt_token_ids[:-resumed], request.prompt_token_ids[-resumed:]
        whole.sampling_params = copy.copy(params)
        whole.sampling_params.min_tokens = params.extra_args[RESUMED_ARGUMENT][1]
        stops = params.stop_token_ids if params.ignore_eos else params.all_stop_token_ids
        if ends := set(tokens).intersection(stops or ()):
            raise VLLMValidationError(f"the checkpoint is past its end: it holds the stop token {min(ends)}")
        decoder = IncrementalDetokenizer.from_new_request(self.tokenizer if params.detokenize else None, whole)
        stop = decoder.update(tokens, stop_terminated=False)
        if stop is not None:
            raise VLLMValidationError(f"the checkpoint is past its end: its text holds the stop text {stop!r}")
        decoder.get_next_output_text(finished=False, delta=True)
        return decoder


def _digest(prompt: Sequence[int], media: bytes) -> "np.ndarray[tuple[int], np.dtype[np.uint8]]":
    data = np.asarray(prompt, np.int64).tobytes() + media
    return np.frombuffer(hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest(), np.uint8)


def _invalid(problem: str) -> InvalidRequestError:
    return InvalidRequestError(f"the checkpoint {problem}", reason="INVALID_CHECKPOINT")
