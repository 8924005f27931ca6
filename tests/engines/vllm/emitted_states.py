"""Compares the hidden states that a vllm stage emits with those of transformers."""

import asyncio
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch
from pydantic import JsonValue

from stagemesh.common.wire.tensors import Array
from stagemesh.connectors.arena.arena import Arena, Written
from stagemesh.connectors.arena.worker_writer import Handle, PartitionAddress
from stagemesh.connectors.data_plane import DataPlane
from stagemesh.connectors.packets import Packet
from stagemesh.services.engines.base import EngineEvent, SamplingOptions, Task
from stagemesh.services.engines.prompts import RawPrompt
from stagemesh.services.engines.vllm.engine import VllmEngine
from tests.engines.support import collect, packets, tokens_of
from tests.engines.vllm.engines import data_plane, started
from tests.engines.vllm.tiny_model import FLOAT32

Floats = npt.NDArray[np.float32]

LAYERS = {"hidden_states": -1, "hidden_states_1": 1, "hidden_states_2": 2}
"""The emitted tensors, and their indices in transformers' `hidden_states`."""
HIDDEN: Mapping[str, JsonValue] = {"layers": ["last", 1, 2], "dtype": "float32"}
ONLY_LAST: JsonValue = {"layers": ["last"], "dtype": "float32"}
OPTIONS: Mapping[str, JsonValue] = {**FLOAT32, "hidden_states": {**HIDDEN}}
TOLERANCE = 1e-4
PROMPTS = [[10 + (7 * number + at) % 200 for at in range(3 + 11 * number)] for number in range(16)]
STEPS = 12
ROWS = sum(len(prompt) + STEPS - 1 for prompt in PROMPTS)
"""The number of rows of all prompts together."""


class Reference(NamedTuple):
    """Transformers' results for a prompt."""

    tokens: list[int]
    states: Mapping[str, Floats]


def load_reference(folder: Path) -> Any:
    """Loads the model in transformers."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def greedy(model: Any, prompt: Sequence[int], *, steps: int) -> list[int]:
    """Returns the tokens that follow a prompt."""
    ids = list(prompt)
    with torch.inference_mode():
        for _ in range(steps):
            ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def reference(model: Any, prompt: Sequence[int]) -> Reference:
    """Returns the greedy tokens, and the states of all positions except the last token's."""
    tokens = greedy(model, prompt, steps=STEPS)
    with torch.inference_mode():
        states = model(torch.tensor([[*prompt, *tokens[:-1]]]), output_hidden_states=True).hidden_states
    return Reference(tokens, {name: states[at][0].numpy() for name, at in LAYERS.items()})


@dataclass
class CountedArena:
    """A data plane's arena partitions, which count the rows written into them."""

    plane: DataPlane
    rows: int = 0
    tickets: list[PartitionAddress] = field(default_factory=list[PartitionAddress])

    def open_partition(self, size_bytes: int) -> PartitionAddress:
        self.tickets.append(self.plane.arena.open_partition(size_bytes))
        return self.tickets[-1]

    def adopt(self, handle: Handle) -> Written:
        written = self.plane.arena.adopt(handle)
        self.rows += len(written.tensors["hidden_states"])
        return written

    def close_partition(self, ticket: PartitionAddress) -> None:
        self.plane.arena.close_partition(ticket)


@dataclass(frozen=True)
class Running:
    """An engine and the memory that its worker writes into."""

    engine: VllmEngine
    arena: CountedArena

    def used_bytes(self) -> int:
        """Returns the number of bytes in use."""
        return self.arena.plane.arena.used_bytes


@asynccontextmanager
async def running(model: Path, **options: JsonValue) -> AsyncGenerator[Running]:
    """Runs an engine with `OPTIONS` and the changed `options`."""
    async with data_plane() as plane:
        arena = CountedArena(plane)
        async with started(model, cast("Arena", arena), **{**OPTIONS, **options}) as engine:
            yield Running(engine, arena)


def task(number: int, **changes: Any) -> Task:
    """Returns a greedy task for the prompt with this number."""
    sampling = SamplingOptions(max_tokens=STEPS, temperature=0.0, ignore_eos=True)
    return Task(f"r{number}", 1, RawPrompt(PROMPTS[number]), sampling=sampling, **changes)


class Received(NamedTuple):
    """A request's tokens and concatenated rows."""

    tokens: list[int]
    starts: list[int]
    states: Mapping[str, Floats]


async def received(engine: VllmEngine, wanted: Task) -> Received:
    """Runs a task to its end and returns its rows."""
    return put_together(await collect(engine.submit(wanted)))


async def received_all(engine: VllmEngine, *tasks: Task) -> list[Received]:
    """Runs tasks at once, by default one for each prompt. Returns their rows."""
    wanted = tasks or [task(number) for number in range(len(PROMPTS))]
    return await asyncio.gather(*(received(engine, each) for each in wanted))


def put_together(events: Sequence[EngineEvent]) -> Received:
    """Concatenates a request's tokens and rows."""
    rows = [one for one in packets(events) if "hidden_states" in one.tensors]
    starts = [_start(one) for one in rows]
    for one, after in zip(rows, starts[1:], strict=False):
        assert _start(one) + len(one.tensors["hidden_states"]) == after, "rows follow each other"
    names = [name for name in LAYERS if name in rows[0].tensors]
    states = {name: np.concatenate([as_floats(one.tensors[name]) for one in rows]) for name in names}
    return Received(tokens_of(events), starts, states)


def as_floats(tensor: Array) -> Floats:
    """Returns a tensor as float32. numpy holds bfloat16 as uint16."""
    if tensor.dtype == np.uint16:
        return (tensor.astype(np.uint32) << 16).view(np.float32)
    return tensor.astype(np.float32)


def _start(packet: Packet) -> int:
    start = packet.metadata["token_start"]
    assert isinstance(start, int)
    return start


def assert_same(got: Received, expected: Reference, *, first: int = 0, tolerance: float = TOLERANCE) -> None:
    """Asserts equal tokens, and equal states from position `first` on."""
    assert got.tokens == expected.tokens
    assert_same_states(got, expected, first=first, tolerance=tolerance)


def assert_same_states(got: Received, expected: Reference, *, first: int = 0, tolerance: float = TOLERANCE) -> None:
    """Asserts that each row from position `first` on is present once, with equal states."""
    assert got.starts[0] == first
    assert "hidden_states" in got.states
    for name, states in got.states.items():
        wanted = expected.states[name][first:]
        assert states.shape == wanted.shape
        assert np.abs(states - wanted).max() < tolerance, name
