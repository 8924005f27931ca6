"""The packets that a step receives and sends over its edges: accepted, transformed and selected."""

from dataclasses import replace

import numpy as np
import pytest

from stagemesh.common.errors import InvalidChunkError
from stagemesh.common.plugins.descriptors import Emitted, Signature
from stagemesh.common.wire.chunk_sizes import StepPolicy
from stagemesh.common.wire.tensors import Array, TensorSpec
from stagemesh.connectors.packets import ConsumerAddress, Packet
from stagemesh.services.engines.base import TokenSelection
from stagemesh.services.stage.step.inputs import accepted_part
from stagemesh.services.stage.step.spec import OutputBinding
from tests.stage.replicas import step_spec

ACCEPTS = {"spectrum": TensorSpec("float32", ("frames", 3)), "f0": TensorSpec("float32", ("frames",))}
SPECTRUM = np.zeros((2, 3), np.float32)


def test_tensors_that_the_stage_does_not_accept_are_dropped() -> None:
    sent = _packet(f0=np.zeros(2, np.float32), spectrum=SPECTRUM, loudness=SPECTRUM)
    packet = accepted_part(sent, ACCEPTS, edge="a->b")
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


ROWS = Emitted(TensorSpec("float32", ("tokens", "hidden")))
TEXT = Emitted(TensorSpec("uint8", ("bytes",)), kind="text")
SIGNATURE = Signature(emits={"text": TEXT, "hidden_states": ROWS, "hidden_states_2": ROWS})
STATES = frozenset({"hidden_states"})
EVERYTHING = frozenset[str]()


def binding(tensors: frozenset[str] = STATES, tokens: TokenSelection = "all") -> OutputBinding:
    return OutputBinding("e", ConsumerAddress("b-0", "127.0.0.1:1"), "auto", StepPolicy(), tensors, tokens)


def rows(start: int, count: int, *, prompt_tokens: int = 5) -> Packet:
    numbers = np.arange(start, start + count, dtype=np.float32)[:, None]
    metadata = {"token_start": start, "prompt_tokens": prompt_tokens}
    return Packet({"hidden_states": numbers, "hidden_states_2": numbers}, metadata)


@pytest.mark.parametrize(("start", "count", "first"), [(0, 7, 4), (4, 2, 4), (5, 1, 5)])
def test_last_starts_at_the_last_token_of_the_prompt(start: int, count: int, first: int) -> None:
    picked = binding(tokens="last").select(rows(start, count))
    assert picked is not None
    assert picked.tensors.keys() == STATES
    assert picked.metadata["token_start"] == first
    assert picked.tensors["hidden_states"][:, 0].tolist() == list(range(first, start + count))


def test_last_drops_earlier_rows_of_the_prompt() -> None:
    assert binding(tokens="last").select(rows(0, 4)) is None


def test_last_keeps_tensors_without_rows() -> None:
    packet = Packet({"text": np.zeros(3, np.uint8)})
    assert binding(EVERYTHING, "last").select(packet) is packet


def test_an_edge_carries_only_its_tensors() -> None:
    assert binding(frozenset({"text"})).select(rows(0, 4)) is None


@pytest.mark.parametrize(
    ("bindings", "streamed", "tokens"),
    [
        ((binding(tokens="last"),), ("text",), "last"),
        ((binding(tokens="last"), binding()), (), "all"),
        ((binding(tokens="last"), binding(frozenset({"text"}))), (), "last"),
        ((binding(tokens="last"),), ("hidden_states_2",), "all"),
        ((binding(EVERYTHING, "last"),), (), "last"),
        ((), ("hidden_states",), "all"),
    ],
)
def test_the_engine_emits_rows_that_any_edge_takes(
    bindings: tuple[OutputBinding, ...], streamed: tuple[str, ...], tokens: TokenSelection
) -> None:
    assert replace(step_spec(streamed=streamed), outputs=bindings).wanted_rows(SIGNATURE) == tokens


def test_the_engine_emits_tensors_that_any_edge_takes() -> None:
    taken = replace(step_spec(streamed=("text",)), outputs=(binding(),))
    assert taken.wanted_tensors == frozenset({"text", "hidden_states"})
    assert replace(taken, outputs=(binding(EVERYTHING),)).wanted_tensors is None
