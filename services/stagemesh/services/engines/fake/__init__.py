"""The fake engine: no model and no computing, for tests, benchmarks of the plumbing, and trying a pipeline's shape.

A stage's `function` picks what it is: "source" (takes the prompt, emits text), "relay" (text to text) or "frames"
(text to float32 frames, one for each byte).
"""

from stagemesh.connectors.errors import NotFoundError
from stagemesh.connectors.tensors import TensorSpec
from stagemesh.services.serving.plugins import Emitted, EngineCard, Signature

FRAME_WIDTH = 8

_TEXT = TensorSpec("uint8", ("bytes",))
_FRAMES = TensorSpec("float32", ("frames", FRAME_WIDTH))
_SIGNATURES = {
    "source": Signature(emits={"text": Emitted(_TEXT, kind="text")}),
    "relay": Signature(accepts={"text": _TEXT}, emits={"text": Emitted(_TEXT, kind="text")}),
    "frames": Signature(accepts={"text": _TEXT}, emits={"frames": Emitted(_FRAMES)}),
}


def signature(function: str | None) -> Signature:
    """The signature of a fake stage; raises NotFoundError naming those known."""
    found = _SIGNATURES.get(function or "source")
    if found is None:
        raise NotFoundError(
            f"unknown function {function!r} of the fake engine; known: {', '.join(_SIGNATURES)}",
            reason="UNKNOWN_FUNCTION",
        )
    return found


CARD = EngineCard(
    factory="stagemesh.services.engines.fake.engine:FakeEngine",
    signature=lambda function, _options: signature(function),
    needs_model=False,
    stage_options=frozenset(
        {"steps", "step_s", "size_bytes", "fail_at_step", "start_s", "max_running", "checkpoint_steps"}
    ),
)
