"""Functions that analyze audio."""

from stagemesh.common.descriptors import Emitted, FunctionDescriptor, OptionSpec, Signature
from stagemesh.common.tensors import TensorSpec

TURNS = FunctionDescriptor(
    signature=Signature(
        accepts={"audio": TensorSpec("float32", ("samples",))},
        # A row for each begin (1.0) and each end (0.0) of speech, with its time in the audio in seconds.
        emits={"speech": Emitted(TensorSpec("float64", ("events", 2)))},
        options={
            "threshold_db": OptionSpec(
                10.0, minimum=3.0, maximum=40.0, description="Level of speech above the noise, in dB."
            ),
            "speech_ms": OptionSpec(
                100, minimum=20, maximum=2_000, description="Duration of sound that is speech, in ms."
            ),
            "silence_ms": OptionSpec(
                500, minimum=20, maximum=10_000, description="Duration of silence that ends speech, in ms."
            ),
            "padding_ms": OptionSpec(
                300,
                minimum=0,
                maximum=2_000,
                description="Audio that counts as speech before and after the sound, in ms.",
            ),
        },
    ),
    factory="stagemesh.services.models.audio.turns:Turns",
    stage_options={},
)
