"""Analyses the audio of a voice that is to be cloned. Importing this module does not import transformers."""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from stagemesh.services.engines.torchvision_operators import declare_operators

if TYPE_CHECKING:
    import torch

    from stagemesh.services.models.qwen3_tts.codec_encoder import CodecEncoder
    from stagemesh.services.models.qwen3_tts.speaker_encoder import SpeakerEncoder

Samples = npt.NDArray[np.float32]


class ReferenceEncoder:
    """Converts a reference voice to the inputs of the talker. Its audio is float32[samples] at 24 kHz."""

    def __init__(self, speaker: "SpeakerEncoder", codec: "CodecEncoder") -> None:
        self._speaker, self._codec = speaker, codec
        self.width, self.groups = speaker.width, codec.groups

    def embed(self, audio: Samples) -> npt.NDArray[np.float32]:
        """Returns the vector that represents the speaker, float32[width]. The audio is at least 0.1 s long."""
        return self._speaker.embed(audio)

    def encode(self, audio: Samples) -> npt.NDArray[np.int32]:
        """Returns the codec frames of the audio, int32[frames, groups]. The last frame may contain a part of it."""
        return self._codec.encode(audio)


def load_reference_voice(model: Path, *, device: "torch.device") -> ReferenceEncoder:
    """Loads the speaker encoder and the codec's encoder of the checkpoint folder `model`.

    Raises NotReadyError (LOAD_FAILED) if the checkpoint is of another model, lacks a speaker encoder, or is incomplete.
    """
    # transformers imports torchvision if it is installed.
    declare_operators()
    from stagemesh.services.models.qwen3_tts.codec_encoder import load_codec_encoder
    from stagemesh.services.models.qwen3_tts.speaker_encoder import load_speaker_encoder

    return ReferenceEncoder(load_speaker_encoder(model, device=device), load_codec_encoder(model, device=device))
