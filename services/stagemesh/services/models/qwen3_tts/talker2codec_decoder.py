"""The transform between the stages talker and codec_decoder."""

from pathlib import Path

from stagemesh.common.errors import InvalidRequestError
from stagemesh.services.models.codec_speech.spoken_frames import SpokenFrames
from stagemesh.services.models.qwen3_tts.description import read_config


def make_talker2codec_decoder(model: Path | None) -> SpokenFrames:
    """Returns the transform that removes frames that are not audio.

    `model` is the folder of the stage that applies it. Raises InvalidRequestError if it is None.
    """
    if model is None:
        raise InvalidRequestError(
            "the transform qwen3_tts.talker2codec_decoder needs a checkpoint folder; set `model` of the edge's stages",
            reason="INVALID_CONFIG",
        )
    predictor = read_config(model)["talker_config"]["code_predictor_config"]
    return SpokenFrames(codebook_size=predictor["vocab_size"])
