"""The resume feature: emits checkpoints and resumes requests from checkpoints.

The tokens of a checkpoint are appended to the prompt but count as output. The request's token limits are reduced by the
number of these tokens. The detokenizer first processes the checkpoint's tokens, so that the text can resume in the
middle of a character or of a stop string. Mixins for vLLM's model runners pass the checkpoint's tokens to the sampler.
"""

import copy
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, TypeVar, cast

import msgspec
import numpy as np
import torch
from vllm import SamplingParams
from vllm.exceptions import VLLMValidationError
from vllm.logprobs import Logprob
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.detokenizer import IncrementalDetokenizer
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.engine.parallel_sampling import ParentRequest

from stagemesh.common.errors import InvalidRequestError
from stagemesh.services.engines.base import Checkpoint
from stagemesh.services.engines.vllm import features

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.engine.async_llm import AsyncLLM

_PROMPT = "prompt"
_CHARACTER_TOKENS = 4
"""The maximum number of tokens that vLLM joins to one character."""

Params = TypeVar("Params", bound=SamplingParams)
Draw = Callable[[torch.Tensor, Mapping[int, torch.Generator], None, None], object]
"""The type of vLLM's function that samples tokens from logits.

The arguments are the logits, the random generators by row, and None instead of top-k and top-p.
"""


class Resumed(msgspec.Struct, frozen=True):
    """The properties of a resumed request that vLLM's workers need.

    The replica sends this object to the workers with the request (`features.set_argument`).
    """

    tokens: int
    """The number of checkpoint tokens. They are at the end of the prompt but count as output."""
    min_tokens: int
    """The minimum length of the request's whole output in tokens, including the checkpoint's tokens."""


class Resume(features.RequestFeature):
    """The request feature for checkpoints. Emits checkpoints of requests and resumes requests from checkpoints.

    `checkpoint_tokens` is the maximum number of tokens between two checkpoints, and `checkpoint_s` the time in seconds
    after which the next token has one. If `checkpoint_tokens` is 0, no checkpoints are emitted.
    """

    runner_module = __name__

    def __init__(self, *, checkpoint_tokens: int, checkpoint_s: float) -> None:
        self._interval, self._interval_s = checkpoint_tokens, checkpoint_s

    async def start(self, llm: "AsyncLLM") -> None:
        await super().start(llm)
        llm.output_processor.__class__ = ResumingOutputProcessor

    def open(self, request: features.EngineRequest, held: AsyncExitStack) -> features.RequestHook:  # noqa: ARG002  # nothing to release
        request.sampled += _checked_tokens(request, vocabulary=self.llm.model_config.get_vocab_size())
        if request.logprobs is not None and request.task.resume_from is not None:
            request.logprobs.resume(request.sampled, request.task.resume_from.tensors)
        request.params = remaining_params(request.params, resumed=len(request.sampled))
        # A resumed request would restart its structure.
        interval = 0 if request.params.structured_outputs is not None else self._interval
        return _Checkpoints(request, interval=interval, interval_s=self._interval_s)


class _Checkpoints(features.RequestHook):
    """Emits a checkpoint of one request every `interval` tokens, or at the first token after `interval_s` seconds.

    Emits no checkpoints if `interval` is 0.
    """

    def __init__(self, request: features.EngineRequest, *, interval: int, interval_s: float) -> None:
        self._request, self._interval, self._interval_s = request, interval, interval_s
        self._seen_tokens, self._last_s = len(request.sampled), time.monotonic()

    def observe(self, *, finished: bool) -> Iterator[Checkpoint]:
        before, count = self._seen_tokens, len(self._request.sampled)
        self._seen_tokens = count
        if not self._interval or finished or count == before:
            return
        if self._request.message is not None and self._request.message.waiting:
            # The log-probabilities would be lost.
            return
        now_s = time.monotonic()
        if before // self._interval != count // self._interval or now_s - self._last_s >= self._interval_s:
            self._last_s = now_s
            logprobs, saved_state = self._request.logprobs, self._request.saved_state
            tensors = {_PROMPT: _digest(self._request.prompt), **(logprobs.state() if logprobs is not None else {})}
            if saved_state is not None:
                count, state = saved_state(count)
                tensors |= state
            yield Checkpoint(count, tuple(self._request.sampled[:count]), tensors)


def remaining_params(params: Params, *, resumed: int) -> Params:
    """Returns the sampling parameters for the remaining output of a resumed request.

    Reduces the token limits by `resumed`, the number of output tokens in the checkpoint.
    """
    if not resumed:
        return params
    assert params.max_tokens is not None, "`sampling_params` always sets max_tokens"
    rest = copy.copy(params)
    rest.max_tokens = params.max_tokens - resumed
    rest.min_tokens = max(0, params.min_tokens - resumed)
    features.set_argument(rest, Resumed(resumed, params.min_tokens))
    return rest


class ResumingOutputProcessor(OutputProcessor):
    """vLLM's output processor, extended so that the text of a resumed request continues at the checkpoint.

    `Resume` changes the class of vLLM's existing output processor to this class. Therefore this class must not have an
    `__init__`.
    """

    def add_request(
        self,
        request: EngineCoreRequest,
        prompt: str | None,
        parent_req: ParentRequest | None = None,
        request_index: int = 0,
        queue: RequestOutputCollector | None = None,
    ) -> None:
        """Adds a request. If the request is resumed, its detokenizer starts in the state at the checkpoint.

        Raises VLLMValidationError if the checkpoint contains a stop token or a stop string.
        """
        resumed = features.get_argument(request.sampling_params, Resumed)
        detokenizer = self._resumed_detokenizer(request, resumed) if resumed is not None else None
        super().add_request(request, prompt, parent_req, request_index, queue)
        if resumed is not None and detokenizer is not None:
            state = self.request_states[request.request_id]
            state.detokenizer, state.sent_tokens_offset = detokenizer, resumed.tokens
            # vLLM reads the tokens before a token from here to decode characters that consist of several tokens.
            if state.logprobs_processor is not None and state.logprobs_processor.logprobs is not None:
                last = (request.prompt_token_ids or [])[-min(resumed.tokens, _CHARACTER_TOKENS) :]
                state.logprobs_processor.logprobs = [{token: Logprob(0.0)} for token in last]

    def _resumed_detokenizer(self, request: EngineCoreRequest, resumed: Resumed) -> IncrementalDetokenizer:
        """Returns a detokenizer that has already processed the checkpoint's tokens.

        Raises VLLMValidationError if the checkpoint contains a stop token or a stop string.
        """
        params = request.sampling_params
        assert params is not None
        assert request.prompt_token_ids is not None, "a resumed prompt consists of tokens"
        whole = copy.copy(request)
        whole.prompt_token_ids = request.prompt_token_ids[: -resumed.tokens]
        tokens = request.prompt_token_ids[-resumed.tokens :]
        whole.sampling_params = copy.copy(params)
        whole.sampling_params.min_tokens = resumed.min_tokens
        stops = params.stop_token_ids if params.ignore_eos else params.all_stop_token_ids
        if ends := set(tokens).intersection(stops or ()):
            raise VLLMValidationError(f"the checkpoint is past its end: it contains the stop token {min(ends)}")
        detokenizer = IncrementalDetokenizer.from_new_request(self.tokenizer if params.detokenize else None, whole)
        stop = detokenizer.update(tokens, stop_terminated=False)
        if stop is not None:
            raise VLLMValidationError(f"the checkpoint is past its end: its text contains the stop text {stop!r}")
        detokenizer.get_next_output_text(finished=False, delta=True)
        return detokenizer


def _checked_tokens(request: features.EngineRequest, *, vocabulary: int) -> Sequence[int]:
    """Returns the tokens of the checkpoint from which a request resumes, or no tokens if the request has no checkpoint.

    Raises InvalidRequestError if the request cannot have produced the checkpoint. A checkpoint contains a digest of its
    prompt. A checkpoint without a digest, such as one that a caller has written by hand, is accepted for every prompt.
    """
    checkpoint, max_tokens = request.task.resume_from, request.params.max_tokens or 0
    if checkpoint is None:
        return ()
    tokens = checkpoint.token_ids
    if checkpoint.steps != len(tokens):
        raise _invalid(f"counts {checkpoint.steps} steps and has {len(tokens)} tokens; send it back unchanged")
    digest = checkpoint.tensors.get(_PROMPT)
    if digest is not None and not np.array_equal(digest, _digest(request.prompt)):
        raise _invalid("belongs to another prompt; send the prompt of the checkpoint")
    outside = next((token for token in tokens if not 0 <= token < vocabulary), None)
    if outside is not None:
        raise _invalid(f"has token id {outside}, which is outside the model's vocabulary of {vocabulary}")
    if len(tokens) >= max_tokens:
        raise _invalid(f"already has {len(tokens)} tokens and max_tokens is {max_tokens}; raise max_tokens")
    return tokens


def _digest(prompt: features.RequestPrompt) -> "np.ndarray[tuple[int], np.dtype[np.uint8]]":
    return np.frombuffer(prompt.fingerprint, np.uint8)


def _invalid(problem: str) -> InvalidRequestError:
    return InvalidRequestError(f"the checkpoint {problem}", reason="INVALID_CHECKPOINT")


class RunnerV1:
    """A mixin that resumes requests in the model runner in `vllm.v1.worker.gpu_model_runner`.

    Also works with the runner's subclasses, such as the CPU runner.
    """

    @property
    def _resumed(self) -> dict[str, list[int]]:
        """The checkpoint tokens of the running requests that were resumed, by request id."""
        return vars(self).setdefault("_resumed_tokens", {})  # type: ignore[no-any-return]

    def _update_states(self, scheduler_output: "SchedulerOutput") -> Any:
        runner: Any = self
        fresh = [new for new in scheduler_output.scheduled_new_reqs if new.req_id not in runner.requests]
        result = cast("Any", super())._update_states(scheduler_output)  # noqa: SLF001  # our own class
        for request_id in scheduler_output.finished_req_ids:
            self._resumed.pop(request_id, None)
        for new in fresh:
            if resumed := features.get_argument(new.sampling_params, Resumed):
                state = runner.requests[new.req_id]
                self._resumed[new.req_id] = state.prompt_token_ids[-resumed.tokens :]
                if state.generator is not None and hasattr(runner, "sampler"):
                    draw = runner.sampler.topk_topp_sampler
                    _advance(state.generator, draw, draws=resumed.tokens, width=runner.input_batch.vocab_size)
        return result

    def _sample(self, *args: Any, **kwargs: Any) -> Any:
        """Samples the step's tokens. Penalties and bad words take the checkpoint tokens into account.

        The checkpoint tokens are added to the sampled tokens only during this call, because the model runner itself
        would count them twice.
        """
        batch = cast("Any", self).input_batch
        # vLLM leaves the lists empty if no request needs them.
        lists = batch.sampling_metadata.output_token_ids
        resumed_tokens = self._resumed if lists else {}
        pairs = [(lists[i], resumed_tokens[name]) for i, name in enumerate(batch.req_ids) if name in resumed_tokens]
        for sampled, resumed in pairs:
            sampled[:0] = resumed
        try:
            return super()._sample(*args, **kwargs)  # type: ignore[misc]
        finally:
            for sampled, resumed in pairs:
                del sampled[: len(resumed)]


class RunnerV2:
    """A mixin that resumes requests in the model runner in `vllm.v1.worker.gpu.model_runner`.

    This model runner accepts a new request that already has sampled tokens, because a request has them after a
    preemption. The runner's random numbers depend only on the seed and the token position.
    """

    def add_requests(self, scheduler_output: "SchedulerOutput") -> None:
        """Adds a step's new requests to the model runner.

        Restores the original prompt and token limits of resumed requests. The runner then counts the checkpoint tokens
        as output.
        """
        for new in scheduler_output.scheduled_new_reqs:
            resumed = features.get_argument(new.sampling_params, Resumed)
            if resumed is not None and new.prompt_token_ids is not None and new.sampling_params is not None:
                # A copy, because the scheduler may use the same object and must retain the remaining limits.
                params = new.sampling_params = new.sampling_params.clone()
                assert params.max_tokens is not None
                params.max_tokens, params.min_tokens = params.max_tokens + resumed.tokens, resumed.min_tokens
                new.prompt_token_ids = new.prompt_token_ids[: -resumed.tokens]
        super().add_requests(scheduler_output)  # type: ignore[misc]


def _advance(generator: torch.Generator, draw: Draw, *, draws: int, width: int) -> None:
    """Advances `generator` to its state after `draws` sampled tokens. Each token is sampled from `width` logits."""
    narrow, wide = generator.clone_state(), generator.clone_state()
    for probe, probe_width in ((narrow, 1), (wide, width)):
        draw(torch.zeros(1, probe_width, device=generator.device), {0: probe}, None, None)
    # On a CPU a token consumes one random number for any width. On other devices it consumes one for each logit.
    if torch.equal(narrow.get_state(), wide.get_state()):
        width = 1
    logits = torch.zeros(1, width, device=generator.device)
    for _ in range(draws):
        draw(logits, {0: generator}, None, None)
