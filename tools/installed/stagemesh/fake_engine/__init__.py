"""The fake engine for tests, benchmarks and trial deployments. It computes simple functions instead of a model.

The `function` of a stage determines the stage's input and output. The stage's options set the timing, the sizes and the
faults. The columns of this table are the function, its input, and its output:

=======  =========================  ===========================================
source   the client's prompt        text
look     the prompt's media         text: the kind, size and SHA-256 digest of each image, audio and video
talk     text                       the same text
relay    text                       the same text
frames   text                       float32 frames, one for each byte
mix      text or frames, or both    the frames plus the sum of the text's bytes
sound    frames                     audio at 24 kHz, 8 samples per frame
video    text                       square RGB frames, one of one color for each byte
prefill  the client's prompt        a ticket for state that remains in the stage
decode   the prompt and the ticket  text, computed from the state
=======  =========================  ===========================================

`source`, `talk` and `decode` take sampling parameters (`sampling`), as stages do that choose tokens.
"""

from collections.abc import Mapping
from dataclasses import fields

from pydantic import JsonValue

from stagemesh.common.errors import NotFoundError
from stagemesh.common.plugins.descriptors import Emitted, EngineDescriptor, Signature
from stagemesh.common.wire.tensors import TensorSpec
from stagemesh.fake_engine.options import FakeOptions, fake_options

FRAME_WIDTH = 8
STATE = "state"
"""The name of the ticket of a `prefill` stage."""
KIND = "fake.state"
"""The kind of that ticket."""
SAMPLE_RATE_HZ = 24_000

_TEXT = TensorSpec("uint8", ("bytes",))
_FRAMES = TensorSpec("float32", ("frames", FRAME_WIDTH))
_AUDIO = Emitted(TensorSpec("float32", ("samples",)), kind="audio", sample_rate_hz=SAMPLE_RATE_HZ)
_STATE = TensorSpec.ticket(KIND)
_SIGNATURES = {
    "source": Signature(emits={"text": Emitted(_TEXT, kind="text")}, sampling=True),
    "look": Signature(emits={"text": Emitted(_TEXT, kind="text")}, media=True),
    "talk": Signature(accepts={"text": _TEXT}, emits={"text": Emitted(_TEXT, kind="text")}, sampling=True),
    "relay": Signature(accepts={"text": _TEXT}, emits={"text": Emitted(_TEXT, kind="text")}),
    "frames": Signature(accepts={"text": _TEXT}, emits={"frames": Emitted(_FRAMES)}),
    "mix": Signature(
        accepts={"text": _TEXT, "frames": _FRAMES},
        emits={"frames": Emitted(_FRAMES)},
        optional=frozenset({"text", "frames"}),
    ),
    "sound": Signature(accepts={"frames": _FRAMES}, emits={"audio": _AUDIO}),
    "video": Signature(
        accepts={"text": _TEXT}, emits={"frames": Emitted(TensorSpec("uint8", ("frames", "height", "width", 3)))}
    ),
    "prefill": Signature(emits={STATE: Emitted(_STATE)}),
    "decode": Signature(accepts={STATE: _STATE}, emits={"text": Emitted(_TEXT, kind="text")}, sampling=True),
}


def signature(function: str | None) -> Signature:
    """Returns the signature of a fake stage that has this function. Raises NotFoundError if the function is
    unknown.
    """
    found = _SIGNATURES.get(function or "source")
    if found is None:
        raise NotFoundError(
            f"unknown function {function!r} of the fake engine; known: {', '.join(_SIGNATURES)}",
            reason="UNKNOWN_FUNCTION",
        )
    return found


def _signature(function: str | None, options: Mapping[str, JsonValue]) -> Signature:
    found = signature(function)
    fake_options(options)
    return found


DESCRIPTOR = EngineDescriptor(
    factory="stagemesh.fake_engine.engine:FakeEngine",
    signature=_signature,
    needs_model=False,
    stage_options=frozenset(field.name for field in fields(FakeOptions)),
)
