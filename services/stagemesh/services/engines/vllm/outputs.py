"""Converts vLLM's outputs to emissions, including the log-probabilities of sampled tokens."""

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from vllm import SamplingParams
from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.tokenizers import TokenizerLike
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.detokenizer import BaseIncrementalDetokenizer, IncrementalDetokenizer

from stagemesh.common.errors import InvalidRequestError, UnavailableError
from stagemesh.common.wire.tensors import Array, Tensors
from stagemesh.connectors.packets import Packet
from stagemesh.services.engines.base import END, Emission, Finish, Task, TokenLogprob, TokenLogprobs
from stagemesh.services.engines.vllm.features import EngineRequest, RequestPrompt
from stagemesh.services.engines.vllm.options import PROMPT_IDS

TEXT = "text"
TOKEN_IDS = "token_ids"  # noqa: S105  # tokens of a vocabulary


def is_wanted(task: Task, tensor: str) -> bool:
    """Returns whether the caller or an edge requests the emitted tensor with the name `tensor`."""
    return task.wanted is None or tensor in task.wanted


def emission_of(output: CompletionOutput, request: EngineRequest, *, with_tokens: bool) -> Emission | None:
    """Returns an emission with the new text of an output, and its message if the request is parsed.

    Returns None if the output has none of them.

    If `with_tokens` is True, the emission also has the new tokens. A packet with tokens also contains the text, even if
    the text is empty. A consumer of text and tokens therefore needs only one packet.
    """
    logprobs, text_logprobs = request.logprobs.read(output) if request.logprobs is not None else ((), ())
    message = request.message.read(output, logprobs) if request.message is not None else None
    text, has_tokens = output.text, with_tokens and bool(output.token_ids)
    if not text and not has_tokens and not message:
        return None
    tensors: dict[str, Array] = {TEXT: np.frombuffer(text.encode(), np.uint8)} if text or has_tokens else {}
    if not has_tokens:
        return Emission(Packet(tensors), text_logprobs=text_logprobs, message=message, counts=request.counts)
    tensors[TOKEN_IDS] = np.array(output.token_ids, np.int32)
    return Emission(Packet(tensors), logprobs, text_logprobs, message, request.counts)


def emission_of_prompt(request: EngineRequest) -> Emission | None:
    """Returns an emission with the tokens of a request's prompt.

    Returns None if they are not requested or already emitted.
    """
    task = request.task
    emitted = task.resume_from is not None and task.resume_from.rows.get(PROMPT_IDS)
    if task.wanted is None or PROMPT_IDS not in task.wanted or emitted:
        return None
    return Emission(Packet({PROMPT_IDS: np.array(request.prompt.token_ids, np.int32)}))


_MAX_PROMPT_BYTES = 5 << 20
"""The maximum size of the log-probabilities of a prompt, which are in one message, in bytes."""
_TOKEN_BYTES = 24
"""The size of a token's log-probability in a message, without its text, in bytes."""


def prompt_logprobs_of(output: RequestOutput, request: EngineRequest, tokenizer: TokenizerLike) -> list[TokenLogprobs]:
    """Returns the log-probabilities of a prompt's tokens. Empty if the output has none.

    Raises InvalidRequestError (INVALID_SAMPLING) if they do not fit into a message.
    """
    alternatives = request.params.prompt_logprobs or 0
    # The log-probabilities of a resumed request continue with the tokens of its checkpoint.
    found = zip(request.prompt.token_ids, output.prompt_logprobs or (), strict=False)
    return _placed(
        _converted(token, {token: Logprob(0.0, decoded_token=tokenizer.decode([token]))}, position=0, alternatives=0)
        if known is None
        else _converted(token, known, position=0, alternatives=alternatives)
        for token, known in found
    )


def prompt_tokens_of(request: EngineRequest, tokenizer: TokenizerLike) -> list[TokenLogprobs]:
    """Returns the tokens of a prompt with their texts, which together are its text with all special tokens.

    Raises InvalidRequestError (INVALID_SAMPLING) if they do not fit into a message.
    """
    params = SamplingParams(skip_special_tokens=False)
    detokenizer = new_detokenizer(request.name, (), params=params, tokenizer=tokenizer)

    def decode(token: int) -> TokenLogprobs:
        detokenizer.token_ids.append(token)
        return TokenLogprobs(TokenLogprob(token, detokenizer.decode_next(token), 0.0), (), 0)

    return _placed(map(decode, request.prompt.token_ids))


def _placed(tokens: Iterable[TokenLogprobs]) -> list[TokenLogprobs]:
    """Returns the tokens of a prompt with their positions."""
    made, position, size_bytes = list[TokenLogprobs](), 0, 0
    for each in tokens:
        made.append(each._replace(position=position))
        position += len(each.sampled.text.encode())
        size_bytes += sum(_TOKEN_BYTES + len(token.text.encode()) for token in (each.sampled, *each.top))
        if size_bytes > _MAX_PROMPT_BYTES:
            problem = (
                f"the log-probabilities of the prompt have more than {_MAX_PROMPT_BYTES} bytes; shorten the prompt"
            )
            raise InvalidRequestError(problem, reason="INVALID_SAMPLING")
    return made


def end_error(request: EngineRequest, *, stage: str) -> InvalidRequestError | UnavailableError:
    """Returns the error for a request that vLLM ended because of an error.

    It is an InvalidRequestError if the request requires a structure, and an UnavailableError otherwise.
    """
    if request.params.structured_outputs is not None:
        structure = request.task.sampling.structure
        kind = structure.kind if structure is not None else "the schema of the tools"
        return InvalidRequestError(
            f"stage {stage}: no token fulfils {kind}, or it is too large; simplify it, or omit bad_words",
            reason="INVALID_SAMPLING",
        )
    return UnavailableError(
        f"stage {stage}: vLLM ended the request with an error; its own log has the cause", reason="ENGINE_FAILED"
    )


def finish_of(output: CompletionOutput, request: EngineRequest) -> Finish:
    """Returns why a finished output ends."""
    match output.finish_reason, output.stop_reason:
        case "stop", str(text):
            return Finish("stop", stop_text=text)
        case "stop", int(token):
            return Finish("stop", stop_token_id=token)
        case "length", _:
            return Finish("length" if request.task.sampling.max_tokens == len(request.sampled) else "limit")
        case _:
            return END


def media_tokens(prompt: RequestPrompt) -> int:
    """Returns the number of tokens of a prompt that stand for images, audio or video."""
    placeholders: Mapping[str, Sequence[Any]] = prompt.engine_input.get("mm_placeholders", {})  # type: ignore[assignment]
    # The ranges of a video and of its audio track overlap.
    ranges = (range(each.offset, each.offset + each.length) for parts in placeholders.values() for each in parts)
    return len(set[int]().union(*ranges))


def new_detokenizer(
    name: str, prompt: Sequence[int], *, params: SamplingParams, tokenizer: TokenizerLike
) -> BaseIncrementalDetokenizer:
    """Returns a detokenizer of the output of the request `name`, in addition to vLLM's own.

    `prompt` contains the token ids of the prompt.
    """
    request = EngineCoreRequest(
        request_id=name,
        prompt_token_ids=list(prompt),
        mm_features=None,
        sampling_params=params,
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None,
        cache_salt=None,
        data_parallel_rank=None,
    )
    detokenizer = IncrementalDetokenizer.from_new_request(tokenizer, request)
    assert isinstance(detokenizer, BaseIncrementalDetokenizer), "the engine always has a tokenizer"
    return detokenizer


_STATE = "logprobs"


class LogprobsReader:
    """Converts vLLM's log-probabilities of one request, and assigns them to the request's pieces of text.

    vLLM's text can lag behind its tokens: a token may end within a character, and the end of the text is retained while
    it may belong to a stop text. A second detokenizer without stop texts determines where each token begins.
    """

    def __init__(
        self, name: str, prompt: Sequence[int], *, params: SamplingParams, alternatives: int, tokenizer: TokenizerLike
    ) -> None:
        """Creates the reader. `prompt` contains the token ids of the prompt of the request `name`. `alternatives` is
        the number of most probable tokens at each position.
        """
        params = copy.copy(params)
        params.stop = []
        self._detokenizer = new_detokenizer(name, prompt, params=params, tokenizer=tokenizer)
        self._alternatives = alternatives
        self._text_length = 0
        """The length of the text that vLLM has returned so far, in bytes of UTF-8."""
        self._read_length = self._read_bytes = 0
        """The length of the detokenizer's text before the next token, in characters and in bytes of UTF-8."""
        self._waiting: list[TokenLogprobs] = []
        """The tokens that begin after this text, in order."""

    def read(self, output: CompletionOutput) -> tuple[tuple[TokenLogprobs, ...], tuple[TokenLogprobs, ...]]:
        """Returns the log-probabilities of the output's tokens, and those of the tokens that begin in its text."""
        made = list[TokenLogprobs]()
        for token, known in zip(output.token_ids, output.logprobs or (), strict=True):
            if known is not None:
                made.append(_converted(token, known, position=self._read_bytes, alternatives=self._alternatives))
            self._detokenize([token])
        self._waiting += made
        self._text_length += len(output.text.encode())
        begun = sum(each.position < self._text_length for each in self._waiting)
        in_text, self._waiting = self._waiting[:begun], self._waiting[begun:]
        return tuple(made), tuple(in_text)

    def state(self) -> Tensors:
        """Returns the part of a checkpoint from which `resume` continues."""
        return {_STATE: np.frombuffer(msgspec.msgpack.encode((self._text_length, self._waiting)), np.uint8)}

    def resume(self, tokens: Sequence[int], state: Tensors) -> None:
        """Continues after the tokens of a checkpoint. `state` contains the tensors of the checkpoint.

        Raises InvalidRequestError (INVALID_CHECKPOINT) if the state is damaged.
        """
        self._detokenize(list(tokens))
        self._text_length = self._read_bytes
        if (saved := state.get(_STATE)) is None:
            return
        try:
            decoded = msgspec.msgpack.decode(saved.tobytes(), type=tuple[int, list[TokenLogprobs]])
        except msgspec.DecodeError as exc:
            raise InvalidRequestError(
                f"the checkpoint has damaged log-probabilities: {exc}; send it back unchanged",
                reason="INVALID_CHECKPOINT",
            ) from exc
        self._text_length, self._waiting = decoded

    def _detokenize(self, tokens: list[int]) -> None:
        self._detokenizer.update(tokens, stop_terminated=False)
        text = self._detokenizer.output_text
        self._read_bytes += len(text[self._read_length :].encode())
        self._read_length = len(text)


def _converted(token: int, known: Mapping[int, Logprob], *, position: int, alternatives: int) -> TokenLogprobs:
    ranked = sorted(known.items(), key=lambda item: item[1].rank or 0)[:alternatives]
    return TokenLogprobs(
        _token(token, known[token]), tuple(_token(each, logprob) for each, logprob in ranked), position
    )


def _token(token: int, known: Logprob) -> TokenLogprob:
    return TokenLogprob(token, known.decoded_token or "", known.logprob)
