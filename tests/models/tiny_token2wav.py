"""transformers' token2wav of a tiny Qwen2.5-Omni, which decodes whole streams."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen2_5OmniConfig
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import Qwen2_5OmniToken2WavModel

from stagemesh.services.models.checkpoint import fill_module
from stagemesh.services.models.qwen2_5_omni.description import load_speakers
from stagemesh.services.models.qwen2_5_omni.token2wav import draw_noise
from stagemesh.tiny_models.qwen2_5_omni import SPEAKERS
from tests.models.vocoding import SEED, Codes, Samples

BLOCK, MEL_SIZE, REPEATS = 8, 16, 2
"""The frames of a block, the numbers of a frame, and the frames of a code."""
STEPS = 4
"""The steps in which a spectrogram is solved."""


class DecodeReference:
    """Decodes whole streams with the noise of the stage."""

    def __init__(self, folder: Path) -> None:
        config: Any = Qwen2_5OmniConfig.from_pretrained(folder)
        self._model = Qwen2_5OmniToken2WavModel(config.token2wav_config)
        fill_module(self._model, folder, prefix="token2wav.", what="token2wav", device=torch.device("cpu"))
        self._speakers = load_speakers(folder)

    def decode(self, codes: Codes, speaker: str = SPEAKERS[0]) -> Samples:
        """Returns the samples that transformers decodes from all codes at once."""
        frames, voice = len(codes) * REPEATS, self._speakers[speaker]
        noise = draw_noise(SEED, range(-(-frames // BLOCK)), block=BLOCK, size=MEL_SIZE)
        with pytest.MonkeyPatch.context() as patch, torch.inference_mode():
            patch.setattr(torch, "randn", lambda *_shape, **_options: torch.from_numpy(noise[None, :frames]))
            samples = self._model(
                torch.from_numpy(codes.T).long(),
                conditioning=voice.vector[None],
                reference_mel=voice.reference[None],
                num_steps=STEPS,
            )
        return np.asarray(samples, np.float32)
