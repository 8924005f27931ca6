"""The acoustic stage, which converts sentences to spectral frames."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from hibari import Hibari

from stagemesh.common.wire.tensors import Tensors, Value
from stagemesh.connectors.packets import Packet
from stagemesh.services.engines.function.base import Call, Saves

MODEL_FILE = "hibari.onnx"
_MIN_IDS = 3
"""The minimum number of phoneme ids in a sentence that contains speech. Two of the ids are padding."""


class AcousticModel(Saves[float]):
    """A `Function` that converts text to spectral frames. Each output packet contains the frames of one sentence.

    The state of a request is its speaking speed.
    """

    def __init__(self, model: Path | None, options: Mapping[str, object]) -> None:  # noqa: ARG002  # it has none
        path = model / MODEL_FILE if model is not None and model.is_dir() else model
        self._hibari = Hibari(model=None if path is None else str(path), threads=1)
        # Loads the lexicon, which takes half a second, now instead of during the first request.
        self._hibari.phonemize("Hello.")

    def open(self, *, seed: int, options: Mapping[str, Value]) -> float:  # noqa: ARG002
        return float(options.get("speed", 1.0))

    def save(self, state: float) -> Tensors:
        return {"speed": np.array(state)}

    def restore(self, tensors: Tensors, *, seed: int, options: Mapping[str, Value]) -> float:  # noqa: ARG002
        return float(tensors["speed"])

    def __call__(self, batch: Sequence[Call[float]]) -> Sequence[Sequence[Packet]]:
        return [[] if call.packet is None else self._speak(call.packet, speed=call.state) for call in batch]

    def _speak(self, packet: Packet, *, speed: float) -> list[Packet]:
        text = packet.tensors["text"].tobytes().decode(errors="replace")
        return [frames for phonemes in self._hibari.phonemize(text) if (frames := self._frames(phonemes, speed=speed))]

    def _frames(self, phonemes: str, *, speed: float) -> Packet | None:
        ids = self._hibari.ids(phonemes)
        if len(ids) < _MIN_IDS:
            return None
        inputs = {"ids": np.asarray([ids], np.int64), "speed": np.asarray([speed], np.float32)}
        *parts, f0 = (output[0] for output in self._hibari.sess.run(None, inputs))
        spectrum = np.ascontiguousarray(np.stack(parts).transpose(2, 0, 1))
        boundary = np.zeros(len(spectrum), np.uint8)
        boundary[-1] = 1
        return Packet({"spectrum": spectrum, "f0": f0.astype(np.float32), "boundary": boundary})
