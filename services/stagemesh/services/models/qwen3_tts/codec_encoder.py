"""The encoder of a checkpoint's speech tokenizer, which converts a reference voice to codec frames."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import MimiConfig, MimiModel
from transformers.initialization import no_init_weights

from stagemesh.services.models.checkpoint import fill_module, load_error, read_config
from stagemesh.services.models.qwen3_tts import CODEC_FOLDER, CODEC_TYPE


class CodecEncoder:
    """An encoder with the weights of a checkpoint. It computes in float32."""

    def __init__(self, model: MimiModel, *, groups: int, samples_per_frame: int) -> None:
        self._model, self.groups, self._samples_per_frame = model, groups, samples_per_frame

    @torch.inference_mode()
    def encode(self, audio: npt.NDArray[np.float32]) -> npt.NDArray[np.int32]:
        """Returns the codes of float32[samples] at 24 kHz, int32[frames, groups]. The last frame may be a part."""
        samples = torch.from_numpy(audio).to(self._model.device)
        encoded: Any = self._model.encode(samples[None, None], num_quantizers=self.groups)
        codes: Tensor = encoded.audio_codes[0].T[: -(-len(audio) // self._samples_per_frame)]
        return codes.to("cpu", torch.int32).numpy()


def make_model(section: Mapping[str, Any]) -> MimiModel:
    """Returns Mimi without its decoder, with uninitialized weights. `section` is the config of the encoder.

    Raises TypeError, ValueError or StrictDataclassError if the section is invalid.
    """
    config = MimiConfig(**section)
    # The reference implementation, with an older version of transformers, attends to the whole past.
    config.sliding_window = config.max_position_embeddings
    model = MimiModel(config)
    for name in ("upsample", "decoder_transformer", "decoder"):
        delattr(model, name)
    return model


def load_codec_encoder(model: Path, *, device: torch.device) -> CodecEncoder:
    """Loads the encoder in the folder `speech_tokenizer` of the checkpoint folder `model`.

    Raises NotReadyError (LOAD_FAILED) if the speech tokenizer is incomplete or of another type.
    """
    folder = model / CODEC_FOLDER
    config = read_config(folder, model_type=CODEC_TYPE)
    try:
        with no_init_weights():
            encoder = make_model(config["encoder_config"])
        groups, hop = int(config["encoder_valid_num_quantizers"]), int(config["encode_downsample_rate"])
    except (KeyError, TypeError, ValueError, StrictDataclassError) as exc:
        raise load_error(folder, f"the encoder's part of its config.json is invalid: {exc!r}") from exc
    fill_module(encoder, folder, prefix="encoder.", what="the codec encoder")
    nn.Module.to(encoder, device)
    encoder.train(mode=False)
    return CodecEncoder(encoder, groups=groups, samples_per_frame=hop)
