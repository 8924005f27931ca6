"""Seeded sampling where a prefill is cut in two, on a CPU."""

from typing import Any

import torch


class DrawsOnlyWhatCounts:
    """Mixed into vLLM's V1 runner, once it is there: a request whose prefill goes on draws no random number.

    vLLM samples for every request of a step, throws away what a part of a prefill gave, and has the request's generator
    step back by what a GPU took for it. A CPU's generator cannot step back, which ends the engine ("CPU Generator does
    not use offset"). So it stays out of such a step, and the token that nobody sees is drawn with the common one.
    """

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        """With the generators of unfinished prefills put aside."""
        runner: Any = self
        generators: dict[int, torch.Generator] = runner.input_batch.generators
        unfinished = runner.discard_request_mask.np[: runner.input_batch.num_reqs].nonzero()[0]
        aside = {row: generators.pop(row) for row in unfinished.tolist() if row in generators}
        try:
            return super().sample_tokens(*args, **kwargs)  # type: ignore[misc]
        finally:
            generators.update(aside)
