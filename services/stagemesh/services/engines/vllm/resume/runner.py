"""Mixins for vLLM's model runners that count the checkpoint's tokens of a resumed request as sampled tokens."""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, cast

import torch

from stagemesh.services.engines.vllm.extra_arguments import get_argument
from stagemesh.services.engines.vllm.resume.feature import Resumed

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

Draw = Callable[[torch.Tensor, Mapping[int, torch.Generator], None, None], object]
"""The type of vLLM's function that samples tokens from logits.

The arguments are the logits, the random generators by row, and None for each of top-k and top-p.
"""


class RunnerV1:
    """A mixin that resumes requests in vLLM's model runner in `vllm.v1.worker.gpu_model_runner`.

    Also applies to the runner's subclasses, such as the CPU runner.
    """

    @property
    def _resumed(self) -> dict[str, list[int]]:
        """The checkpoint tokens of the running requests, by request id."""
        return vars(self).setdefault("_resumed_tokens", {})  # type: ignore[no-any-return]

    def _update_states(self, scheduler_output: "SchedulerOutput") -> Any:
        runner: Any = self
        fresh = [new for new in scheduler_output.scheduled_new_reqs if new.req_id not in runner.requests]
        result = cast("Any", super())._update_states(scheduler_output)  # noqa: SLF001  # our own class
        for request_id in scheduler_output.finished_req_ids:
            self._resumed.pop(request_id, None)
        for new in fresh:
            if resumed := get_argument(new.sampling_params, Resumed):
                state = runner.requests[new.req_id]
                self._resumed[new.req_id] = state.prompt_token_ids[-resumed.tokens :]
                if state.generator is not None and hasattr(runner, "sampler"):
                    draw = runner.sampler.topk_topp_sampler
                    _advance(state.generator, draw, draws=resumed.tokens, width=runner.input_batch.vocab_size)
        return result

    def _sample(self, *args: Any, **kwargs: Any) -> Any:
        """Samples tokens. Penalties and bad words consider the checkpoint tokens.

        The checkpoint tokens are added to the sampled tokens only during this call, because the runner itself would
        count them twice.
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
    """A mixin that resumes requests in vLLM's model runner in `vllm.v1.worker.gpu.model_runner`.

    This runner accepts a new request that already has sampled tokens, as after a preemption. The runner's random
    numbers depend only on the seed and the token position.
    """

    def add_requests(self, scheduler_output: "SchedulerOutput") -> None:
        """Adds a step's new requests. Restores the original prompt and token limits of resumed requests."""
        for new in scheduler_output.scheduled_new_reqs:
            resumed = get_argument(new.sampling_params, Resumed)
            if resumed is not None and new.prompt_token_ids is not None and new.sampling_params is not None:
                # A copy, because the scheduler may use the same object and must retain the remaining limits.
                params = new.sampling_params = new.sampling_params.clone()
                assert params.max_tokens is not None
                params.max_tokens, params.min_tokens = params.max_tokens + resumed.tokens, resumed.min_tokens
                new.prompt_token_ids = new.prompt_token_ids[: -resumed.tokens]
        super().add_requests(scheduler_output)  # type: ignore[misc]


def _advance(generator: torch.Generator, draw: Draw, *, draws: int, width: int) -> None:
    """Advances `generator` to the state that it has after `draws` tokens, each sampled from `width` logits."""
    narrow, wide = generator.clone_state(), generator.clone_state()
    for probe, probe_width in ((narrow, 1), (wide, width)):
        draw(torch.zeros(1, probe_width, device=generator.device), {0: probe}, None, None)
    # On a CPU a token consumes one random number for any width. On other devices it consumes one for each logit.
    if torch.equal(narrow.get_state(), wide.get_state()):
        width = 1
    logits = torch.zeros(1, width, device=generator.device)
    for _ in range(draws):
        draw(logits, {0: generator}, None, None)
