"""The log-probabilities of a request's sampled tokens, and their positions in the request's text."""

import copy
from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
from vllm import SamplingParams
from vllm.logprobs import Logprob
from vllm.outputs import CompletionOutput
from vllm.tokenizers import TokenizerLike
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.detokenizer import BaseIncrementalDetokenizer, IncrementalDetokenizer

from stagemesh.common.errors import InvalidRequestError
from stagemesh.common.tensors import Tensors
from stagemesh.services.engines.base import TokenLogprob, TokenLogprobs

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
        self._detokenizer = detokenizer
        self._alternatives = alternatives
        self._text_length = 0
        """The length of the text that vLLM has returned so far, in code points."""
        self._waiting: list[TokenLogprobs] = []
        """The tokens that begin after this text, in order."""

    def read(self, output: CompletionOutput) -> tuple[tuple[TokenLogprobs, ...], tuple[TokenLogprobs, ...]]:
        """Returns the log-probabilities of the output's tokens, and those of the tokens that begin in its text."""
        made = list[TokenLogprobs]()
        for token, known in zip(output.token_ids, output.logprobs or (), strict=True):
            position = len(self._detokenizer.output_text)
            self._detokenizer.update([token], stop_terminated=False)
            if known is not None:
                made.append(_converted(token, known, position=position, alternatives=self._alternatives))
        self._waiting += made
        self._text_length += len(output.text)
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
        self._detokenizer.update(list(tokens), stop_terminated=False)
        self._text_length = len(self._detokenizer.output_text)
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


def _converted(token: int, known: Mapping[int, Logprob], *, position: int, alternatives: int) -> TokenLogprobs:
    ranked = sorted(known.items(), key=lambda item: item[1].rank or 0)[:alternatives]
    return TokenLogprobs(
        _token(token, known[token]), tuple(_token(each, logprob) for each, logprob in ranked), position
    )


def _token(token: int, known: Logprob) -> TokenLogprob:
    return TokenLogprob(token, known.decoded_token or "", known.logprob)
