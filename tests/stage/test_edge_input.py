"""The packets of an incoming edge that an engine receives."""

import numpy as np
import pytest

from stagemesh.common.errors import InvalidChunkError
from stagemesh.common.wire.tensors import Array, TensorSpec
from stagemesh.connectors.packets import Packet
from stagemesh.services.stage.step.inputs import accepted_part

ACCEPTS = {"spectrum": TensorSpec("float32", ("frames", 3)), "f0": TensorSpec("float32", ("frames",))}
SPECTRUM = np.zeros((2, 3), np.float32)


def test_tensors_that_the_stage_does_not_accept_are_dropped() -> None:
    packet = accepted_part(
        _packet(f0=np.zeros(2, np.float32), spectrum=SPECTRUM, loudness=SPECTRUM), ACCEPTS, edge="a->b"
    )
    assert (set(packet.tensors), packet.metadata) == ({"f0", "spectrum"}, {"step": 1})


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"spectrum": np.zeros((2, 4), np.float32)}, r"'spectrum' is float32\[2, 4\]; expected float32\[frames, 3\]"),
        ({"spectrum": np.zeros((2, 3), np.float64)}, "'spectrum' is float64"),
        ({"spectrum": SPECTRUM, "f0": np.zeros(1, np.float32)}, "'f0' has 1 frames, but another tensor .* has 2"),
        ({"loudness": SPECTRUM}, "carries loudness; this stage accepts spectrum, f0"),
        ({}, "carries no tensor"),
    ],
)
def test_a_packet_of_another_type_is_rejected(tensors: dict[str, Array], message: str) -> None:
    with pytest.raises(InvalidChunkError, match=f"edge a->b:? .*{message}") as caught:
        accepted_part(_packet(**tensors), ACCEPTS, edge="a->b")
    assert caught.value.metadata == {"edge": "a->b"}


def _packet(**tensors: Array) -> Packet:
    return Packet(tensors, {"step": 1})
