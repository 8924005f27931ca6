"""Simulated replicas that forward rows, follow the rules of recovery exactly, and die on request. All run in one
process by the event loop's clock, so that hours of virtual time take a moment.
"""

import asyncio
import itertools
import random
from collections import defaultdict
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from copy import copy
from dataclasses import dataclass, field
from typing import cast

from google.protobuf.message import Message

from stagemesh.common.errors import (
    CancelledRequestError,
    ExistsError,
    NotFoundError,
    NotReadyError,
    StagemeshError,
    StaleAttemptError,
    UnavailableError,
    UnsupportedError,
)
from stagemesh.common.notification import Notifier
from stagemesh.connectors.packets import ConsumerAddress
from stagemesh.connectors.stream.connector_agreement import EdgeProbe
from stagemesh.orchestrator.fleet.membership import Member, MembershipListener
from stagemesh.orchestrator.fleet.replica_client import ReplicaClient, Verdict
from stagemesh.orchestrator.fleet.replica_loss import REPLICA_LOST
from stagemesh.pipeline import Pipeline
from stagemesh.v1 import request_pb2, stage_pb2
from tests.orchestrator.replicas import ready_description
from tests.orchestrator.scripted_stage import tensors_of

ROW_S = 0.1
"""Seconds to make a row."""
_TENSOR = "text"
_UNSENT = "unsent"
"""A tensor that no edge carries."""
START_S = 1.0
"""Seconds from a death of a process to its restart."""
FAILED_S = 0.05
"""Seconds from a death of an engine to the death of its process."""


class World:
    """The replicas of a pipeline and the flows between them, for one request at a time."""

    def __init__(self, pipeline: Pipeline, *, rows: int = 5, checkpoints: bool = False) -> None:
        self.pipeline, self.rows, self.checkpoints = pipeline, rows, checkpoints
        self.replicas_of_each = 1
        """The number of replicas of each stage."""
        self.keeps = True
        """Whether producers retain their first chunks."""
        self.delay_s = 0.0
        """Seconds for which each call is on its way."""
        self.faults: random.Random | None = None
        """Decides which calls arrive late or twice, and which connections break. None if the network is faultless."""
        self.replicas: dict[str, SimulatedReplica] = {}
        self.generations: dict[str, str] = {}
        """The generations of replicas that do not have that of the pipeline, by replica."""
        self.changed = Notifier()
        self.on_row: Callable[[Step], None] = lambda _: None
        """Called before a step makes a row."""
        self.made: defaultdict[str, int] = defaultdict(int)
        """The total number of rows made, by stage."""

    def connect(self, member: Member) -> ReplicaClient:
        """Starts the process of a member, if it does not run, and returns its client."""
        if member.name not in self.replicas:
            self.replicas[member.name] = SimulatedReplica(member, self)
        return cast("ReplicaClient", self.replicas[member.name])


@dataclass
class Inlet:
    """The rows that a step gets from a producer."""

    producer: str
    attempt: int
    begins: int = 0
    """The first row of the present flow."""
    taken: int = 0


@dataclass(eq=False)
class Step:
    """One attempt of a stage."""

    replica: "SimulatedReplica"
    request: stage_pb2.ExecuteStepRequest
    begins: int
    made: int
    inlets: dict[str, Inlet]
    outlets: dict[str, stage_pb2.OutputBinding]
    events: list[stage_pb2.ExecuteStepResponse] = field(default_factory=list[stage_pb2.ExecuteStepResponse])
    finished: bool = False
    over: bool = False
    error: StagemeshError | None = None
    callers: int = 0

    def emit(self, **event: object) -> None:
        self.events.append(stage_pb2.ExecuteStepResponse(**event))  # type: ignore[arg-type]
        self.replica.world.changed.fire()


class SimulatedReplica:
    """One process, and its ReplicaClient."""

    def __init__(self, member: Member, world: World) -> None:
        self.member, self.world = member, world
        generation = world.generations.get(member.name, "")
        self.description = ready_description(member.stage, pipeline=world.pipeline, generation=generation)
        self.description.replica, self.description.incarnation = member.name, "life 0"
        self.deaths = 0
        self.dead = self.cut = self.fails = self.is_doubted = False
        self.steps: dict[str, Step] = {}
        self.attempts: dict[str, int] = {}
        """The highest attempt of each request."""
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self.calls: list[stage_pb2.ExecuteStepRequest] = []
        self.rebinds: list[stage_pb2.RebindStepRequest] = []

    # -- faults

    def die(self) -> None:
        """Kills the process. It restarts after START_S."""
        if self.dead:
            return
        self.dead = True
        self.deaths += 1
        self._drop()
        self.world.changed.fire()
        asyncio.get_running_loop().call_later(START_S, self._restart)

    def fail(self) -> None:
        """Kills the engine. Its steps fail at once, and the process dies after FAILED_S."""
        self.fails = True
        self.world.changed.fire()
        asyncio.get_running_loop().call_later(FAILED_S, self.die)

    def pause_steps(self) -> None:
        """Pauses all steps, as a drain does."""
        for step_id, step in self.steps.items():
            self.tasks[step_id].cancel()
            step.emit(paused=stage_pb2.StepPaused(checkpoint=self._checkpoint(step, _TENSOR)))
            step.over = True

    async def sever(self, for_s: float) -> None:
        """Makes the process unreachable for a while. It keeps running."""
        self.cut = True
        self.world.changed.fire()
        await asyncio.sleep(for_s)
        self.cut = False

    def _drop(self) -> None:
        for step in self.steps.values():
            step.over = True
        self.steps.clear()
        self.attempts.clear()
        for task in self.tasks.values():
            task.cancel()
        self.tasks.clear()

    def _restart(self) -> None:
        self.dead = self.fails = False
        self.description.incarnation = f"life {self.deaths}"

    def _check(self) -> None:
        if self.dead or self.cut:
            raise UnavailableError(f"{self.member.name} is out of reach", reason=REPLICA_LOST)

    # -- ReplicaClient

    async def describe(self, *, timeout_s: float) -> stage_pb2.DescribeResponse:
        self._check()
        description = stage_pb2.DescribeResponse()
        description.CopyFrom(self.description)
        return description

    async def wait_while_serving(self) -> None:
        incarnation, self.is_doubted = self.description.incarnation, False
        while self.description.state == stage_pb2.REPLICA_STATE_READY:
            self._check()
            if self.is_doubted or self.description.incarnation != incarnation:
                raise UnavailableError("the watch was ended", reason=REPLICA_LOST)
            await self.world.changed.wait()

    def end_health_watch(self) -> None:
        self.is_doubted = True
        self.world.changed.fire()

    async def watch_load(self, verdict: Verdict) -> AsyncGenerator[stage_pb2.WatchLoadResponse]:
        while True:
            self._check()
            yield stage_pb2.WatchLoadResponse(running=len(self.steps))
            await asyncio.sleep(1.0)

    async def is_port_closed(self) -> bool:
        return self.dead

    async def close(self) -> None:
        """Does nothing: the process and its steps outlive the orchestrators that call it."""

    # -- ReplicaClient: steps

    async def execute(
        self,
        request: stage_pb2.ExecuteStepRequest,
        *,
        timeout_s: float,
        take: Callable[[stage_pb2.ExecuteStepResponse], None],
    ) -> None:
        await self._delay()
        self._check()
        self.calls.append(request)
        step = self._find(request) or self._begin(request)
        self._break(0.2)
        step.callers += 1
        try:
            await self._replay(step, take)
        finally:
            step.callers -= 1

    def _find(self, request: stage_pb2.ExecuteStepRequest) -> Step | None:
        """Returns the step of a repeated call. None if the call starts a step."""
        latest = {"attempt": self.attempts.get(request.request_id, 0)}
        if request.attempt < latest["attempt"]:
            raise StaleAttemptError(f"attempt {request.attempt} was replaced", facts=latest)
        step = self.steps.get(request.step_id)
        if step is None and request.attach_only:
            raise NotFoundError(f"no step {request.step_id}", reason="UNKNOWN_STEP")
        content = stage_pb2.ExecuteStepRequest()
        content.CopyFrom(request)
        content.attach_only, content.lowest_attempt = False, 0
        if step is not None and step.request != content:
            raise ExistsError(f"step {request.step_id} has other content", reason="STEP_EXISTS", facts=latest)
        return step

    async def _replay(self, step: Step, take: Callable[[stage_pb2.ExecuteStepResponse], None]) -> None:
        for position in itertools.count():
            while len(step.events) <= position:
                self._check()
                if self.fails:
                    raise UnavailableError(f"{self.member.name}: the engine died", reason="ENGINE_DIED")
                if step.error is not None:
                    raise copy(step.error)
                if step.over:
                    return
                await self.world.changed.wait()
            self._check()
            self._break(0.03)
            # A copy, because an orchestrator changes events, and another one may receive them, too.
            event = stage_pb2.ExecuteStepResponse()
            event.CopyFrom(step.events[position])
            take(event)

    async def cancel(self, request: stage_pb2.CancelStepRequest, *, timeout_s: float) -> stage_pb2.CancelStepResponse:
        await self._deliver(lambda: self._cancel(request))
        return stage_pb2.CancelStepResponse()

    async def rebind(self, request: stage_pb2.RebindStepRequest, *, timeout_s: float) -> None:
        await self._deliver(lambda: self._rebind(request))

    async def _delay(self) -> None:
        await asyncio.sleep(self.world.delay_s)
        if self.world.faults is not None:
            await asyncio.sleep(self.world.faults.choice([0.0, 0.0, 0.05, 1.0]))

    def _break(self, probability: float) -> None:
        if self.world.faults is not None and self.world.faults.random() < probability:
            raise UnavailableError(f"the connection to {self.member.name} broke", reason=REPLICA_LOST)

    async def _deliver(self, arrive: Callable[[], None]) -> None:
        """Delivers a call and its answer. On a faulty network, a copy may arrive later, even if the caller has left."""
        if self.world.faults is not None and self.world.faults.random() < 0.3:
            asyncio.get_running_loop().call_later(3.0 * self.world.faults.random(), self._arrive_again, arrive)
        await self._delay()
        self._break(0.1)
        arrive()
        self._break(0.1)

    def _arrive_again(self, arrive: Callable[[], None]) -> None:
        with suppress(StagemeshError):
            arrive()

    def _cancel(self, request: stage_pb2.CancelStepRequest) -> None:
        self._check()
        for step_id, step in list(self.steps.items()):
            if step.callers and request.when_left:
                continue
            if step.request.request_id == request.request_id and step.request.attempt <= request.attempt:
                self.end_step(step_id, CancelledRequestError("it was cancelled"))

    def end_step(self, step_id: str, error: StagemeshError) -> None:
        """Ends a step that runs. Its callers receive `error`."""
        self.tasks.pop(step_id).cancel()
        step = self.steps.pop(step_id)
        step.over, step.error = True, error
        self.world.changed.fire()

    def _rebind(self, request: stage_pb2.RebindStepRequest) -> None:
        self._check()
        self.rebinds.append(request)
        step = self.steps.get(request.step_id)
        if step is None:
            raise NotFoundError(f"no step {request.step_id}", reason="UNKNOWN_STEP")
        bound = {edge: end.attempt for edge, end in step.inlets.items()}
        bound |= {edge: end.attempt for edge, end in step.outlets.items()}
        wanted = {each.binding.edge: each.binding.attempt for each in request.inputs}
        wanted |= {each.edge: each.attempt for each in request.outputs}
        if self.world.faults is not None and all(bound.get(edge) == attempt for edge, attempt in wanted.items()):
            # A copy of an earlier call.
            return
        if self.world.faults is not None and any(attempt < bound.get(edge, 0) for edge, attempt in wanted.items()):
            raise StaleAttemptError("an edge is bound in a later attempt", metadata={"edge": next(iter(wanted))})
        for each in request.inputs:
            assert each.first_rows.keys() <= {_TENSOR}, "an edge knows its own tensors"
            if step.inlets[each.binding.edge].taken < each.first_rows[_TENSOR] and not step.finished:
                raise NotReadyError("rows would be left out", reason="ROWS_MISSING")
        if request.outputs and not self.world.keeps:
            raise NotReadyError("the first chunk is gone", reason="CHUNK_GONE")
        for each in request.inputs:
            inlet = step.inlets[each.binding.edge]
            assert each.binding.attempt > inlet.attempt, "a flow has a name of its own"
            step.inlets[each.binding.edge] = Inlet(
                each.binding.producer, each.binding.attempt, each.first_rows[_TENSOR], inlet.taken
            )
        for target in request.outputs:
            assert not step.begins, "a new consumer needs every row"
            step.outlets[target.edge] = target
        self.world.changed.fire()

    async def probe_edge(self, edge: str, consumer: ConsumerAddress, *_: object, **__: object) -> EdgeProbe:
        return EdgeProbe("shm", {})

    async def control(self, request: Message, response: type[Message], *, timeout_s: float) -> Message:
        raise UnsupportedError(f"no {request.DESCRIPTOR.name} here")

    # -- the work of a step

    def _begin(self, request: stage_pb2.ExecuteStepRequest) -> Step:
        begins = request.resume_from.rows[_TENSOR] if request.HasField("resume_from") else 0
        inlets = {each.edge: Inlet(each.producer, each.attempt) for each in request.inputs}
        outlets = {each.edge: each for each in request.outputs}
        step = Step(self, request, begins, begins, inlets, outlets)
        for target in request.outputs if self.world.faults is None else ():
            self._check_expected(step, target)
        for former in self.steps_of(request.request_id):
            self.end_step(former.request.step_id, StaleAttemptError("a later attempt has taken over"))
        self.attempts[request.request_id] = request.attempt
        self.steps[request.step_id] = step
        self.tasks[request.step_id] = asyncio.create_task(self._work(step))
        return step

    def _check_expected(self, step: Step, target: stage_pb2.OutputBinding) -> None:
        consumer = self.world.replicas[target.consumer]
        if consumer.dead:
            return
        expected = [
            each.inlets[target.edge]
            for each in consumer.steps_of(step.request.request_id)
            if target.edge in each.inlets and each.inlets[target.edge].attempt == target.attempt
        ]
        assert expected, f"{target.consumer} does not expect edge {target.edge} in attempt {target.attempt}"
        assert expected[0].producer == self.member.name
        assert expected[0].begins == step.begins

    def steps_of(self, request_id: str) -> list[Step]:
        """Returns the steps of one request, or of one of its choices."""
        return [step for step in self.steps.values() if step.request.request_id == request_id]

    async def _work(self, step: Step) -> None:
        world = self.world
        step.emit(accepted=stage_pb2.StepAccepted())
        while step.made < world.rows:
            while not all(self._take(step, edge) > step.made for edge in step.inlets):
                await world.changed.wait()
            world.on_row(step)
            await asyncio.sleep(ROW_S)
            for name in tensors_of(step.request):
                text = self._text(step.made)
                step.emit(output=request_pb2.Output(name=name, text=text, position=self._length(step.made)))
            step.made += 1
            world.made[self.member.stage] += 1
            step.emit(progress=stage_pb2.StepProgress(engine_steps=step.made))
            if world.checkpoints:
                step.emit(checkpoint=self._checkpoint(step, _TENSOR, _UNSENT))
        while not all(self._has_arrived(step, target) for target in list(step.outlets.values())):
            await world.changed.wait()
        step.finished = True
        step.emit(finished=stage_pb2.StepFinished(usage=request_pb2.Usage(engine_steps=step.made)))
        step.over = True

    def _checkpoint(self, step: Step, *tensors: str) -> stage_pb2.Checkpoint:
        rows = dict.fromkeys(tensors, step.made)
        outputs = dict.fromkeys(tensors_of(step.request), self._length(step.made))
        return stage_pb2.Checkpoint(engine_steps=step.made, token_ids=[1], rows=rows, outputs=outputs)

    def _text(self, row: int) -> str:
        return f"{self.member.stage}{row}é🙂 "

    def _length(self, rows: int) -> int:
        """Returns the length of the text of this number of rows, in bytes of UTF-8."""
        return sum(len(self._text(row).encode()) for row in range(rows))

    def _take(self, step: Step, edge: str) -> int:
        """Takes the rows that have been made. Returns the number of rows taken in all."""
        inlet = step.inlets[edge]
        for producer in self.world.replicas[inlet.producer].steps_of(step.request.request_id):
            target = producer.outlets.get(edge)
            if target is not None and (target.attempt, target.consumer) == (inlet.attempt, self.member.name):
                assert inlet.begins == producer.begins
                if producer.made > inlet.taken:
                    inlet.taken = producer.made
                    self.world.changed.fire()
        return inlet.taken

    def _has_arrived(self, step: Step, target: stage_pb2.OutputBinding) -> bool:
        return any(
            consumer.inlets[target.edge].attempt == target.attempt
            and (consumer.finished or self.world.replicas[target.consumer]._take(consumer, target.edge) >= step.made)
            for consumer in self.world.replicas[target.consumer].steps_of(step.request.request_id)
            if target.edge in consumer.inlets
        )


class Members:
    """A source with `count` members of each stage."""

    def __init__(self, pipeline: Pipeline, count: int) -> None:
        self._members = [
            Member(stage, f"h:{stage}-{number}", f"{stage}-{number}")
            for stage in pipeline.stages
            for number in range(count)
        ]

    async def follow(self, listener: MembershipListener) -> None:
        for member in self._members:
            listener.join(member)
