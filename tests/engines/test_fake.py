"""The fake engine."""

import asyncio
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from pydantic import JsonValue

from stagemesh.common.errors import InternalError, InvalidChunkError, InvalidRequestError, NotFoundError
from stagemesh.common.plugins.descriptors import EngineDescriptor
from stagemesh.common.plugins.entry_points import load_descriptor
from stagemesh.common.wire.tensors import Array, Tensors
from stagemesh.connectors.packets import Packet
from stagemesh.fake_engine import DESCRIPTOR
from stagemesh.fake_engine.engine import FakeEngine, StepClock
from stagemesh.fake_engine.options import Amount, SeededRandom
from stagemesh.fake_engine.outputs import pack, step_state, text_to_frames, unpack
from stagemesh.services.engines.base import (
    Checkpoint,
    EngineEvent,
    Finish,
    Paused,
    SamplingOptions,
    Structure,
    Task,
    Usage,
)
from tests.engines.support import collect, flow, packets, stage_config, text_of, text_stream
from tests.rpc.call_errors import raises

BOUND_S = 5


def fake(function: str = "source", **options: JsonValue) -> FakeEngine:
    return FakeEngine(stage_config("fake", function=function, options=options))


def one(kind: str, **more: JsonValue) -> JsonValue:
    """Returns the option `faults` with one fault."""
    return [{"kind": kind, **more}]


def steps_of(events: list[EngineEvent]) -> list[object]:
    return [packet.metadata["step"] for packet in packets(events)]


def made(events: list[EngineEvent]) -> list[tuple[object, list[bytes]]]:
    """Returns the emitted bytes by step."""
    return [
        (packet.metadata["step"], [each.tobytes() for each in packet.tensors.values()]) for packet in packets(events)
    ]


def all_frames(events: list[EngineEvent]) -> Array:
    return np.concatenate([packet.tensors["frames"] for packet in packets(events)])


def test_the_descriptor_is_loaded_by_name() -> None:
    assert load_descriptor(EngineDescriptor, "fake") is DESCRIPTOR


def test_an_unknown_function_error_lists_the_known_ones() -> None:
    with pytest.raises(NotFoundError, match="known: source, look, talk, relay, frames, mix, sound"):
        DESCRIPTOR.signature("sauce", {})


@pytest.mark.parametrize(
    ("options", "said"), [({"stepps": 3}, r"unknown option 'stepps'.*steps"), ({"steps": 1.5}, r"option steps is 1\.5")]
)
def test_a_wrong_option_is_named(options: dict[str, Any], said: str) -> None:
    with pytest.raises(InvalidRequestError, match=said):
        fake(**options)


async def test_a_source_repeats_its_output_for_the_same_seed() -> None:
    first, second = [await collect(fake().submit(Task("r", seed=7, prompt="hi"))) for _ in range(2)]
    assert text_of(first) == text_of(second)
    assert text_of(first) != text_of(await collect(fake().submit(Task("r", seed=8, prompt="hi"))))


async def test_max_tokens_sets_the_steps_of_a_source() -> None:
    events = await collect(fake(size_bytes=10).submit(Task("r", 0, "hi", sampling=SamplingOptions(max_tokens=2))))
    assert events[-1] == Usage(prompt_tokens=2, output_tokens=20, engine_steps=2, finish=Finish("length"))


@pytest.mark.parametrize(
    ("sampling", "text", "finish"),
    [
        (SamplingOptions(max_tokens=1), "ab", Finish("length")),
        (SamplingOptions(stop=("x", "c")), "ab", Finish("stop", stop_text="c")),
        (SamplingOptions(structure=Structure("regex", ("z",))), "zz", Finish()),
    ],
)
async def test_sampling_limits_a_talker(sampling: SamplingOptions, text: str, finish: Finish) -> None:
    events = await collect(fake("talk").submit(Task("r", 0, inlets={"in": text_stream("ab", "cd")}, sampling=sampling)))
    assert text_of(events) == text
    assert events[-1] == Usage(output_tokens=4, engine_steps=2, finish=finish)


async def test_a_relay_emits_its_input_text() -> None:
    events = await collect(fake("relay").submit(Task("r", 0, inlets={"in": text_stream("ab", "c")})))
    assert [packet.tensors["text"].tobytes() for packet in packets(events)] == [b"ab", b"c"]


async def test_there_is_one_frame_per_byte() -> None:
    events = await collect(fake("frames").submit(Task("r", 0, inlets={"in": text_stream("ab")})))
    frames = packets(events)[0].tensors["frames"]
    assert frames.shape == (2, 8)
    assert frames.dtype == np.float32


async def test_the_task_fails_at_the_configured_step() -> None:
    seen = 0
    with pytest.raises(InternalError, match="step 2"):
        async for _ in fake(fail_at_step=2).submit(Task("r", 0, "hi")):
            seen += 1
    assert seen == 5  # the usage, and an emission and a progress for each of two steps


async def test_tasks_over_the_limit_are_queued() -> None:
    engine = fake(max_running=1, step_s=0.01)
    async with aclosing(engine.submit(Task("a", 0, "hi"))) as first:
        await anext(first)
        second = asyncio.create_task(collect(engine.submit(Task("b", 0, "hi"))))
        await asyncio.sleep(0)
        assert (engine.load().running, engine.load().queued) == (1, 1)
    await second
    assert engine.load().running == 0


async def test_mix_adds_the_sum_of_the_text_to_the_frames() -> None:
    async def mixed(**tensors: bytes) -> bytes:
        data = {name: np.frombuffer(text, np.uint8) for name, text in tensors.items()}
        both = {name: text_to_frames(text) if name == "frames" else text for name, text in data.items()}
        events = await collect(fake("mix").submit(Task("r", 0, inlets={"in": flow([Packet(both)])})))
        return packets(events)[0].tensors["frames"].tobytes()

    assert await mixed(frames=b"ab") == text_to_frames(np.frombuffer(b"ab", np.uint8)).tobytes()
    assert await mixed(frames=b"ab", text=b"\x02\x01") == (text_to_frames(np.frombuffer(b"ab", np.uint8)) + 3).tobytes()
    assert await mixed(text=b"\x01") == (text_to_frames(np.frombuffer(b"\x01", np.uint8)) + 1).tobytes()


async def test_audio_stays_within_its_bounds() -> None:
    frames = flow([Packet({"frames": text_to_frames(np.frombuffer(bytes(range(256)), np.uint8))})])
    sound = packets(await collect(fake("sound").submit(Task("r", 0, inlets={"in": frames}))))[0].tensors["audio"]
    assert sound.shape == (256 * 8,)
    assert 0 <= sound.min() < sound.max() <= 1


# -- amounts


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"step_s": {"normal": 1}}, r"option step_s\.normal is 1"),
        ({"step_s": {"uniform": [2, 1]}}, "uniform must be the lower number, then the higher number"),
        ({"step_s": {}}, "give a number, or one of uniform, exponential, lognormal, one_of"),
        ({"step_s": -1}, r"option step_s\.fixed is -1"),
        ({"step_s": {"lognormal": [60, 20]}}, "lognormal's second number is a deviation of the logarithm, at most 10"),
        ({"steps": "many"}, "option steps is 'many'.*it must be a number, or one of uniform"),
        ({"faults": [{"kind": "explode"}]}, r"option faults\.0\.kind is 'explode'.*'error', 'hang'"),
        ({"faults": [{"kind": "error", "probability": 2}]}, r"option faults\.0\.probability is 2"),
        ({"faults": [{"kind": "error", "when": 2}]}, r"option faults\.0\.when is 2"),
        ({"max_running": 0}, "option max_running is 0"),
    ],
)
def test_invalid_options_are_named_when_the_pipeline_loads(options: dict[str, JsonValue], message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        DESCRIPTOR.signature("source", options)


async def test_amounts_depend_on_the_requests_seed() -> None:
    engine = fake(steps={"uniform": [2, 200]}, size_bytes={"lognormal": [100, 1.0]})
    runs = [await collect(engine.submit(Task("r", seed, "hi"))) for seed in (1, 1, 2)]
    sizes = [[packet.tensors["text"].nbytes for packet in packets(run)] for run in runs]
    assert sizes[0] == sizes[1] != sizes[2]
    assert len(sizes[0]) != len(sizes[2])
    assert len(set(sizes[0])) > 1


def test_every_draw_stays_within_its_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    highest = SimpleNamespace(digest=lambda: b"\xff" * 8)
    monkeypatch.setattr("stagemesh.fake_engine.options.hashlib.blake2b", lambda *_, **__: highest)
    assert 0 < SeededRandom(0, "a").quantile("anything") < 1
    assert SeededRandom(0, "a").draw(Amount(one_of=(1, 2)), "anything") == 2


async def test_stages_draw_different_amounts() -> None:
    config = stage_config("fake", function="source", options={"size_bytes": {"uniform": [1, 1000]}})
    engines = [FakeEngine(config), FakeEngine(replace(config, stage="other"))]
    first, second = [text_of(await collect(engine.submit(Task("r", 1, "hi")))) for engine in engines]
    assert len(first) != len(second)


def paused(times: list[float], *, keeps: bool) -> list[float]:
    """Returns the waits of steps of one second each that start at these times."""
    pace = StepClock(keeps_rate=keeps, clock=iter(times).__next__)
    return [round(pace.pause_s(1.0), 6) for _ in times]


def test_a_source_keeps_its_rate_and_does_not_catch_up_after_a_wait() -> None:
    assert paused([0.0, 1.1, 2.3, 9.4, 10.1], keeps=True) == [1.0, 0.9, 0.7, 0.6, 0.9]


def test_a_step_on_an_input_lasts_from_its_start() -> None:
    assert paused([0.0, 1.1, 2.3], keeps=False) == [1.0, 1.0, 1.0]


# -- faults


async def until_failed(
    engine: FakeEngine, seed: int = 0, *, attempt: int = 1
) -> tuple[list[EngineEvent], InternalError | None]:
    events: list[EngineEvent] = []
    submitted = engine.submit(Task("r", seed, "hi", attempt=attempt))
    try:
        while True:
            events.append(await anext(submitted))
    except InternalError as error:
        return events, error
    except StopAsyncIteration:
        return events, None


async def test_faults_depend_on_the_seed_and_never_change_outputs() -> None:
    plain, faulty = fake(), fake(faults=one("error", probability=0.3, after_steps={"uniform": [0, 3]}))
    struck = 0
    for seed in range(60):
        whole = made(await collect(plain.submit(Task("r", seed, "hi"))))
        part, error = await until_failed(faulty, seed)
        assert made(part) == whole[: len(made(part))]
        assert (error is None) == (len(made(part)) == len(whole))
        struck += error is not None
    assert 8 <= struck <= 30


async def test_a_fault_strikes_only_its_attempts() -> None:
    once, twice, always = [fake(faults=one("error", attempts=count)) for count in (1, 2, 0)]

    for engine, succeeds in ((once, [False, True, True]), (twice, [False, False, True]), (always, [False] * 3)):
        errors = [(await until_failed(engine, attempt=attempt))[1] for attempt in (1, 2, 3)]
        assert [error is None for error in errors] == succeeds


async def test_a_hang_emits_nothing_until_it_is_aborted() -> None:
    engine = fake(faults=one("hang", after_steps=1))
    async with aclosing(engine.submit(Task("r", 0, "hi"))) as events:
        for _ in range(3):
            await anext(events)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await anext(events)
    assert engine.load().running == 0


EXITING = """
import asyncio
from stagemesh.services.engines.base import Task
from tests.engines.test_fake import fake, one

async def main():
    async for event in fake(faults=one("exit", after_steps=1)).submit(Task("r", 0, "hi")):
        print(type(event).__name__, flush=True)

asyncio.run(main())
"""


def test_an_exit_ends_the_process_at_its_step() -> None:
    ended = subprocess.run([sys.executable, "-c", EXITING], capture_output=True, text=True, timeout=30, check=False)
    assert ended.returncode == -signal.SIGKILL
    assert ended.stdout.split() == ["Usage", "Emission", "Progress"]


async def test_a_slow_task_emits_the_same_outputs_later() -> None:
    loop, slow = asyncio.get_running_loop(), fake(faults=one("slow", after_steps=2, slow_s=0.05))
    began_s = loop.time()
    events = await collect(slow.submit(Task("r", 0, "hi")))
    assert loop.time() - began_s >= 0.1
    assert text_of(events) == text_of(await collect(fake().submit(Task("r", 0, "hi"))))


@pytest.mark.parametrize(("max_steps", "steps"), [(None, [0, 2, 1, 3]), (2, [0, 1])])
async def test_a_disorder_swaps_two_outputs(max_steps: int | None, steps: list[int]) -> None:
    task = Task("r", 0, "hi", max_steps=max_steps)
    events = await collect(fake(faults=one("disorder", after_steps=1)).submit(task))
    assert steps_of(events) == steps
    assert isinstance(events[-1], Paused) == (max_steps is not None)


async def test_a_consumer_rejects_inputs_out_of_order() -> None:
    disordered = flow(Packet({"text": np.frombuffer(b"x", np.uint8)}, {"step": step}) for step in (0, 2, 1))
    with raises(InvalidChunkError, reason="OUT_OF_ORDER", match="output of step 1 arrived after that of step 2"):
        await collect(fake("relay").submit(Task("r", 0, inlets={"in": disordered})))


# -- pausing and resuming


def fed(function: str, **more: object) -> Task:
    """Returns a task with four inputs, or with a prompt for a source."""
    fed_by_edge = Task("r", 3, inlets={"in": text_stream("ab", "c", "de", "f")})
    return replace(Task("r", 3, "hi") if function == "source" else fed_by_edge, **more)  # type: ignore[arg-type]


@pytest.mark.parametrize("function", ["source", "relay", "frames"])
async def test_a_paused_task_resumes_where_it_stopped(function: str) -> None:
    whole = await collect(fake(function).submit(fed(function)))
    events = await collect(fake(function).submit(fed(function, max_steps=1)))
    parts = made(events)
    while isinstance(paused := events[-1], Paused):
        events = await collect(
            fake(function).submit(fed(function, max_steps=1, resume_from=paused.checkpoint, inlets={}))
        )
        parts += made(events)
    assert isinstance(events[-1], Usage)
    assert parts == made(whole)


@pytest.mark.parametrize("function", ["source", "relay", "frames"])
async def test_a_new_attempt_skips_outputs_before_its_checkpoint(function: str) -> None:
    whole = await collect(fake(function, checkpoint_steps=2).submit(fed(function)))
    checkpoint = next(event for event in whole if isinstance(event, Checkpoint))
    rest = await collect(fake(function).submit(fed(function, resume_from=checkpoint, attempt=2)))
    assert steps_of(whole) == [0, 1, 2, 3]
    assert steps_of(rest) == [2, 3]


@pytest.mark.parametrize("rows", [1, 3, 4])
async def test_a_new_attempt_resumes_at_a_row_however_inputs_are_cut(rows: int) -> None:
    whole = all_frames(await collect(fake("frames").submit(fed("frames"))))
    checkpoint = Checkpoint(1, tensors=step_state(1), rows={"frames": rows})
    rest = await collect(fake("frames").submit(fed("frames", resume_from=checkpoint, attempt=2)))
    assert np.array_equal(all_frames(rest), whole[rows:])


async def test_a_checkpoint_with_more_rows_than_the_task_emits_is_rejected() -> None:
    checkpoint = Checkpoint(1, tensors=step_state(1), rows={"frames": 1_000_000})
    with raises(InvalidRequestError, reason="INVALID_CHECKPOINT"):
        await collect(fake("frames").submit(fed("frames", resume_from=checkpoint, attempt=2)))


def test_packed_inputs_unpack_unchanged() -> None:
    def contents(inputs: Sequence[Tensors]) -> list[object]:
        return [{name: (tensor.tobytes(), tensor.shape) for name, tensor in each.items()} for each in inputs]

    empty, text = np.zeros(0, np.uint8), np.frombuffer(b"ab", np.uint8)
    frames = text_to_frames(text)
    inputs: list[Tensors] = [{"text": text}, {"frames": frames}, {"text": empty, "frames": frames}]
    assert contents(unpack(pack(inputs))) == contents(inputs)


async def test_a_task_resumed_at_its_end_emits_nothing() -> None:
    events = await collect(fake().submit(Task("r", 3, "hi", resume_from=Checkpoint(4))))
    assert [type(event) for event in events] == [Usage, Usage]


async def test_the_estimated_work_decreases_with_each_step() -> None:
    engine = fake(steps=4, step_s=0.01)
    left = [round(engine.load().work_s or 0.0, 3) async for _ in engine.submit(Task("r", 0, "hi"))]
    assert left == [0.04, 0.03, 0.03, 0.02, 0.02, 0.01, 0.01, 0.0, 0.0, 0.0]
    assert not engine.load().running


async def test_configured_memory_is_allocated() -> None:
    engine = fake(memory_bytes=1 << 20)
    await engine.start(print)
    assert engine._memory.nbytes == 1 << 20
    await engine.close()
    assert engine._memory.nbytes == 0
