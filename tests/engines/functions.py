"""Functions that the tests of the function engine run."""

import asyncio
import threading
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import numpy as np
from pydantic import JsonValue

from stagemesh.common.errors import InvalidRequestError
from stagemesh.common.plugins.descriptors import Emitted, FunctionDescriptor, OptionSpec, Signature
from stagemesh.common.wire.tensors import Array, Tensors, TensorSpec, Value
from stagemesh.connectors.packets import Packet
from stagemesh.services.engines.function import engine
from stagemesh.services.engines.function.base import Call, OpensWithout, Saves
from stagemesh.services.engines.function.engine import FunctionEngine
from stagemesh.services.engines.prompts import MediaFile
from tests.engines.support import stage_config, started

NUMBERS = TensorSpec("float32", ("count",))
GATE = threading.Event()
"""Held by a test to make calls queue."""

ENTERED = threading.Event()
"""Set when a call has started."""


async def wait_entered() -> None:
    """Waits until a call has started."""
    assert await asyncio.to_thread(ENTERED.wait, 5)


def registered(descriptor: FunctionDescriptor) -> AbstractContextManager[object]:
    """Registers the function "tested" within the block, as a package does by an entry point."""
    return patch.object(engine, "load_descriptor", return_value=descriptor)


def engine_of(descriptor: FunctionDescriptor, **options: JsonValue) -> FunctionEngine:
    """Returns the engine of a stage with one of these functions."""
    with registered(descriptor):
        return FunctionEngine(stage_config("function", function="tested", options=options))


def running(descriptor: FunctionDescriptor, **options: JsonValue) -> AbstractAsyncContextManager[FunctionEngine]:
    """Starts an engine with one of these functions."""
    return started(engine_of(descriptor, **options))


class _Function:
    """A function without settings, whose requests have no state."""

    def __init__(self, model: object, options: Mapping[str, object]) -> None: ...

    def open(self, *, seed: int, options: Mapping[str, Value]) -> Any:
        return None


@dataclass
class Total:
    """The numbers that a request has received."""

    seed: int
    factor: float
    seen: list[float] = field(default_factory=list[float])


class Summing(_Function):
    """Emits each number times `factor`, and at the end the seed and the sum; rejects negative numbers."""

    def open(self, *, seed: int, options: Mapping[str, Value]) -> Total:
        return Total(seed, float(options["factor"]))

    def __call__(self, batch: Sequence[Call[Total]]) -> Sequence[Sequence[Packet]]:
        ENTERED.set()
        GATE.wait(5)
        for call in batch:
            if call.packet is not None:
                _refuse(call.packet.tensors["x"])
        return [[self._one(call, len(batch))] for call in batch]

    def _one(self, call: Call[Total], batch: int) -> Packet:
        state = call.state
        if call.packet is None:
            return Packet({"y": np.array([state.seed, sum(state.seen)], np.float32)}, {"batch": batch})
        numbers = [float(number) * state.factor for number in call.packet.tensors["x"]]
        state.seen.extend(numbers)
        return Packet({"y": np.array(numbers, np.float32)}, {"batch": batch})


class SavingSum(Summing, Saves[Total]):
    """The same function, whose state can be saved."""

    def save(self, state: Total) -> Tensors:
        return {"seen": np.array(state.seen)}

    def restore(self, tensors: Tensors, *, seed: int, options: Mapping[str, Value]) -> Total:
        if tensors["seen"].ndim != 1:
            raise ValueError("seen must have one axis")
        return replace(self.open(seed=seed, options=options), seen=[float(each) for each in tensors["seen"]])


def _refuse(numbers: Array) -> None:
    if numbers[0] == -1:
        raise InvalidRequestError("numbers must not be negative")
    if numbers[0] == -2:
        raise ZeroDivisionError("a defect of the function")


class Clock:
    """A clock that tests and functions advance."""

    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


CLOCK = Clock()
BATCHES: list[list[tuple[int, int]]] = []
"""The batches of `Speaking`: the seed and the number of samples of each call."""


class Speaking(_Function):
    """Emits each input as audio. Records its batches. A call takes 0.25 s on `CLOCK`."""

    def open(self, *, seed: int, options: Mapping[str, Value]) -> int:
        return seed

    def __call__(self, batch: Sequence[Call[int]]) -> Sequence[Sequence[Packet]]:
        ENTERED.set()
        GATE.wait(5)
        CLOCK.now_s += 0.25
        BATCHES.append([(call.state, 0 if call.packet is None else len(call.packet.tensors["x"])) for call in batch])
        return [[] if call.packet is None else [Packet({"audio": call.packet.tensors["x"]})] for call in batch]


class Delaying(_Function):
    """Emits each input as audio, but retains the last sample of a request until its next input or its end."""

    def open(self, *, seed: int, options: Mapping[str, Value]) -> list[Array]:
        return []

    def __call__(self, batch: Sequence[Call[list[Array]]]) -> Sequence[Sequence[Packet]]:
        return [self._one(call) for call in batch]

    def _one(self, call: Call[list[Array]]) -> list[Packet]:
        retained = call.state
        if call.packet is None:
            return [Packet({"audio": np.concatenate(retained)})] if retained else []
        samples = np.concatenate([*retained, call.packet.tensors["x"]])
        retained[:] = [samples[-1:]]
        return [Packet({"audio": samples[:-1]})]


class ListingMedia(_Function):
    """Emits the text of the prompt, and the types of its media."""

    def __call__(self, batch: Sequence[Call[None]]) -> Sequence[Sequence[Packet]]:
        return [[] if call.packet is None else [self._list(call.packet, call)] for call in batch]

    def _list(self, packet: Packet, call: Call[None]) -> Packet:
        types = [each.media_type for each in call.media if isinstance(each, MediaFile)]
        words = [packet.tensors["text"].tobytes().decode(), *types]
        return Packet({"text": np.frombuffer(" ".join(words).encode(), np.uint8)})


class Echo(_Function):
    """Emits the prompt's text."""

    def __call__(self, batch: Sequence[Call[None]]) -> Sequence[Sequence[Packet]]:
        return [[] if call.packet is None else [call.packet] for call in batch]


class AbsentNames(_Function, OpensWithout[frozenset[str]]):
    """Emits the length of the name of each absent tensor, and nothing else."""

    def open_without(self, absent: frozenset[str], *, seed: int, options: Mapping[str, Value]) -> frozenset[str]:
        return absent

    def open(self, *, seed: int, options: Mapping[str, Value]) -> frozenset[str]:
        raise AssertionError("open_without is called instead")

    def __call__(self, batch: Sequence[Call[frozenset[str]]]) -> Sequence[Sequence[Packet]]:
        lengths = [np.array([len(name) for name in sorted(call.state)], np.float32) for call in batch]
        return [[Packet({"y": each})] if call.packet is None else [] for call, each in zip(batch, lengths, strict=True)]


def _described(function: type[_Function], signature: Signature) -> FunctionDescriptor:
    return FunctionDescriptor(signature, factory=f"tests.engines.functions:{function.__name__}")


_FACTOR = OptionSpec(default=1.0, minimum=0.0, maximum=10.0)
_SUMS = Signature(accepts={"x": NUMBERS}, emits={"y": Emitted(NUMBERS)}, options={"factor": _FACTOR})
SUMMING, SAVING_SUM = _described(Summing, _SUMS), _described(SavingSum, _SUMS)
_AUDIO = Emitted(TensorSpec("float32", ("samples",)), kind="audio", sample_rate_hz=10)
_SPEECH = Signature(accepts={"x": NUMBERS}, emits={"audio": _AUDIO})
SPEAKING, DELAYING = _described(Speaking, _SPEECH), _described(Delaying, _SPEECH)
_TEXT = {"text": Emitted(TensorSpec("uint8", ("bytes",)), kind="text")}
ECHO = _described(Echo, Signature(emits=_TEXT))
LISTING_MEDIA = _described(ListingMedia, Signature(emits=_TEXT, media=True))
_SIDES = {"x": NUMBERS, "side": NUMBERS}
ABSENT_NAMES = _described(
    AbsentNames, Signature(accepts=_SIDES, emits={"y": Emitted(NUMBERS)}, optional=frozenset(_SIDES))
)
