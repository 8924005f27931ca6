"""Applies a request's sampling parameters to the text of a fake stage. One step counts as one token."""

import numpy as np

from stagemesh.common.tensors import Array
from stagemesh.services.engines.base import END, Finish, SamplingOptions


class SampledText:
    """The text of one task under its sampling parameters: `max_tokens`, `stop` and the structure.

    A stop text is found within the text of one step. A structure replaces the text of each step by the structure's own
    text, so that a test sees which stage received it.
    """

    def __init__(self, sampling: SamplingOptions) -> None:
        self._sampling = sampling
        self._steps = 0
        self.finish = END
        """Why the text ends, as far as it is known."""

    def limit(self, text: Array) -> Array | None:
        """Returns the text of the next step, without a stop text and what follows it. Returns None after the end."""
        sampling = self._sampling
        if self.finish.reason != "end":
            return None
        self._steps += 1
        if self._steps == sampling.max_tokens:
            self.finish = Finish("length")
        content = text.tobytes() if sampling.structure is None else sampling.structure.texts[0].encode()
        ends = {end: stop for stop in sampling.stop if (end := content.find(stop.encode())) >= 0}
        if ends:
            self.finish = Finish("stop", stop_text=ends[min(ends)])
            content = content[: min(ends)]
        return np.frombuffer(content, np.uint8)
