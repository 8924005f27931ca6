"""The checkpoints of function stages, and requests that resume from them."""

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import numpy as np
import pytest

from stagemesh.common.errors import InvalidRequestError, UnsupportedError
from stagemesh.common.plugins.descriptors import FunctionDescriptor
from stagemesh.common.wire.tensors import Tensors
from stagemesh.connectors.packets import Packet
from stagemesh.services.engines.base import Checkpoint, EngineEvent, Task, Usage
from stagemesh.services.engines.function.engine import FunctionEngine
from stagemesh.services.stage.step.spec import checkpoint_to_wire, spec_from_wire
from stagemesh.v1 import stage_pb2
from tests.engines.functions import GATE, SAVING_SUM, SUMMING
from tests.engines.support import collect, numbers_task, packets, stage_config, stream

NUMBERS = [float(number) for number in range(20)]
CUTS: Sequence[Sequence[int]] = ([3, 7], [1, 2, 3, 4, 5, 6], [10], [])


@pytest.fixture(autouse=True)
def _gate() -> None:
    GATE.set()


@asynccontextmanager
async def running(
    descriptor: FunctionDescriptor = SAVING_SUM, *, checkpoint_rows: int = 4
) -> AsyncGenerator[FunctionEngine]:
    config = stage_config("function", function="tested", options={"checkpoint_rows": checkpoint_rows})
    engine = FunctionEngine(config, descriptor=descriptor)
    await engine.start(lambda _line: None)
    try:
        yield engine
    finally:
        await engine.close()


def cut(places: Sequence[int]) -> list[list[float]]:
    return [NUMBERS[start:end] for start, end in zip([0, *places], [*places, len(NUMBERS)], strict=True)]


def task(places: Sequence[int], checkpoint: Checkpoint | None = None) -> Task:
    return replace(numbers_task("r", *cut(places), seed=9, factor=2), resume_from=checkpoint)


def outputs(events: Sequence[EngineEvent]) -> list[float]:
    return [float(value) for packet in packets(events) for value in packet.tensors["y"]]


def checkpoints(events: Sequence[EngineEvent]) -> list[tuple[Checkpoint, list[float]]]:
    """Returns each checkpoint, and the outputs before it."""
    found = [(number, event) for number, event in enumerate(events) if isinstance(event, Checkpoint)]
    return [(event, outputs(events[:number])) for number, event in found]


def over_the_wire(checkpoint: Checkpoint) -> Checkpoint:
    message = stage_pb2.ExecuteStepRequest(resume_from=checkpoint_to_wire(checkpoint))
    resumed = spec_from_wire(stage_pb2.ExecuteStepRequest.FromString(message.SerializeToString())).task.resume_from
    assert resumed is not None
    return resumed


async def test_a_checkpoint_follows_every_few_rows() -> None:
    async with running() as engine:
        found = checkpoints(await collect(engine.submit(task([2, 4, 5, 8, 11, 17]))))
    assert [(each.steps, len(before)) for each, before in found] == [(2, 4), (4, 8), (6, 17), (7, 20)]


@pytest.mark.parametrize("again", CUTS, ids=str)
async def test_a_request_resumes_from_each_checkpoint_with_the_rows_after_it(again: Sequence[int]) -> None:
    async with running() as engine:
        whole = await collect(engine.submit(task(CUTS[0])))
        found = checkpoints(whole)
        assert [checkpoint.steps for checkpoint, _ in found] == [2, 3]
        for checkpoint, before in found:
            rest = await collect(engine.submit(task(again, over_the_wire(checkpoint))))
            assert before + outputs(rest) == outputs(whole)
            # The first row after the checkpoint is the first one that the function receives.
            assert len(outputs(rest)) == len(NUMBERS) + 2 - len(before)


async def test_a_resumed_request_reports_later_checkpoints_and_all_steps() -> None:
    async with running() as engine:
        events = await collect(engine.submit(task([4, 8, 12])))
        (first, _), *later = checkpoints(events)
        rest = await collect(engine.submit(task([4, 8, 12], first)))
    assert [(each.steps, each.tensors.keys()) for each, _ in checkpoints(rest)] == [
        (each.steps, each.tensors.keys()) for each, _ in later
    ]
    assert rest[-1] == events[-1] == Usage(steps=4)


@pytest.mark.parametrize("checkpoint_rows", [0, len(NUMBERS) + 1])
async def test_the_option_can_disable_checkpoints(checkpoint_rows: int) -> None:
    async with running(checkpoint_rows=checkpoint_rows) as engine:
        assert not checkpoints(await collect(engine.submit(task(CUTS[0]))))


async def test_repeated_rows_are_not_counted_so_that_chunks_with_context_have_no_checkpoints() -> None:
    async def with_context() -> AsyncIterator[Packet]:
        async for packet in stream(*cut([8])):
            yield Packet(packet.tensors, {"context_frames": 0})

    async with running() as engine:
        assert not checkpoints(await collect(engine.submit(Task("r", 0, inlets={"in": with_context()}))))


async def test_a_function_without_saved_states_cannot_resume() -> None:
    async with running() as engine:
        (checkpoint, _), *_ = checkpoints(await collect(engine.submit(task(CUTS[0]))))
        assert engine.abilities.can_resume
    async with running(SUMMING) as engine:
        assert not checkpoints(await collect(engine.submit(task(CUTS[0]))))
        assert not engine.abilities.can_resume
        with pytest.raises(UnsupportedError, match="resumes only if its function implements Saves"):
            await collect(engine.submit(task(CUTS[0], checkpoint)))


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"function": np.frombuffer(b"another", np.uint8)}, "not contain a state of the function tested"),
        ({"state.seen": np.zeros((2, 2))}, "seen must have one axis"),
        ({"input.x": np.array(21)}, "includes more input rows than the request has"),
        ({"input.x": np.array(-4)}, "includes no input rows"),
        ({"input.x": np.array([4, 4])}, "has damaged numbers of input rows"),
    ],
    ids=["function", "state", "more rows", "no rows", "damaged rows"],
)
async def test_a_checkpoint_of_something_else_is_rejected(change: Tensors, problem: str) -> None:
    async with running() as engine:
        (checkpoint, _), *_ = checkpoints(await collect(engine.submit(task(CUTS[0]))))
        wrong = replace(checkpoint, tensors={**checkpoint.tensors, **change})
        with pytest.raises(InvalidRequestError, match=problem) as caught:
            await collect(engine.submit(task(CUTS[0], wrong)))
    assert caught.value.reason == "INVALID_CHECKPOINT"


@pytest.mark.parametrize("name", ["function", "state.seen", "input.x"])
async def test_an_incomplete_checkpoint_is_rejected(name: str) -> None:
    async with running() as engine:
        (checkpoint, _), *_ = checkpoints(await collect(engine.submit(task(CUTS[0]))))
        rest = {key: tensor for key, tensor in checkpoint.tensors.items() if key != name}
        with pytest.raises(InvalidRequestError) as caught:
            await collect(engine.submit(task(CUTS[0], replace(checkpoint, tensors=rest))))
    assert caught.value.reason == "INVALID_CHECKPOINT"
