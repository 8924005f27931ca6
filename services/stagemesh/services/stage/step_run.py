"""One step's run: from its order to the end of its flows."""

import asyncio
import logging
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import replace

from stagemesh.connectors.base import EdgeKey, Inlet, Outlet, Packet
from stagemesh.connectors.data_plane import DataPlane
from stagemesh.connectors.errors import (
    CancelledRequestError,
    DeadlineError,
    InternalError,
    InvalidRequestError,
    StagemeshError,
)
from stagemesh.services.engines.base import Checkpoint, Emission, Engine, Paused, Progress, Task, Usage
from stagemesh.services.serving.journal import Journal
from stagemesh.services.serving.logs import bind_log_context
from stagemesh.services.serving.plugins import Signature
from stagemesh.services.stage.events import Accepted, Finished, StepEvent
from stagemesh.services.stage.feed import Feed, make_transform
from stagemesh.services.stage.order import STATE_EDGE, StepOrder
from stagemesh.services.stage.outputs import StreamedOutputs
from stagemesh.services.stage.paused import size_bytes, told
from stagemesh.services.stage.reports import FlowReport, StepReport
from stagemesh.services.stage.selection import selection_of, tokens_of, wanted_of
from stagemesh.services.stage.stopwatch import Stopwatch

_log = logging.getLogger(__name__)


class StepRun:
    """Runs an order on the engine, between its inlets and its outlets, and tells its journal.

    `start` once; whoever starts it awaits `ended`. The journal closes when the engine has let go.
    """

    def __init__(
        self,
        order: StepOrder,
        *,
        engine: Engine,
        data_plane: DataPlane,
        signature: Signature,
        where: Mapping[str, str],
        on_state: Callable[[str, Checkpoint], None],
    ) -> None:
        """`on_state` is told each state that the request can go on from."""
        self.order = order
        self.journal = Journal[StepEvent](on_abandoned=self._abandoned)
        self._engine, self._data_plane, self._signature = engine, data_plane, signature
        self._where = {**where, "request_id": order.request_id}
        resume_from = order.task.resume_from
        self._outputs = StreamedOutputs(
            order.streamed, signature.emits, made=resume_from.outputs if resume_from is not None else None
        )
        self.paused: Checkpoint | None = None
        """Where it was left, once it has ended there."""
        self.failed = False
        """Whether it has ended by an error."""
        self._checkpoint_bytes = 0
        self._inlets: dict[str, Inlet] = {}
        self._outlets = data_plane.fan_out()
        self._state_outlet: Outlet | None = None
        self._on_state = on_state
        self._stopwatch = Stopwatch()
        self._usage = Usage()
        self._timer: asyncio.TimerHandle | None = None
        self._cause: StagemeshError | None = None
        self._task: asyncio.Task[None] | None = None
        self._interruptible = False

    @property
    def running(self) -> bool:
        """Whether it has not ended yet."""
        return not self.journal.closed

    @property
    def kept_bytes(self) -> int:
        """What its outputs and checkpoints take in memory."""
        return self._outputs.size_bytes + self._checkpoint_bytes

    @property
    def report(self) -> StepReport:
        """Where it stands now."""
        order = self.order
        producers = {binding.edge: binding.producer for binding in order.inputs}
        consumers = {target.edge: target.consumer for target in order.outputs}
        standings = self._outlets.standings
        return StepReport(
            request_id=order.request_id,
            step_id=order.step_id,
            attempt=order.attempt,
            age_s=self._stopwatch.age_s,
            started=self._stopwatch.started,
            inlets=tuple(FlowReport(producers[edge], inlet.standing) for edge, inlet in self._inlets.items()),
            outlets=tuple(FlowReport(consumers[standing.edge], standing) for standing in standings),
        )

    def start(self, *, deadline_s: float | None, on_ended: Callable[["StepRun"], None]) -> None:
        """Begins. `deadline_s` is in the event loop's time, None for none."""
        self._set_deadline(deadline_s)
        self._task = asyncio.create_task(self._run(on_ended), name=f"step {self.order.step_id}")

    def extend(self, *, deadline_s: float | None) -> None:
        """Lets a caller that came later wait longer than those before."""
        if self._timer is not None and (deadline_s is None or deadline_s > self._timer.when()):
            self._set_deadline(deadline_s)

    def stop(self, cause: StagemeshError) -> None:
        """Has the run end with `cause` within one engine step; an earlier cause stands."""
        assert self._task is not None, "start comes first"
        if self._cause is None and self.running:
            self._cause = cause
            if self._interruptible:
                self._task.cancel()

    async def ended(self) -> None:
        """Returns when the engine has let go and the journal is closed. Never raises the run's error."""
        assert self._task is not None, "start comes first"
        await asyncio.wait([self._task])

    def _abandoned(self) -> None:
        self.stop(CancelledRequestError("every caller of the step has gone"))

    def _set_deadline(self, deadline_s: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        error = DeadlineError("the deadline passed while the step ran; allow more time, or ask for less")
        loop = asyncio.get_running_loop()
        self._timer = loop.call_at(deadline_s, self.stop, error) if deadline_s is not None else None

    async def _run(self, on_ended: Callable[["StepRun"], None]) -> None:
        bind_log_context(**self._where)
        error = await self._outcome()
        self.failed = error is not None
        if error is not None:
            # A copy: one cause may end several runs.
            error = copy(error).located(**self._where)
        await self._let_go(error)
        self.journal.close(error)
        on_ended(self)

    async def _outcome(self) -> StagemeshError | None:
        """Executes, and returns what it failed with: the one place where whatever an engine raises gets its name."""
        try:
            await self._execute()
        except StagemeshError as exc:
            return exc
        except asyncio.CancelledError:
            return self._cause or CancelledRequestError("the stage is shutting down")
        except Exception as exc:  # noqa: BLE001
            _log.exception("the engine failed in a way that it does not name")
            return InternalError(f"the engine failed: {type(exc).__name__}: {exc}")
        finally:
            self._interruptible = False
        return None

    async def _execute(self) -> None:
        self._raise_cause()
        self._interruptible = True
        self._open_edges()
        self.journal.append(Accepted(self._engine.load().queued))
        if not self._inlets:
            self._stopwatch.start()
        order = self.order
        await self._compute(
            replace(
                order.task,
                inlets={edge: self._feed(edge) for edge in self._inlets if edge != STATE_EDGE},
                apart=frozenset(binding.edge for binding in order.inputs if binding.apart),
                resume_from=await self._resumed_from(),
                wanted=wanted_of(order),
                tokens=tokens_of(order, self._signature),
                deadline_s=self._timer.when() if self._timer is not None else None,
            )
        )
        await self._finish()

    async def _resumed_from(self) -> Checkpoint | None:
        """Where the task goes on; its state may come over an edge."""
        resume_from = self.order.task.resume_from
        if resume_from is None or STATE_EDGE not in self._inlets:
            return resume_from
        packets = [packet async for packet in self._inlets[STATE_EDGE]]
        steps = packets[0].metadata.get("steps") if len(packets) == 1 else None
        if steps != resume_from.steps:
            raise InvalidRequestError(
                f"edge {STATE_EDGE} brought a state after {steps} steps; resume_from says {resume_from.steps}",
                reason="INVALID_CHECKPOINT",
            )
        return replace(resume_from, tensors=packets[0].tensors)

    async def _compute(self, task: Task) -> None:
        events = self._engine.submit(task)
        try:
            async for event in events:
                if isinstance(event, Emission):
                    self._tell(event)
                    if self.order.outputs:
                        await self._outlets.send(event.packet)
                elif isinstance(event, Progress):
                    self.journal.append(event)
                elif isinstance(event, Checkpoint):
                    self._keep(event)
                elif isinstance(event, Paused):
                    self.paused = replace(event.checkpoint, outputs=self._outputs.made)
                else:
                    self._usage = event
        finally:
            # An engine that lets go is not to be broken into.
            self._interruptible = False
            await events.aclose()
            self._interruptible = True
        self._raise_cause()

    def _raise_cause(self) -> None:
        """For a stop that came where it could not break in."""
        if self._cause is not None:
            raise self._cause

    def _open_edges(self) -> None:
        order, plane = self.order, self._data_plane
        for binding in order.inputs:
            key = EdgeKey(order.request_id, binding.edge, order.attempt)
            self._inlets[binding.edge] = plane.open_inlet(key, producer=binding.producer)
        for target in order.outputs:
            outlet = plane.open_outlet(
                EdgeKey(order.request_id, target.edge, order.attempt),
                endpoint=target.endpoint,
                consumer=target.consumer,
                connector=target.connector,
                policy=target.policy,
            )
            if target.edge == STATE_EDGE:
                self._state_outlet = outlet
            else:
                self._outlets.add(outlet, selection_of(target))

    def _feed(self, edge: str) -> Feed:
        transform = next(binding.transform for binding in self.order.inputs if binding.edge == edge)
        return Feed(
            self._inlets[edge],
            edge=edge,
            accepts=self._signature.accepts,
            transform=make_transform(transform),
            on_first=self._stopwatch.start,
        )

    def _tell(self, emission: Emission) -> None:
        """The client first: what it hears does not wait for the credit of an edge."""
        self._stopwatch.first_output()
        for output in self._outputs.push(emission.packet, emission.logprobs):
            self.journal.append(output)

    def _keep(self, checkpoint: Checkpoint) -> None:
        """What was emitted before a checkpoint is made by it; the rest is to come after it."""
        state = replace(checkpoint, outputs=self._outputs.made)
        if told(state) is not state:
            self._on_state(self.order.request_id, state)
        self._checkpoint_bytes += size_bytes(told(state))
        self.journal.append(told(state))

    async def _finish(self) -> None:
        for output in self._outputs.finish():
            self.journal.append(output)
        if self.paused is not None:
            await self._send_state(self.paused)
            self.journal.append(Paused(told(self.paused)))
            return
        await self._outlets.finish()
        edges = self._outlets.usages
        self.journal.append(Finished(self._usage, self._stopwatch.timings(), edges))

    async def _send_state(self, state: Checkpoint) -> None:
        self._on_state(self.order.request_id, state)
        if self._state_outlet is not None:
            await self._state_outlet.send(Packet(state.tensors, {"steps": state.steps}))
            await self._state_outlet.finish()

    async def _let_go(self, error: StagemeshError | None) -> None:
        if error is not None:
            await self._outlets.abort(error)
        if self._state_outlet is not None and (error is not None or self.paused is None):
            ended = InvalidRequestError("the request ran to its end, and left no state", reason="NOT_PAUSED")
            await self._state_outlet.abort(error or ended)
        self._state_outlet = None
        await asyncio.gather(*(inlet.aclose() for inlet in self._inlets.values()))
        self._set_deadline(None)
        # The run is kept for callers that attach again; they need the journal alone. A cause that was raised
        # holds on to the frames that it came through, and so to a packet and its lease.
        self._inlets, self._outlets, self._cause = {}, self._data_plane.fan_out(), None
        self.order = replace(self.order, task=Task(self.order.request_id, self.order.task.seed))
