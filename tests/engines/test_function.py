"""The function engine: batching, state, joining, errors and checkpoints."""

import asyncio
import weakref
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace

import numpy as np
import pytest

from stagemesh.common.errors import InternalError, InvalidRequestError, UnsupportedError
from stagemesh.common.wire.tensors import Array
from stagemesh.conformance.replicas import until
from stagemesh.connectors.packets import Packet
from stagemesh.services.engines.base import Checkpoint, EngineEvent, Progress, Task, Usage
from stagemesh.services.engines.function.engine import FunctionEngine
from stagemesh.services.engines.input_join import prompt_packet
from stagemesh.services.engines.prompts import ChatMessage, Conversation, MediaFile, Prompt, RawPrompt
from stagemesh.services.stage.step.spec import checkpoint_to_wire, spec_from_wire
from stagemesh.v1 import stage_pb2
from tests.engines.functions import (
    ABSENT_NAMES,
    ECHO,
    GATE,
    LISTING_MEDIA,
    SAVING_SUM,
    SUMMING,
    engine_of,
    running,
    wait_entered,
)
from tests.engines.support import collect, flow, numbers_task, packets, stream, text_of
from tests.rpc.call_errors import raises


@pytest.fixture
async def engine() -> AsyncIterator[FunctionEngine]:
    async with running(SUMMING) as engine:
        yield engine
        await engine.close()


@pytest.fixture
async def saving() -> AsyncIterator[FunctionEngine]:
    """An engine whose requests have a checkpoint after every four rows."""
    async with running(SAVING_SUM, checkpoint_rows=4) as engine:
        yield engine


def values(packet: Packet) -> list[float]:
    return [float(value) for value in packet.tensors["y"]]


async def test_each_request_keeps_its_own_state(engine: FunctionEngine) -> None:
    tasks = [numbers_task(str(seed), [1.0], [seed], seed=seed) for seed in range(5)]
    runs = await asyncio.gather(*(collect(engine.submit(task)) for task in tasks))
    assert [values(packets(run)[-1]) for run in runs] == [[seed, 1.0 + seed] for seed in range(5)]


async def test_events_end_with_usage(engine: FunctionEngine) -> None:
    events = await collect(engine.submit(numbers_task("r", [1], [2])))
    assert events[1] == Progress(1)
    assert events[-1] == Usage(engine_steps=2)


async def test_waiting_requests_share_a_batch(engine: FunctionEngine) -> None:
    GATE.clear()
    first = asyncio.create_task(collect(engine.submit(numbers_task("a", [1]))))
    await wait_entered()
    rest = [asyncio.create_task(collect(engine.submit(numbers_task(name, [1])))) for name in "bcd"]
    await asyncio.sleep(0)
    GATE.set()
    runs = await asyncio.gather(first, *rest)
    assert max(int(packet.metadata["batch"]) for run in runs for packet in packets(run)) > 1


async def test_only_the_call_at_fault_in_a_batch_fails(engine: FunctionEngine) -> None:
    tasks = [numbers_task("a", [1]), numbers_task("b", [-1]), numbers_task("c", [3])]
    runs = await asyncio.gather(*(collect(engine.submit(task)) for task in tasks), return_exceptions=True)
    assert isinstance(runs[1], InvalidRequestError)
    assert [values(packets(run)[-1]) for run in (runs[0], runs[2]) if isinstance(run, list)] == [[0, 1], [0, 3]]


async def test_a_defect_names_the_function(engine: FunctionEngine, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(InternalError, match=r"function tested of stage .* raised ZeroDivisionError"):
        await collect(engine.submit(numbers_task("r", [-2])))
    assert "a defect of the function" in caplog.text


async def last_of(engine: FunctionEngine, task: Task) -> list[float]:
    """Runs a task, and returns the values of its last packet."""
    return values(packets(await collect(engine.submit(task)))[-1])


async def test_edges_are_joined_packet_by_packet(engine: FunctionEngine) -> None:
    side = flow(Packet({"side": np.array([number], np.float32)}) for number in (5, 6))
    assert await last_of(engine, Task("r", 0, inlets={"in": stream([1], [2]), "side": side})) == [0, 3]


async def test_a_function_is_notified_of_absent_tensors() -> None:
    task = Task("r", 0, inlets={"in": stream([1])}, absent=frozenset({"side"}))
    async with running(ABSENT_NAMES) as engine:
        assert await last_of(engine, task) == [len("side")]


async def test_options_are_completed_and_checked(engine: FunctionEngine) -> None:
    events = await collect(engine.submit(numbers_task("r", [2], factor=3)))
    assert values(packets(events)[0]) == [6]
    with pytest.raises(InvalidRequestError, match="'factor' is 11; it must be a number from 0 to 10"):
        await collect(engine.submit(numbers_task("r", [2], factor=11)))
    with pytest.raises(InvalidRequestError, match=r"unknown option 'factr'.*factor"):
        await collect(engine.submit(numbers_task("r", [2], factr=1)))


async def test_the_prompt_becomes_a_packet() -> None:
    async with running(ECHO) as engine:
        events = await collect(engine.submit(Task("r", 0, "héllo", tensors={"z": np.zeros(2)})))
    assert text_of(events) == "héllo"
    assert packets(events)[0].tensors.keys() == {"text", "z"}


VOICE = MediaFile("audio", b"x", "audio/wav")
HI = ChatMessage("user", "a")
TEXT_ONLY, TEXT_AND_MEDIA = "accepts its prompt only as text", "accepts its prompt only as text or as one message"


@pytest.mark.parametrize(
    ("prompt", "media", "message"),
    [
        (RawPrompt((5, 6)), False, TEXT_ONLY),
        (RawPrompt("a", [VOICE]), False, TEXT_ONLY),
        (Conversation([HI]), False, TEXT_ONLY),
        (RawPrompt((5, 6)), True, TEXT_AND_MEDIA),
        (Conversation([HI, HI]), True, TEXT_AND_MEDIA),
        (Conversation([HI], template_arguments={"x": 1}), True, TEXT_AND_MEDIA),
    ],
    ids=["tokens", "media", "conversation", "tokens with media", "messages with media", "arguments with media"],
)
async def test_a_prompt_other_than_text_and_media_is_rejected(prompt: Prompt, media: bool, message: str) -> None:
    assert prompt_packet(Task("r", 0, RawPrompt("hi"))).tensors["text"].tobytes() == b"hi"
    with pytest.raises(InvalidRequestError, match=message):
        prompt_packet(Task("r", 0, prompt), media=media)


SPOKEN = {"raw": RawPrompt("Hi", [VOICE]), "message": Conversation([ChatMessage("user", parts=["Hi", VOICE])])}


@pytest.mark.parametrize("prompt", SPOKEN.values(), ids=SPOKEN)
async def test_a_function_that_accepts_media_receives_them_with_the_text(prompt: Prompt) -> None:
    async with running(LISTING_MEDIA) as engine:
        assert text_of(await collect(engine.submit(Task("r", 0, prompt)))) == "Hi audio/wav"


async def test_an_unread_request_does_not_block_others(engine: FunctionEngine) -> None:
    async with aclosing(engine.submit(numbers_task("idle", *[[1]] * 50))) as idle:
        await anext(idle)
        await collect(engine.submit(numbers_task("busy", [1], [2])))
        assert engine.load().running == 1
    assert engine.load().running == 0


async def test_cancel_drops_a_waiting_call(engine: FunctionEngine) -> None:
    GATE.clear()
    first = asyncio.create_task(collect(engine.submit(numbers_task("a", [1]))))
    await wait_entered()
    first.cancel()
    GATE.set()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert engine.load().running == 0
    assert await last_of(engine, numbers_task("b", [4])) == [0, 4]


async def test_an_idle_engine_retains_no_input(engine: FunctionEngine) -> None:
    numbers = np.ones(3, np.float32)
    alive = weakref.ref(numbers)

    async def inlet() -> AsyncIterator[Packet]:
        nonlocal numbers
        packet, numbers = Packet({"x": numbers}), np.zeros(0, np.float32)
        yield packet

    events = engine.submit(Task("r", 0, inlets={"edge": inlet()}))
    async with aclosing(events):
        await anext(events)
    del events
    # The engine's thread drops its last call after the result has been passed on.
    await until(lambda: alive() is None, timeout_s=5)


def test_max_batch_must_be_a_positive_integer() -> None:
    with pytest.raises(InvalidRequestError, match="max_batch is 0"):
        engine_of(SUMMING, max_batch=0)


# -- checkpoints


NUMBERS = [float(number) for number in range(20)]
CUTS: Sequence[Sequence[int]] = ([3, 7], [1, 2, 3, 4, 5, 6], [10], [])


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


async def test_a_checkpoint_follows_every_few_rows(saving: FunctionEngine) -> None:
    found = checkpoints(await collect(saving.submit(task([2, 4, 5, 8, 11, 17]))))
    assert [(each.steps, len(before)) for each, before in found] == [(2, 4), (4, 8), (6, 17), (7, 20)]


@pytest.mark.parametrize("again", CUTS, ids=str)
async def test_a_request_resumes_from_each_checkpoint(saving: FunctionEngine, again: Sequence[int]) -> None:
    whole = await collect(saving.submit(task(CUTS[0])))
    found = checkpoints(whole)
    assert [checkpoint.steps for checkpoint, _ in found] == [2, 3]
    for checkpoint, before in found:
        rest = await collect(saving.submit(task(again, over_the_wire(checkpoint))))
        assert before + outputs(rest) == outputs(whole)
        # The first row after the checkpoint is the first one that the function receives.
        assert len(outputs(rest)) == len(NUMBERS) + 2 - len(before)


async def test_a_resumed_request_reports_later_checkpoints_and_all_steps(saving: FunctionEngine) -> None:
    events = await collect(saving.submit(task([4, 8, 12])))
    (first, _), *later = checkpoints(events)
    rest = await collect(saving.submit(task([4, 8, 12], first)))
    expected = [(each.steps, each.tensors.keys()) for each, _ in later]
    assert [(each.steps, each.tensors.keys()) for each, _ in checkpoints(rest)] == expected
    assert rest[-1] == events[-1] == Usage(engine_steps=4)


@pytest.mark.parametrize("checkpoint_rows", [0, len(NUMBERS) + 1])
async def test_the_option_can_disable_checkpoints(checkpoint_rows: int) -> None:
    async with running(SAVING_SUM, checkpoint_rows=checkpoint_rows) as engine:
        assert not checkpoints(await collect(engine.submit(task(CUTS[0]))))


async def test_chunks_with_context_have_no_checkpoints(saving: FunctionEngine) -> None:
    packets = [Packet({"x": np.array(part, np.float32)}, {"context_frames": 0}) for part in cut([8])]
    assert not checkpoints(await collect(saving.submit(Task("r", 0, inlets={"in": flow(packets)}))))


async def first_checkpoint(saving: FunctionEngine) -> Checkpoint:
    return checkpoints(await collect(saving.submit(task(CUTS[0]))))[0][0]


async def test_a_function_without_saved_states_cannot_resume(saving: FunctionEngine) -> None:
    checkpoint = await first_checkpoint(saving)
    assert saving.abilities.can_resume
    async with running(SUMMING, checkpoint_rows=4) as engine:
        assert not checkpoints(await collect(engine.submit(task(CUTS[0]))))
        assert not engine.abilities.can_resume
        with pytest.raises(UnsupportedError, match="resumes only if its function implements Saves"):
            await collect(engine.submit(task(CUTS[0], checkpoint)))


SAVED = ("function", "state.seen", "input.x")


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"function": np.frombuffer(b"another", np.uint8)}, "not contain a state of the function tested"),
        ({"state.seen": np.zeros((2, 2))}, "seen must have one axis"),
        ({"input.x": np.array(21)}, "includes more input rows than the request has"),
        ({"input.x": np.array(-4)}, "includes no input rows"),
        ({"input.x": np.array([4, 4])}, "has damaged numbers of input rows"),
        *(({name: None}, None) for name in SAVED),
    ],
    ids=["function", "state", "more rows", "no rows", "damaged rows", *(f"without {name}" for name in SAVED)],
)
async def test_a_checkpoint_of_something_else_is_rejected(
    saving: FunctionEngine, change: Mapping[str, Array | None], problem: str | None
) -> None:
    checkpoint = await first_checkpoint(saving)
    changed = {**checkpoint.tensors, **change}
    wrong = replace(checkpoint, tensors={name: tensor for name, tensor in changed.items() if tensor is not None})
    with raises(InvalidRequestError, reason="INVALID_CHECKPOINT", match=problem):
        await collect(saving.submit(task(CUTS[0], wrong)))
