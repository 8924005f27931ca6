"""Applies a request's sampling parameters to the text of a fake stage. One step counts as one token."""

import numpy as np

from stagemesh.common.tensors import Array
from stagemesh.services.engines.base import SamplingOptions


class SampledText:
    """The text of one task under its sampling parameters: `max_tokens`, `stop` and the structure.

    A stop text is found within the text of one step. A structure replaces the text of each step by the structure's own
    text, so that a test sees which stage received it.
    """

    def __init__(self, sampling: SamplingOptions) -> None:
        self._sampling = sampling
        self._steps = 0
        self._is_over = False

    def limit(self, text: Array) -> Array | None:
        """Returns the text of the next step, without a stop text and what follows it. Returns None after the end."""
        sampling = self._sampling
        if self._is_over or self._steps == sampling.max_tokens:
            return None
        self._steps += 1
        content = text.tobytes() if sampling.structure is None else sampling.structure.texts[0].encode()
        ends = [end for stop in sampling.stop if (end := content.find(stop.encode())) >= 0]
        if ends:
            self._is_over = True
            content = content[: min(ends)]
        return np.frombuffer(content, np.uint8)
