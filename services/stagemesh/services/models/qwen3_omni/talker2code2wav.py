"""The transform between the stages talker and code2wav."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from pydantic import PositiveInt

from stagemesh.common.errors import InvalidRequestError
from stagemesh.connectors.edge import Packet
from stagemesh.services.models.checkpoint import read_section
from stagemesh.services.models.qwen3_omni.description import read_config


class Talker2Code2Wav:
    """A `Transform` that removes frames whose first code is not in the codebook, for example the end of the speech.

    `model` is the checkpoint folder of the stage that applies the transform.
    """

    def __init__(self, model: Path | None) -> None:
        if model is None:
            raise InvalidRequestError(
                "the transform qwen3_omni.talker2code2wav needs a checkpoint folder; set `model` of the edge's stages",
                reason="INVALID_CONFIG",
            )
        self._codebook_size = _codebook_size(model)

    def push(self, packet: Packet) -> Sequence[Packet]:
        codes = packet.tensors["codes"].astype(np.int32, copy=False)
        kept = codes[:, 0] < self._codebook_size
        if kept.all():
            return [packet] if len(codes) else []
        return [Packet({"codes": codes[kept]}, packet.metadata)] if kept.any() else []

    def finish(self) -> Sequence[Packet]:
        return []


@dataclass(frozen=True)
class _CodebookConfig:
    codebook_size: PositiveInt = 2048


@lru_cache(maxsize=8)
def _codebook_size(model: Path) -> int:
    return read_section(model, read_config(model), name="code2wav_config", kind=_CodebookConfig).codebook_size
