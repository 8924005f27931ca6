"""A step that resumes from a checkpoint: its caller receives the events that the first run would have sent."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace
from itertools import accumulate

import numpy as np

from stagemesh.common.errors import InvalidRequestError
from stagemesh.connectors.packets import Packet
from stagemesh.services.engines.abilities import EngineAbilities
from stagemesh.services.engines.base import Checkpoint, Emission, EngineEvent, Task, Usage
from stagemesh.services.stage.step.journal import MAX_EVENT_BYTES
from stagemesh.services.stage.step.spec import StepSpec, checkpoint_to_wire, spec_from_wire
from stagemesh.v1 import stage_pb2
from tests.rpc.call_errors import raises
from tests.stage.gated_engine import GatedEngine
from tests.stage.replicas import events_of, outputs_of, ready_runtime, stage_config, step_spec

CONFIG = stage_config(steps=5, checkpoint_steps=2)


def _checkpoints(events: list[stage_pb2.ExecuteStepResponse]) -> list[stage_pb2.Checkpoint]:
    return [event.checkpoint for event in events if event.HasField("checkpoint")]


def _resumed(checkpoint: Checkpoint, attempt: int = 2) -> StepSpec:
    plain = step_spec(attempt=attempt)
    return replace(plain, task=replace(plain.task, resume_from=checkpoint))


def _checkpoint_of(message: stage_pb2.Checkpoint) -> Checkpoint | None:
    return spec_from_wire(stage_pb2.ExecuteStepRequest(resume_from=message)).task.resume_from


async def test_a_resumed_step_continues_at_its_positions() -> None:
    async with ready_runtime(CONFIG) as runtime:
        whole = await events_of(runtime, step_spec())
        checkpoints = _checkpoints(whole)
        assert [(one.engine_steps, dict(one.outputs)) for one in checkpoints] == [(2, {"text": 40}), (4, {"text": 80})]
        first = _checkpoint_of(checkpoints[0])
        assert first is not None
        rest = await events_of(runtime, _resumed(first))
    assert outputs_of(rest) == outputs_of(whole)[2:]
    assert _checkpoints(rest) == checkpoints[1:]


async def test_outputs_that_are_not_streamed_are_not_counted() -> None:
    async with ready_runtime(CONFIG) as runtime:
        events = await events_of(runtime, step_spec(streamed=()))
    assert {one.engine_steps: dict(one.outputs) for one in _checkpoints(events)} == {2: {}, 4: {}}


def test_a_checkpoint_survives_conversion() -> None:
    checkpoint = Checkpoint(3, (7, 8, 9), outputs={"text": 2})
    assert _checkpoint_of(checkpoint_to_wire(checkpoint)) == checkpoint


async def test_a_checkpoint_past_the_end_is_rejected() -> None:
    async with ready_runtime(CONFIG) as runtime:
        with raises(InvalidRequestError, reason="INVALID_CHECKPOINT", match="the checkpoint is of step 6"):
            await events_of(runtime, _resumed(Checkpoint(6)))


class SavingEngine(GatedEngine):
    """Emits checkpoints of some sizes before it waits."""

    def __init__(self, *sizes_bytes: int) -> None:
        super().__init__()
        self._sizes_bytes = sizes_bytes

    async def submit(self, task: Task) -> AsyncGenerator[EngineEvent, None]:
        for steps, size_bytes in enumerate(self._sizes_bytes, 1):
            yield Checkpoint(steps, (steps,), {"state": np.zeros(size_bytes, np.uint8)})
        await self.gate.wait()
        yield Usage(engine_steps=len(self._sizes_bytes))


TEXT = "é🙂€e\u0301"


class ByteEngine(GatedEngine):
    """Emits each byte of a text by itself, with a checkpoint after it. Resumes after the bytes of a checkpoint."""

    abilities = EngineAbilities(can_resume=True)

    async def submit(self, task: Task) -> AsyncGenerator[EngineEvent, None]:
        begin = task.resume_from.steps if task.resume_from is not None else 0
        for at in range(begin, len(TEXT.encode())):
            yield Emission(Packet({"text": np.frombuffer(TEXT.encode()[at : at + 1], np.uint8)}))
            yield Checkpoint(at + 1, (at,))
        yield Usage(engine_steps=1)


async def test_a_text_resumes_between_any_two_characters() -> None:
    ends = list(accumulate(len(character.encode()) for character in TEXT))
    async with ready_runtime(engine=ByteEngine()) as runtime:
        whole = await events_of(runtime, step_spec())
        # A checkpoint within a character would lose the character.
        checkpoints = _checkpoints(whole)
        assert [(one.engine_steps, one.outputs["text"]) for one in checkpoints] == [(end, end) for end in ends]
        for attempt, checkpoint in enumerate(checkpoints, 2):
            rest = await events_of(
                runtime, _resumed(Checkpoint(checkpoint.engine_steps, (1,), outputs=checkpoint.outputs), attempt)
            )
            outputs = outputs_of(rest)
            assert outputs[0].position == checkpoint.engine_steps
            assert "".join(each.text for each in outputs) == TEXT.encode()[checkpoint.engine_steps :].decode()


async def test_a_later_caller_receives_the_newest_state_and_none_after_the_end() -> None:
    engine = SavingEngine(1000, 2000, 3000)
    async with ready_runtime(engine=engine) as runtime:
        async with aclosing(runtime.execute(step_spec(), time_left_s=None)) as first:
            while _state_sizes(await anext(first)) != (1, 3000):
                pass
            async with aclosing(runtime.execute(step_spec(), time_left_s=None)) as second:
                assert [_state_sizes(await anext(second)) for _ in range(4)] == [None, (0, 0), (0, 0), (1, 3000)]
            engine.gate.set()
            assert [_state_sizes(event) async for event in first] == [None, None]
        later = await events_of(runtime, step_spec())
        assert [_state_sizes(event) for event in later] == [None, *[(0, 0)] * 3, None, None]


async def test_a_large_state_is_left_out_of_its_event() -> None:
    for size_bytes, expected in ((MAX_EVENT_BYTES - 8, (1, MAX_EVENT_BYTES - 8)), (MAX_EVENT_BYTES, (0, 0))):
        async with (
            ready_runtime(engine=SavingEngine(size_bytes)) as runtime,
            aclosing(runtime.execute(step_spec(), time_left_s=None)) as events,
        ):
            assert [_state_sizes(await anext(events)) for _ in range(2)] == [None, expected]


def _state_sizes(event: stage_pb2.ExecuteStepResponse) -> tuple[int, int] | None:
    """Returns the number of tokens and of bytes in a checkpoint event; None for other events."""
    if not event.HasField("checkpoint"):
        return None
    return len(event.checkpoint.token_ids), sum(len(tensor.inline) for tensor in event.checkpoint.tensors)
