"""The transform between the stages talker and code2wav."""

from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from pydantic import PositiveInt

from stagemesh.common.errors import InvalidRequestError
from stagemesh.services.models.checkpoint import read_section
from stagemesh.services.models.codec_speech.spoken_frames import SpokenFrames
from stagemesh.services.models.qwen3_omni.description import read_config


class Talker2Code2Wav(SpokenFrames):
    """A `Transform` that removes frames that are not audio. `model` is the folder of the stage that applies it."""

    def __init__(self, model: Path | None) -> None:
        if model is None:
            raise InvalidRequestError(
                "the transform qwen3_omni.talker2code2wav needs a checkpoint folder; set `model` of the edge's stages",
                reason="INVALID_CONFIG",
            )
        super().__init__(codebook_size=_codebook_size(model))


@dataclass(frozen=True)
class _CodebookConfig:
    codebook_size: PositiveInt = 2048


@lru_cache(maxsize=8)
def _codebook_size(model: Path) -> int:
    return read_section(model, read_config(model), name="code2wav_config", kind=_CodebookConfig).codebook_size
