"""The transform between the stages talker and token2wav."""

from pathlib import Path

from stagemesh.common.errors import InvalidRequestError
from stagemesh.services.models.codec_speech.spoken_frames import SpokenFrames
from stagemesh.services.models.qwen2_5_omni.description import read_config


def make_talker2token2wav(model: Path | None) -> SpokenFrames:
    """Returns the transform. `model` is the checkpoint folder of the stage that applies it."""
    if model is None:
        raise InvalidRequestError(
            "the transform qwen2_5_omni.talker2token2wav needs a checkpoint folder; set `model` of the edge's stages",
            reason="INVALID_CONFIG",
        )
    # The table of the vocoder has one code more than it is trained for.
    codes: int = read_config(model)["token2wav_config"]["dit_config"]["num_embeds"]
    return SpokenFrames(codebook_size=codes + 1)
