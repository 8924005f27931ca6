"""Which rows and tensors go over which edge."""

from dataclasses import replace

import numpy as np
import pytest

from stagemesh.common.descriptors import Emitted, Signature
from stagemesh.common.tensors import TensorSpec
from stagemesh.connectors.edge import Packet, StepPolicy
from stagemesh.services.engines.base import TokenSelection
from stagemesh.services.stage.step.selection import selection_of, tokens_of, wanted_of
from stagemesh.services.stage.step.spec import OutputBinding
from tests.stage.replicas import order

ROWS = Emitted(TensorSpec("float32", ("tokens", "hidden")))
TEXT = Emitted(TensorSpec("uint8", ("bytes",)), kind="text")
SIGNATURE = Signature(emits={"text": TEXT, "hidden_states": ROWS, "hidden_states_2": ROWS})
STATES = frozenset({"hidden_states"})
EVERYTHING = frozenset[str]()


def binding(tensors: frozenset[str] = STATES, tokens: TokenSelection = "all") -> OutputBinding:
    return OutputBinding("e", "b-0", "127.0.0.1:1", "auto", StepPolicy(), tensors, tokens)


def rows(start: int, count: int, *, prompt_tokens: int = 5) -> Packet:
    numbers = np.arange(start, start + count, dtype=np.float32)[:, None]
    metadata = {"token_start": start, "prompt_tokens": prompt_tokens}
    return Packet({"hidden_states": numbers, "hidden_states_2": numbers}, metadata)


def select(target: OutputBinding, packet: Packet) -> Packet | None:
    selection = selection_of(target)
    return packet if selection is None else selection(packet)


@pytest.mark.parametrize(("start", "count", "first"), [(0, 7, 4), (4, 2, 4), (5, 1, 5)])
def test_last_begins_at_the_last_token_of_the_prompt(start: int, count: int, first: int) -> None:
    picked = select(binding(tokens="last"), rows(start, count))
    assert picked is not None
    assert picked.tensors.keys() == STATES
    assert picked.metadata["token_start"] == first
    assert picked.tensors["hidden_states"][:, 0].tolist() == list(range(first, start + count))


def test_last_carries_nothing_of_the_prompts_first_part() -> None:
    assert select(binding(tokens="last"), rows(0, 4)) is None


def test_last_lets_tensors_without_rows_pass() -> None:
    packet = Packet({"text": np.zeros(3, np.uint8)})
    assert select(binding(EVERYTHING, "last"), packet) is packet


def test_edge_carries_only_the_tensors_that_it_names() -> None:
    assert select(binding(frozenset({"text"})), rows(0, 4)) is None


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
def test_engine_makes_the_rows_that_anybody_takes(
    bindings: tuple[OutputBinding, ...], streamed: tuple[str, ...], tokens: TokenSelection
) -> None:
    assert tokens_of(replace(order(streamed=streamed), outputs=bindings), SIGNATURE) == tokens


def test_engine_makes_the_tensors_that_anybody_takes() -> None:
    taken = replace(order(streamed=("text",)), outputs=(binding(),))
    assert wanted_of(taken) == frozenset({"text", "hidden_states"})
    assert wanted_of(replace(taken, outputs=(binding(EVERYTHING),))) is None
