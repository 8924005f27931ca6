"""The order in which the function engine runs waiting calls."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import asynccontextmanager, suppress

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stagemesh.connectors.packets import Packet
from stagemesh.services.engines.base import Emission, Task
from stagemesh.services.engines.function.engine import FunctionEngine
from stagemesh.services.engines.function.playout import AudioStream, AudioTensor, CallCosts, CallQueue
from tests.engines.functions import (
    BATCHES,
    CLOCK,
    DELAYING,
    ENTERED,
    GATE,
    SPEAKING,
    SUMMING,
    registered,
    running,
    wait_entered,
)
from tests.engines.support import stage_config, started, stream


class Streams:
    """Requests of one engine, which receive their inputs one by one."""

    def __init__(self, engine: FunctionEngine) -> None:
        self.engine = engine
        self._inlets: dict[int, asyncio.Queue[Packet]] = {}
        self._emitted: dict[int, asyncio.Event] = {}
        self._sent = set[int]()
        self._opened = asyncio.Semaphore(0)
        self._runs: list[asyncio.Task[None]] = []

    async def open(self, count: int) -> None:
        """Starts `count` requests with the seeds from 0."""
        for seed in range(count):
            self._inlets[seed], self._emitted[seed] = asyncio.Queue(), asyncio.Event()
            self._runs.append(asyncio.create_task(self._run(seed)))
            await asyncio.wait_for(self._opened.acquire(), 5)

    def send(self, seed: int, samples: int) -> None:
        """Sends one input to the request of this seed, which then waits for the engine."""
        self._emitted[seed].clear()
        self._sent.add(seed)
        self._inlets[seed].put_nowait(Packet({"x": np.zeros(samples, np.float32)}))

    async def say(self, seed: int, samples: int) -> None:
        """Sends one input, and waits until its audio is emitted."""
        self.send(seed, samples)
        await asyncio.wait_for(self._emitted[seed].wait(), 5)

    async def queue(self, samples_of: Mapping[int, int]) -> None:
        """Sends one input to each request of these seeds, and waits until their calls wait for the engine."""
        for seed, samples in samples_of.items():
            self.send(seed, samples)
        await self.wait_queued(len(samples_of))

    async def wait_queued(self, count: int) -> None:
        """Waits until `count` calls wait for the engine."""
        async with asyncio.timeout(5):
            while self.engine.load().queued != count:
                await asyncio.sleep(0)

    @asynccontextmanager
    async def busy(self) -> AsyncGenerator[None]:
        """Keeps the engine busy with a request of seed 0, and runs the calls that wait at the end."""
        ENTERED.clear()
        GATE.clear()
        self.send(0, 1)
        await wait_entered()
        BATCHES.clear()
        yield
        GATE.set()
        await self.wait_queued(0)
        await asyncio.wait_for(asyncio.gather(*(self._emitted[seed].wait() for seed in self._sent)), 5)

    async def close(self) -> None:
        for run in self._runs:
            run.cancel()
            with suppress(asyncio.CancelledError):
                await run

    async def _run(self, seed: int) -> None:
        async for event in self.engine.submit(Task(str(seed), seed, inlets={"in": self._inputs(seed)})):
            if isinstance(event, Emission):
                self._emitted[seed].set()

    async def _inputs(self, seed: int) -> AsyncIterator[Packet]:
        self._opened.release()
        while True:
            yield await self._inlets[seed].get()


@pytest.fixture
async def streams() -> AsyncIterator[Streams]:
    config = stage_config("function", function="tested", options={"max_batch": 2})
    with registered(SPEAKING):
        tested = FunctionEngine(config, clock=CLOCK)
    async with started(tested) as engine:
        streams = Streams(engine)
        await streams.open(6)
        yield streams
        await streams.close()


async def test_first_chunks_run_before_the_stream_that_runs_dry_first(streams: Streams) -> None:
    await streams.say(1, 90)
    await streams.say(2, 40)
    async with streams.busy():
        await streams.queue(dict.fromkeys((1, 2, 3, 4, 5), 4))
    assert BATCHES[1:] == [[(3, 4), (4, 4)], [(5, 4)], [(2, 4), (1, 4)]]


async def test_a_stream_that_runs_dry_soon_precedes_first_chunks(streams: Streams) -> None:
    await streams.say(1, 90)
    await streams.say(2, 10)
    async with streams.busy():
        await streams.queue({1: 5, 3: 7, 2: 6})
    # First audio waits at most 6 calls of 0.25 s.
    assert BATCHES[1:] == [[(2, 6)], [(3, 7)], [(1, 5)]]


async def test_a_batch_has_calls_of_one_shape(streams: Streams) -> None:
    await streams.say(1, 90)
    await streams.say(2, 40)
    async with streams.busy():
        await streams.queue({1: 6, 2: 6, 3: 4, 4: 8, 5: 8})
    assert BATCHES[1:] == [[(3, 4)], [(4, 8), (5, 8)], [(2, 6), (1, 6)]]


async def test_a_stream_that_ran_dry_resumes_when_its_audio_arrives(streams: Streams) -> None:
    await streams.say(1, 5)
    CLOCK.now_s += 10
    await streams.say(2, 4)
    await streams.say(1, 5)
    async with streams.busy():
        await streams.queue({1: 5, 2: 6})
    assert BATCHES[1:] == [[(2, 6)], [(1, 5)]]


def test_only_audio_with_a_sample_rate_is_played() -> None:
    audio = Packet({"audio": np.zeros(15, np.float32)})
    assert AudioTensor(SPEAKING.signature).seconds([audio, audio]) == 3.0
    assert not AudioTensor(SUMMING.signature).exists
    assert AudioTensor(SUMMING.signature).seconds([Packet({"y": np.zeros(5, np.float32)})]) == 0


def test_audio_is_played_from_its_emission() -> None:
    stream = AudioStream()
    stream.add(0.0, now_s=1.0)
    assert not stream.has_begun
    stream.add(2.0, now_s=3.0)
    stream.add(0.5, now_s=3.5)
    assert stream.has_begun
    assert stream.dry_s == 5.5


def test_costs_are_averages_by_powers_of_two() -> None:
    costs = CallCosts()
    assert (costs.by_frames, costs.frame_audio_s) == ({}, 0)
    costs.add([5, 5], took_s=1.0, audio_s=0.5)
    costs.add([8], took_s=2.0, audio_s=2.5)
    costs.add([9], took_s=4.0, audio_s=2.4)
    costs.add([0], took_s=9.0, audio_s=0.0)
    assert costs.by_frames == {8: pytest.approx(1.2), 16: 4.0}
    assert costs.frame_audio_s == pytest.approx(5.4 / 27)


def test_the_first_call_of_a_shape_counts_only_until_another_is_measured() -> None:
    costs = CallCosts()
    costs.add([4], took_s=0.7, audio_s=0.4)
    assert costs.by_frames == {4: 0.7}
    costs.add([4], took_s=0.01, audio_s=0.4)
    assert costs.by_frames == {4: pytest.approx(0.01)}
    costs.add([4, 4], took_s=0.5, audio_s=0.8)
    assert costs.by_frames == {4: pytest.approx(0.01)}
    costs.add([4, 4], took_s=0.02, audio_s=0.8)
    assert costs.by_frames == {4: pytest.approx(0.012)}


async def test_the_load_contains_the_costs_of_calls(streams: Streams) -> None:
    assert streams.engine.load().call_costs_s == {}
    await streams.say(1, 3)
    await streams.say(1, 5)
    load = streams.engine.load()
    assert load.call_costs_s == {4: 0.25, 8: 0.25}
    assert (load.frame_audio_s, load.audio_delay_s) == pytest.approx((0.1, 0))


async def test_the_load_contains_the_audio_that_a_function_retains() -> None:
    async with running(DELAYING) as engine:
        for sizes in ([4, 20], [6, 3, 3], [12]):
            inputs = stream(*(np.zeros(samples) for samples in sizes))
            events = [event async for event in engine.submit(Task("1", 1, inlets={"in": inputs}))]
            emitted = [len(event.packet.tensors["audio"]) for event in events if isinstance(event, Emission)]
            assert emitted == [sizes[0] - 1, *sizes[1:], 1]
        load = engine.load()
    assert (load.frame_audio_s, load.audio_delay_s) == pytest.approx((0.1, 0.1))


def test_the_delay_is_what_first_calls_lack_of_the_mean() -> None:
    costs = CallCosts()
    costs.add_first(4, audio_s=0.75)
    costs.add([4], took_s=1.0, audio_s=0.75)
    assert costs.audio_delay_s == 0
    costs.add([4], took_s=1.0, audio_s=1.25)
    assert costs.audio_delay_s == 0.25
    costs.add_first(4, audio_s=1.5)
    assert costs.audio_delay_s == 0


@given(busy=st.integers(1, 5), ahead_s=st.floats(0, 20), samples=st.integers(1, 30))
def test_a_stream_that_is_never_urgent_progresses(busy: int, ahead_s: float, samples: int) -> None:
    # Each of the other streams calls again as soon as its call has run, so that a batch is always waiting.
    queue, now_s = CallQueue[AudioStream](), 100.0
    patient = AudioStream()
    patient.dry_s = now_s + ahead_s
    queue.add(patient, due_s=patient.dry_s, shape="other")
    for _ in range(busy):
        queue.add(AudioStream(), due_s=now_s, shape="")
    runs = 0
    while (first := queue.pop_batch(1)[0]) is not patient and runs < 10_000:
        first.add(samples / 10, now_s=now_s)
        queue.add(first, due_s=first.dry_s, shape="")
        runs += 1
    assert first is patient, "the stream with the most audio ahead has never run"


@given(st.lists(st.none() | st.tuples(st.sampled_from("abc"), st.sampled_from([0.0, 1.0, 2.5])), max_size=60))
def test_each_call_runs_once_in_the_order_of_urgency(steps: list[tuple[str, float] | None]) -> None:
    queue, waiting, popped = CallQueue[int](), dict[int, tuple[str, float]](), list[int]()
    for number, step in enumerate([*steps, *[None] * len(steps)]):
        if step is not None:
            queue.add(number, shape=step[0], due_s=step[1])
            waiting[number] = step
        elif waiting:
            by_urgency = sorted(waiting, key=lambda each: (waiting[each][1], each))
            alike = [each for each in by_urgency if waiting[each][0] == waiting[by_urgency[0]][0]]
            batch = queue.pop_batch(2)
            assert batch == alike[:2]
            popped += batch
            for each in batch:
                del waiting[each]
        assert len(queue) == len(waiting)
    assert sorted(popped) == [number for number, step in enumerate(steps) if step is not None]
