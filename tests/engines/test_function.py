"""The function engine: batching, state, joining and errors."""

import asyncio
import weakref
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing

import numpy as np
import pytest

from stagemesh.common.errors import InternalError, InvalidChunkError, InvalidRequestError, NotReadyError
from stagemesh.common.plugins.descriptors import FunctionDescriptor
from stagemesh.connectors.packets import Packet
from stagemesh.services.engines.base import Progress, Task, Usage
from stagemesh.services.engines.function.engine import FunctionEngine
from stagemesh.services.engines.input_join import prompt_packet
from stagemesh.services.engines.prompts import ChatMessage, Conversation, MediaFile, Prompt, RawPrompt
from tests.engines.functions import ABSENT_NAMES, ECHO, ENTERED, GATE, LISTING_MEDIA, SUMMING
from tests.engines.support import collect, numbers_task, packets, stage_config, stream, text_of


@pytest.fixture(autouse=True)
def _gate() -> Iterator[None]:
    GATE.set()
    ENTERED.clear()
    yield
    GATE.set()


@pytest.fixture
async def engine() -> AsyncIterator[FunctionEngine]:
    engine = make(SUMMING)
    await engine.start(quiet)
    yield engine
    await engine.close()
    await engine.close()


def make(descriptor: FunctionDescriptor, **options: int) -> FunctionEngine:
    return FunctionEngine(stage_config("function", function="tested", options=options), descriptor=descriptor)


def values(packet: Packet) -> list[float]:
    return [float(value) for value in packet.tensors["y"]]


async def a_call_has_begun() -> None:
    assert await asyncio.to_thread(ENTERED.wait, 5)


def quiet(_line: str) -> None:
    """Ignores the lines that an engine reports while it loads."""


async def test_each_request_keeps_its_own_state(engine: FunctionEngine) -> None:
    tasks = [numbers_task(str(seed), [1.0], [seed], seed=seed) for seed in range(5)]
    runs = await asyncio.gather(*(collect(engine.submit(task)) for task in tasks))
    assert [values(packets(run)[-1]) for run in runs] == [[seed, 1.0 + seed] for seed in range(5)]


async def test_events_end_with_usage(engine: FunctionEngine) -> None:
    events = await collect(engine.submit(numbers_task("r", [1], [2])))
    assert events[1] == Progress(1)
    assert events[-1] == Usage(steps=2)


async def test_waiting_requests_share_a_batch(engine: FunctionEngine) -> None:
    GATE.clear()
    first = asyncio.create_task(collect(engine.submit(numbers_task("a", [1]))))
    await a_call_has_begun()
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


async def test_edges_are_joined_packet_by_packet() -> None:
    engine = make(SUMMING)
    await engine.start(quiet)
    other = _renamed(stream([5], [6]))
    events = await collect(engine.submit(Task("r", 0, inlets={"in": stream([1], [2]), "side": other})))
    assert values(packets(events)[-1]) == [0, 3]
    await engine.close()


async def _renamed(source: AsyncIterator[Packet]) -> AsyncIterator[Packet]:
    async for packet in source:
        yield Packet({"side": packet.tensors["x"]})


async def test_an_edge_that_ends_early_is_named(engine: FunctionEngine) -> None:
    task = Task("r", 0, inlets={"long": stream([1], [2]), "short": _renamed(stream([5]))})
    with pytest.raises(InvalidChunkError, match="edge short ended sooner"):
        await collect(engine.submit(task))


async def test_a_function_is_notified_of_absent_tensors() -> None:
    engine = make(ABSENT_NAMES)
    await engine.start(quiet)
    events = await collect(engine.submit(Task("r", 0, inlets={"in": stream([1])}, absent=frozenset({"side"}))))
    assert values(packets(events)[-1]) == [len("side")]
    await engine.close()


async def test_a_wrong_tensor_is_rejected(engine: FunctionEngine) -> None:
    with pytest.raises(InvalidChunkError, match=r"'x' is float32\[1, 1\]; expected float32\[count\]"):
        await collect(engine.submit(Task("r", 0, inlets={"in": stream([[1]])})))  # type: ignore[list-item]


async def test_options_are_completed_and_checked(engine: FunctionEngine) -> None:
    events = await collect(engine.submit(numbers_task("r", [2], factor=3)))
    assert values(packets(events)[0]) == [6]
    with pytest.raises(InvalidRequestError, match="'factor' is 11; it must be a number from 0 to 10"):
        await collect(engine.submit(numbers_task("r", [2], factor=11)))
    with pytest.raises(InvalidRequestError, match=r"unknown option 'factr'.*factor"):
        await collect(engine.submit(numbers_task("r", [2], factr=1)))


async def test_the_prompt_becomes_a_packet() -> None:
    engine = make(ECHO)
    await engine.start(quiet)
    events = await collect(engine.submit(Task("r", 0, "héllo", tensors={"z": np.zeros(2)})))
    assert text_of(events) == "héllo"
    assert packets(events)[0].tensors.keys() == {"text", "z"}
    await engine.close()


@pytest.mark.parametrize(
    "prompt",
    [
        RawPrompt((5, 6)),
        RawPrompt("a", [MediaFile("audio", b"x", "audio/wav")]),
        Conversation([ChatMessage("user", "a")]),
    ],
    ids=["tokens", "media", "conversation"],
)
async def test_a_prompt_other_than_text_is_rejected(prompt: Prompt) -> None:
    assert prompt_packet(Task("r", 0, RawPrompt("hi"))).tensors["text"].tobytes() == b"hi"
    with pytest.raises(InvalidRequestError, match="accepts its prompt only as text"):
        prompt_packet(Task("r", 0, prompt))


VOICE = MediaFile("audio", b"x", "audio/wav")


@pytest.mark.parametrize(
    "prompt",
    [
        RawPrompt("Hi", [VOICE]),
        Conversation([ChatMessage("user", parts=["Hi", VOICE])]),
    ],
    ids=["raw", "message"],
)
async def test_a_function_that_accepts_media_receives_them_with_the_text(prompt: Prompt) -> None:
    engine = make(LISTING_MEDIA)
    await engine.start(quiet)
    assert text_of(await collect(engine.submit(Task("r", 0, prompt)))) == "Hi audio/wav"
    await engine.close()


@pytest.mark.parametrize(
    "prompt",
    [
        RawPrompt((5, 6)),
        Conversation([ChatMessage("user", "a"), ChatMessage("user", "b")]),
        Conversation([ChatMessage("user", "a")], template_arguments={"x": 1}),
    ],
    ids=["tokens", "messages", "arguments"],
)
async def test_a_prompt_other_than_text_and_media_is_rejected(prompt: Prompt) -> None:
    with pytest.raises(InvalidRequestError, match="accepts its prompt only as text or as one message"):
        prompt_packet(Task("r", 0, prompt), media=True)


async def test_an_unread_request_does_not_block_others(engine: FunctionEngine) -> None:
    async with aclosing(engine.submit(numbers_task("idle", *[[1]] * 50))) as idle:
        await anext(idle)
        await collect(engine.submit(numbers_task("busy", [1], [2])))
        assert engine.load().running == 1
    assert engine.load().running == 0


async def test_cancel_drops_a_waiting_call(engine: FunctionEngine) -> None:
    GATE.clear()
    first = asyncio.create_task(collect(engine.submit(numbers_task("a", [1]))))
    await a_call_has_begun()
    first.cancel()
    GATE.set()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert engine.load().running == 0
    assert values(packets(await collect(engine.submit(numbers_task("b", [4]))))[-1]) == [0, 4]


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
    async with asyncio.timeout(5):
        while alive() is not None:
            await asyncio.sleep(0.01)
    assert alive() is None


async def test_submit_before_start_is_rejected() -> None:
    engine = make(SUMMING)
    with pytest.raises(NotReadyError, match="still loading"):
        await collect(engine.submit(numbers_task("r", [1])))
    await engine.close()


def test_max_batch_must_be_a_positive_integer() -> None:
    with pytest.raises(InvalidRequestError, match="max_batch is 0"):
        make(SUMMING, max_batch=0)
