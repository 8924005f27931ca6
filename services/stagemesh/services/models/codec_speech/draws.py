"""Random numbers of a code predictor, which do not depend on the batch."""

from typing import NamedTuple

import torch

_MIX = (-7046029254386353131, -4658895280553007687, -7723592293110705685)
"""Odd multipliers of the SplitMix64 generator, as signed numbers."""


class ResidualSampling(NamedTuple):
    """How a model draws residual codes: temperature, the number of candidates, and their total probability."""

    temperature: float = 1.0
    top_k: int = 50
    top_p: float = 1.0


class Draws:
    """Chooses the residual codes of a batch of frames: the most probable ones, or ones drawn at random.

    A random number depends only on the request's seed and the position of the frame, the group and the code. The codes
    of a request therefore do not depend on the other requests of its batch, and are the same if the frame is computed
    again.
    """

    def __init__(
        self, seeds: torch.Tensor, positions: torch.Tensor, greedy: torch.Tensor, *, sampling: ResidualSampling
    ) -> None:
        """The tensors have one value for each frame. The seeds and the positions are int64, `greedy` is bool."""
        self._state, self._greedy, self._sampling = _mix(seeds) + positions, greedy, sampling

    def choose(self, logits: torch.Tensor, group: int) -> torch.Tensor:
        """Returns one code for each frame, int64[frames]. `logits` is float32[frames, codes]."""
        best = logits.argmax(-1)
        if bool(self._greedy.all()):
            return best
        temperature, top_k, top_p = self._sampling
        values, codes = logits.topk(min(top_k, logits.shape[-1]), sorted=True)
        chances = (values / temperature).softmax(-1)
        chances[chances.cumsum(-1) - chances >= top_p] = 0
        mixed = _mix(_mix(self._state + group)[:, None] + codes)
        uniform = ((mixed >> 11) & ((1 << 53) - 1)).double() / (1 << 53)
        # The largest of the values u^(1/p) is at a code with the probability p of the code.
        drawn = (chances.log() - (-uniform.clamp_min(1e-300).log()).log()).argmax(-1, keepdim=True)
        return torch.where(self._greedy, best, codes.gather(-1, drawn)[:, 0])


def _mix(values: torch.Tensor) -> torch.Tensor:
    """Returns a hash of each int64 value (SplitMix64)."""
    values = values * _MIX[0] + _MIX[0]
    values = (values ^ (values >> 30 & (1 << 34) - 1)) * _MIX[1]
    values = (values ^ (values >> 27 & (1 << 37) - 1)) * _MIX[2]
    return values ^ (values >> 31 & (1 << 33) - 1)
