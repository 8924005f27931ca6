"""The transform from a codec language model's frames to those that its vocoder decodes."""

from collections.abc import Sequence

import numpy as np

from stagemesh.connectors.edge import Packet


class SpokenFrames:
    """A `Transform` that removes frames whose first code is not in the codebook, for example the end of the speech."""

    def __init__(self, *, codebook_size: int) -> None:
        self._codebook_size = codebook_size

    def push(self, packet: Packet) -> Sequence[Packet]:
        codes = packet.tensors["codes"].astype(np.int32, copy=False)
        kept = codes[:, 0] < self._codebook_size
        if kept.all():
            return [packet] if len(codes) else []
        return [Packet({"codes": codes[kept]}, packet.metadata)] if kept.any() else []

    def finish(self) -> Sequence[Packet]:
        return []
