"""Speech for tests, which hibari speaks without services."""

import numpy as np
import numpy.typing as npt

from stagemesh.connectors.packets import Packet
from stagemesh.services.engines.function.base import Call
from stagemesh.services.models.hibari.acoustic import AcousticModel
from stagemesh.services.models.hibari.vocoder import VocoderStream


def speak(*sentences: str, pause_s: float) -> npt.NDArray[np.float32]:
    """Returns sentences with silence before, between and after them, float32[samples] at 24 kHz."""
    model, pause = AcousticModel(None, {}), np.zeros(int(pause_s * 24_000), np.float32)
    spoken = [pause]
    for sentence in sentences:
        ((frames,),) = model([Call(1.0, Packet({"text": np.frombuffer(sentence.encode(), np.uint8)}))])
        spoken += [*(out.tensors["audio"].astype(np.float32) for out in VocoderStream(1).push(frames)), pause]
    return np.concatenate(spoken)
