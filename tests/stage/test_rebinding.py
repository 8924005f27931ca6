"""Steps whose peers are replaced while they run, over the real data plane."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial

import pytest

from stagemesh.common.errors import NotReadyError, UnavailableError
from stagemesh.common.process.stage_process import StageConfig
from stagemesh.conformance import until
from stagemesh.connectors import peer_timeouts
from stagemesh.v1 import stage_pb2
from tests.stage.replicas import CONNECTORS, EDGE, Replica, failure_of, served_stage, stage_config, step_request

eventually = partial(until, timeout_s=10)
STEPS = 40


class Stage:
    """Replicas of one stage, started one after the other."""

    def __init__(self, config: StageConfig, stack: AsyncExitStack) -> None:
        self._config, self._stack = config, stack
        self._count = 0

    async def replica(self, **options: float) -> Replica:
        """Starts another replica."""
        name = f"{self._config.stage}-{self._count}"
        self._count += 1
        config = replace(self._config, replica=name, options={**self._config.options, **options})
        return await self._stack.enter_async_context(served_stage(config))


@dataclass
class Received:
    """The events that a caller of a step receives."""

    task: "asyncio.Task[None]"
    events: list[stage_pb2.ExecuteStepResponse]

    @property
    def text(self) -> str:
        return "".join(event.output.text for event in self.events)

    @property
    def checkpoints(self) -> list[stage_pb2.Checkpoint]:
        return [event.checkpoint for event in self.events if event.HasField("checkpoint")]

    async def outputs(self, count: int) -> None:
        """Returns once this number of events has arrived."""
        await eventually(lambda: sum(event.HasField("output") for event in self.events) >= count)


def receive(replica: Replica, request: stage_pb2.ExecuteStepRequest) -> Received:
    events: list[stage_pb2.ExecuteStepResponse] = []

    async def follow() -> None:
        async for event in replica.stub.ExecuteStep(request, timeout=30):
            events.append(event)  # noqa: PERF401 - they are read as they come

    return Received(asyncio.create_task(follow()), events)


@asynccontextmanager
async def stages(*, checkpoint_steps: int = 0) -> AsyncGenerator[tuple[Stage, Stage]]:
    async with AsyncExitStack() as stack:
        thinker = stage_config(steps=STEPS, step_s=0.02, size_bytes=200, checkpoint_steps=checkpoint_steps)
        yield Stage(thinker, stack), Stage(stage_config("talker", function="relay"), stack)


def thinking(talker: Replica, *, connector: str = "shm", attempt: int = 1) -> stage_pb2.ExecuteStepRequest:
    request = step_request(attempt=attempt)
    request.outputs.append(output(talker, connector=connector, edge=attempt))
    return request


def output(talker: Replica, *, connector: str = "shm", edge: int) -> stage_pb2.OutputBinding:
    return stage_pb2.OutputBinding(
        edge=EDGE,
        consumer=talker.runtime.config.replica,
        endpoint=talker.endpoint,
        connector=CONNECTORS[connector],
        attempt=edge,
    )


def talking(thinker: Replica, *, attempt: int = 1, transform: str = "") -> stage_pb2.ExecuteStepRequest:
    request = step_request(stage="talker", text="", attempt=attempt)
    request.inputs.append(fed_by(thinker, edge=attempt, transform=transform))
    return request


def fed_by(thinker: Replica, *, edge: int, transform: str = "") -> stage_pb2.InputBinding:
    return stage_pb2.InputBinding(edge=EDGE, producer=thinker.runtime.config.replica, attempt=edge, transform=transform)


def rebind_output(talker: Replica, *, edge: int = 2, connector: str = "shm") -> stage_pb2.RebindStepRequest:
    binding = output(talker, edge=edge, connector=connector)
    return stage_pb2.RebindStepRequest(request_id="r", step_id="r/thinker/1", outputs=[binding])


def rebind_input(thinker: Replica, *, edge: int = 2, **first_rows: int) -> stage_pb2.RebindStepRequest:
    rebinding = stage_pb2.InputRebinding(binding=fed_by(thinker, edge=edge), first_rows=first_rows)
    return stage_pb2.RebindStepRequest(request_id="r", step_id="r/talker/1", inputs=[rebinding])


async def kill(replica: Replica) -> None:
    """Closes a replica abruptly, as similar to a dead process as possible within one process."""
    await replica.server.stop(grace_s=0)
    await replica.runtime.data_plane.close()


async def accepted(received: Received) -> Received:
    """Returns what is received once the step is accepted or has failed."""
    await eventually(lambda: bool(received.events) or received.task.done())
    return received


async def connected(thinker: Replica, talker: Replica, *, outputs: int) -> tuple[Received, Received]:
    """Returns what a connected thinker and talker output, once the talker has output this much."""
    talked = await accepted(receive(talker, talking(thinker)))
    thought = receive(thinker, thinking(talker))
    await talked.outputs(outputs)
    return thought, talked


@pytest.mark.parametrize("connector", CONNECTORS)
@pytest.mark.parametrize("kills", [True, False])
async def test_a_new_consumer_receives_all_chunks_from_the_first(connector: str, *, kills: bool) -> None:
    async with stages() as (thinkers, talkers):
        thinker, first, second = await thinkers.replica(), await talkers.replica(), await talkers.replica()
        lost = await accepted(receive(first, talking(thinker)))
        thought = receive(thinker, thinking(first, connector=connector))
        await lost.outputs(5)
        if kills:
            await kill(first)
        talked = await accepted(receive(second, talking(thinker, attempt=2)))
        await thinker.stub.RebindStep(rebind_output(second, connector=connector))
        await asyncio.gather(thought.task, talked.task)
        assert talked.text == thought.text
        assert len(thought.text) == STEPS * 200
        assert thought.events[-1].finished.edges[0].chunks == STEPS
        lost.task.cancel()


async def test_a_finished_step_still_feeds_a_new_consumer() -> None:
    async with stages() as (thinkers, talkers):
        thinker, first = await thinkers.replica(step_s=0.0), await talkers.replica(step_s=0.05)
        second = await talkers.replica()
        lost = await accepted(receive(first, talking(thinker)))
        thought = receive(thinker, thinking(first))
        await thought.task
        await kill(first)
        talked = await accepted(receive(second, talking(thinker, attempt=2)))
        await thinker.stub.RebindStep(rebind_output(second))
        await talked.task
        assert talked.text == thought.text
        await eventually(lambda: all(left.is_over for left in thinker.runtime._runs._left.values()))
        await eventually(lambda: not thinker.runtime.load().arena_used_bytes)
        assert (await failure_of(thinker.stub.RebindStep(rebind_output(second, edge=3)))).reason == "UNKNOWN_STEP"
        lost.task.cancel()


@pytest.mark.parametrize("resumes", [True, False])
@pytest.mark.parametrize("kills", [True, False])
async def test_a_consumer_drops_rows_that_a_new_producer_repeats(*, kills: bool, resumes: bool) -> None:
    async with stages(checkpoint_steps=4) as (thinkers, talkers):
        first, second, talker = await thinkers.replica(), await thinkers.replica(), await talkers.replica()
        lost, talked = await connected(first, talker, outputs=11)
        if kills:
            await kill(first)
        request = thinking(talker, attempt=2)
        rows = {}
        if resumes:
            request.resume_from.CopyFrom(lost.checkpoints[1])
            rows = dict(lost.checkpoints[1].rows)
            assert rows == {"text": 8 * 200}
        await talker.stub.RebindStep(rebind_input(second, **rows))
        again = receive(second, request)
        await asyncio.gather(again.task, talked.task)
        # This thinker does not fail.
        alone = receive(await thinkers.replica(step_s=0.0), step_request())
        await alone.task
        assert talked.text == alone.text
        assert again.text == alone.text[sum(rows.values()) :]
        lost.task.cancel()


async def test_the_transform_keeps_its_state_over_a_rebinding() -> None:
    async with stages() as (thinkers, talkers):
        first, second, talker = await thinkers.replica(), await thinkers.replica(), await talkers.replica()
        talked = await accepted(receive(talker, talking(first, transform="text.sentences")))
        lost = receive(first, thinking(talker))
        await talked.outputs(3)
        await kill(first)
        rebinding = rebind_input(second)
        rebinding.inputs[0].binding.transform = "text.sentences"
        await talker.stub.RebindStep(rebinding)
        again = receive(second, thinking(talker, attempt=2))
        await asyncio.gather(again.task, talked.task)
        assert "".join(talked.text.split()) == "".join(again.text.split())
        lost.task.cancel()


async def test_a_producer_that_repeats_received_rows_only_finishes() -> None:
    async with stages() as (thinkers, talkers):
        first, second = await thinkers.replica(step_s=0.0), await thinkers.replica(step_s=0.001)
        talker = await talkers.replica(step_s=0.01)
        talked = await accepted(receive(talker, talking(first)))
        await receive(first, thinking(talker)).task
        await talker.stub.RebindStep(rebind_input(second))
        again = receive(second, thinking(talker, attempt=2))
        await asyncio.gather(again.task, talked.task)
        assert talked.text == again.text
        await eventually(lambda: not talker.runtime.data_plane.consumer._flows)
        await eventually(lambda: not second.runtime.load().arena_used_bytes)


async def test_a_rebinding_without_the_first_chunk_is_rejected() -> None:
    async with stages() as (thinkers, talkers):
        thinker, first, second = await thinkers.replica(), await talkers.replica(), await talkers.replica()
        thought, talked = await connected(thinker, first, outputs=3)
        thinker.runtime.data_plane._retention.evict_oldest()
        error = await failure_of(thinker.stub.RebindStep(rebind_output(second)))
        assert (type(error), error.reason) == (NotReadyError, "CHUNK_GONE")
        await asyncio.gather(thought.task, talked.task)
        assert talked.text == thought.text


async def test_edges_without_a_new_peer_fail_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peer_timeouts, "REBIND_S", 0.1)
    monkeypatch.setattr(peer_timeouts, "LOST_PRODUCER_S", 0.1)
    async with stages() as (thinkers, talkers):
        thinker, middle, last = await thinkers.replica(), await talkers.replica(), await talkers.replica()
        relayed = talking(middle)
        relayed.inputs[0].edge = "talker->last"
        final = await accepted(receive(last, relayed))
        request = talking(thinker)
        request.outputs.append(output(last, edge=1))
        request.outputs[0].edge = "talker->last"
        received = await accepted(receive(middle, request))
        thought = receive(thinker, thinking(middle))
        await final.outputs(3)
        await kill(middle)
        for one, reasons in ((thought, {"CONNECTION_LOST", "UNAVAILABLE", "PEER_LOST"}), (final, {"PEER_LOST"})):
            error = await failure_of(one.task)
            assert error.reason in reasons
            assert isinstance(error, UnavailableError)
        received.task.cancel()
