"""hibari: English text to speech at 24 kHz, in two stages: an acoustic network, and a signal-processing vocoder.

A frame represents 12.5 ms of audio. The tensor `spectrum` contains five values of the network for each of 601 frequency
bins: log magnitude and phase of the harmonic branch, log magnitude of the noise branch, and log magnitude and phase of
the residual.
"""

from stagemesh.common.plugins.descriptors import Emitted, FunctionDescriptor, OptionSpec, Signature
from stagemesh.common.wire.tensors import TensorSpec

SAMPLE_RATE_HZ = 24_000
PARTS = 5
BINS = 601

_FRAMES = {
    "spectrum": TensorSpec("float32", ("frames", PARTS, BINS)),
    "f0": TensorSpec("float32", ("frames",)),
    "boundary": TensorSpec("uint8", ("frames",)),
}

ACOUSTIC = FunctionDescriptor(
    signature=Signature(
        accepts={"text": TensorSpec("uint8", ("bytes",))},
        emits={name: Emitted(spec) for name, spec in _FRAMES.items()},
        options={"speed": OptionSpec(default=1.0, minimum=0.5, maximum=2.0)},
    ),
    factory="stagemesh.services.models.hibari.acoustic:AcousticModel",
    stage_options={},
)

VOCODER = FunctionDescriptor(
    signature=Signature(
        accepts=_FRAMES,
        emits={"audio": Emitted(TensorSpec("float32", ("samples",)), kind="audio", sample_rate_hz=SAMPLE_RATE_HZ)},
    ),
    factory="stagemesh.services.models.hibari.vocoder:Vocoder",
    stage_options={},
)
