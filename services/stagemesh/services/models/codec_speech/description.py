"""Parts that the descriptions and transforms of all codec speech models share: the choice of a speaker, and the
frames that a vocoder decodes.
"""

from collections.abc import Mapping, Sequence
from typing import TypeVar

import numpy as np

from stagemesh.common.errors import InvalidRequestError
from stagemesh.connectors.packets import Packet

Properties = TypeVar("Properties")


def choose_speaker(speakers: Mapping[str, Properties], name: str) -> Properties:
    """Returns the properties of the speaker `name`, or of the first speaker if `name` is empty. Ignores case.

    Raises InvalidRequestError (INVALID_OPTION) if the model does not have the speaker.
    """
    known = {each.lower(): properties for each, properties in speakers.items()}
    chosen = name.lower() or next(iter(known))
    if chosen not in known:
        raise InvalidRequestError(
            f"the model has no speaker {name!r}; choose one of: {', '.join(sorted(known))}",
            reason="INVALID_OPTION",
            metadata={"option": "speaker"},
        )
    return known[chosen]


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
