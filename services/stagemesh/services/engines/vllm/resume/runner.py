"""What vLLM's model runners do for a request that goes on from a checkpoint: its tokens count as sampled ones.

Both parts are mixed into a runner's class once the runner is there, so they have no `__init__`.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, cast

import torch

from stagemesh.services.engines.vllm.resume.checkpoint import RESUMED_ARGUMENT, resumed_count

if TYPE_CHECKING:
    from vllm.v1.core.sched.output import SchedulerOutput

Draw = Callable[[torch.Tensor, Mapping[int, torch.Generator], None, None], object]
"""vLLM's sampler of the last stage: logits, generators by row, no top-k, no top-p."""


class ResumesV1:
    """For `vllm.v1.worker.gpu_model_runner` and what derives from it, on CPU too."""

    @property
    def _resumed(self) -> dict[str, list[int]]:
        """The tokens of the requests that are known here, by id."""
        return vars(self).setdefault("_resumed_tokens", {})  # type: ignore[no-any-return]

    def _update_states(self, scheduler_output: "SchedulerOutput") -> Any:
        runner: Any = self
        fresh = [new for new in scheduler_output.scheduled_new_reqs if new.req_id not in runner.requests]
        result = cast("Any", super())._update_states(scheduler_output)  # noqa: SLF001  # our own class
        for request_id in scheduler_output.finished_req_ids:
            self._resumed.pop(request_id, None)
        for new in fresh:
            if count := resumed_count(new.sampling_params):
                state = runner.requests[new.req_id]
                self._resumed[new.req_id] = state.prompt_token_ids[-count:]
                if state.generator is not None and hasattr(runner, "sampler"):
                    draw = runner.sampler.topk_topp_sampler
                    advance(state.generator, draw, draws=count, width=runner.input_batch.vocab_size)
        return result

    def _sample(self, *args: Any, **kwargs: Any) -> Any:
        """Penalties and bad words look at what was sampled; the runner itself must not, it counts the tokens twice."""
        batch = cast("Any", self).input_batch
        # Empty where nothing looks at them.
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


class ResumesV2:
    """For `vllm.v1.worker.gpu.model_runner`, which can be told outright, as it is after a preemption.

    Its randomness is a function of seed and position.
    """

    def add_requests(self, scheduler_output: "SchedulerOutput") -> None:
        """Gives new requests their true prompt and limits back."""
        for new in scheduler_output.scheduled_new_reqs:
            count = resumed_count(new.sampling_params)
            if count and new.prompt_token_ids is not None and new.sampling_params is not None:
                # A copy: the scheduler, which goes by the rest alone, may hold the same object.
                params = new.sampling_params = new.sampling_params.clone()
                assert params.extra_args is not None
                assert params.max_tokens is not None
                params.max_tokens, params.min_tokens = params.max_tokens + count, params.extra_args[RESUMED_ARGUMENT][1]
                new.prompt_token_ids = new.prompt_token_ids[:-count]
        super().add_requests(scheduler_output)  # type: ignore[misc]


def advance(generator: torch.Generator, draw: Draw, *, draws: int, width: int) -> None:
    """Leaves `generator` as it is after so many tokens were sampled with it from `width` logits."""
    narrow, wide = generator.clone_state(), generator.clone_state()
    for probe, probe_width in ((narrow, 1), (wide, width)):
        draw(torch.zeros(1, probe_width, device=generator.device), {0: probe}, None, None)
    # On a CPU a token takes one number however many logits there are; elsewhere it takes one for each.
    if torch.equal(narrow.get_state(), wide.get_state()):
        width = 1
    logits = torch.zeros(1, width, device=generator.device)
    for _ in range(draws):
        draw(logits, {0: generator}, None, None)
