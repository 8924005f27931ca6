"""Makes a model of transformers generate given tokens, and records its rating of each."""

from collections.abc import Iterable

import torch

from stagemesh.services.models.verification.comparison import ForcedChoice


class ForcedTokens:
    """A logits processor of transformers that forces one token after another and records how the model rates it.

    After all tokens have been forced, the model generates freely.
    """

    def __init__(self, tokens: Iterable[int]) -> None:
        self._tokens = iter(tokens)
        self.choices: list[ForcedChoice] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        """Returns scores that allow only the next token. `scores` is [1, vocabulary]."""
        chosen = next(self._tokens, None)
        if chosen is None:
            return scores
        logits = scores[0].float()
        best = logits.max()
        scale = logits[logits.isfinite()].abs().max().clamp_min(torch.finfo(torch.float32).tiny)
        self.choices.append(ForcedChoice(chosen, int(logits.argmax()), float((best - logits[chosen]) / scale)))
        forced = torch.full_like(scores, -torch.inf)
        forced[0, chosen] = 0
        return forced
