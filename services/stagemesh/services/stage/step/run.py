"""One step's run: from its order to the end of its flows."""

import asyncio
import itertools
import logging
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import replace

from stagemesh.common.descriptors import Signature
from stagemesh.common.errors import (
    CancelledRequestError,
    DeadlineError,
    InternalError,
    InvalidRequestError,
    StagemeshError,
    UnavailableError,
)
from stagemesh.common.journal import Journal
from stagemesh.common.logs import bind_log_context
from stagemesh.connectors.data_plane import DataPlane
from stagemesh.connectors.edge import Packet
from stagemesh.connectors.flow.inlet import Inlet
from stagemesh.connectors.flow.packet_queue import add_rows
from stagemesh.services.engines.base import Checkpoint, Emission, Engine, Paused, PauseRequest, Progress, Task, Usage
from stagemesh.services.stage.replica.paused_states import place_of, size_bytes, told
from stagemesh.services.stage.step.edge_input import EdgeInput, make_transform
from stagemesh.services.stage.step.edges import StepEdges
from stagemesh.services.stage.step.events import Accepted, Finished, StepEvent
from stagemesh.services.stage.step.outputs import StreamedOutputs
from stagemesh.services.stage.step.progress_pace import ProgressPace
from stagemesh.services.stage.step.reports import StepReport
from stagemesh.services.stage.step.selection import rows_are_those_of_edges, tokens_of, wanted_of
from stagemesh.services.stage.step.spec import STATE_EDGE, Rebinding, StepSpec
from stagemesh.services.stage.step.stopwatch import Stopwatch

_log = logging.getLogger(__name__)

ABANDON_S = 5.0
"""How long a run goes on without a caller."""

_numbers = itertools.count(1)


def handed_on(where: Mapping[str, str]) -> UnavailableError:
    """What a step ends with that is to go on elsewhere."""
    return UnavailableError(
        f"replica {where['replica']} of stage {where['stage']} is drained, and hands on what it runs",
        reason="DRAINED",
        metadata=where,
    )


class StepRun:
    """Runs an order on the engine, between its inlets and its outlets, and tells its journal.

    `start` once; whoever starts it awaits `ended`. The journal closes when the engine has let go.
    """

    def __init__(
        self,
        order: StepSpec,
        *,
        engine: Engine,
        data_plane: DataPlane,
        signature: Signature,
        where: Mapping[str, str],
        on_state: Callable[[str, Checkpoint], None],
        on_left: Callable[[StepEdges], None] = lambda _: None,
    ) -> None:
        """`on_state` is told each state that the request can go on from.

        `on_left` takes what a run that ended well leaves: flows whose consumers may have to be replaced yet.
        """
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
        self._told: tuple[int, Checkpoint] | None = None
        """The newest state that was told, with its index in the journal."""
        self._rows = dict(resume_from.rows) if resume_from is not None else dict[str, int]()
        self._rows_can_be_told = rows_are_those_of_edges(order, signature)
        self._edges = StepEdges(order, data_plane)
        self._on_state, self._on_left = on_state, on_left
        self._stopwatch, self._progress_pace = Stopwatch(), ProgressPace()
        self._usage = Usage()
        self._timer: asyncio.TimerHandle | None = None
        self._abandoning: asyncio.TimerHandle | None = None
        self._cause: StagemeshError | None = None
        self._task: asyncio.Task[None] | None = None
        self._interruptible = False
        self._pause_wish = PauseRequest()
        self._feeds: list[EdgeInput] = []
        self._with_engine = False
        self.heard = 0
        """How often the engine has said something."""
        self.number = next(_numbers)
        """Of this process's runs, the later has the higher."""

    @property
    def computes(self) -> bool:
        """Whether it waits for nothing but its engine: neither for what feeds it nor for who takes what it makes."""
        return self._with_engine and not any(feed.waits for feed in self._feeds)

    @property
    def priority(self) -> int:
        """The request's: the higher goes first."""
        return self.order.task.priority

    @property
    def request_id(self) -> str:
        """The request."""
        return self.order.request_id

    @property
    def running(self) -> bool:
        """Whether it has not ended yet."""
        return not self.journal.closed

    @property
    def kept_bytes(self) -> int:
        """What its outputs and checkpoints take in memory."""
        return self._outputs.size_bytes + (size_bytes(self._told[1]) if self._told is not None else 0)

    @property
    def report(self) -> StepReport:
        """Where it stands now."""
        order = self.order
        inlets, outlets = self._edges.reports()
        return StepReport(
            request_id=order.request_id,
            step_id=order.step_id,
            attempt=order.attempt,
            age_s=self._stopwatch.age_s,
            started=self._stopwatch.started,
            inlets=inlets,
            outlets=outlets,
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

    def hand_on(self) -> None:
        """Has the engine pause it after its present step; the request goes on elsewhere. For engines that can."""
        self._pause_wish.asked = True

    def rebind(self, rebinding: Rebinding) -> None:
        """See `StepEdges.rebind`."""
        self._edges.rebind(rebinding)

    async def ended(self) -> None:
        """Returns when the engine has let go and the journal is closed. Never raises the run's error."""
        assert self._task is not None, "start comes first"
        await asyncio.wait([self._task])

    def _abandoned(self) -> None:
        """The last caller has gone; it may come back, as after a connection that broke."""
        if self._abandoning is None:
            loop = asyncio.get_running_loop()
            self._abandoning = loop.call_later(ABANDON_S, self._stop_abandoned)

    def _stop_abandoned(self) -> None:
        self._abandoning = None
        if not self.journal.readers:
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
        self._edges.open()
        self.journal.append(Accepted(self._engine.load().queued))
        order, inlets = self.order, self._edges.inlets
        if not order.inputs:
            self._stopwatch.start()
        feeds = {edge: self._feed(edge, inlet) for edge, inlet in inlets.items()}
        self._feeds = list(feeds.values())
        await self._compute(
            replace(
                order.task,
                inlets=feeds,
                apart=frozenset(binding.edge for binding in order.inputs if binding.apart),
                resume_from=await self._resumed_from(),
                pause_wish=self._pause_wish,
                wanted=wanted_of(order),
                tokens=tokens_of(order, self._signature),
                deadline_s=self._timer.when() if self._timer is not None else None,
            )
        )
        await self._finish()

    async def _resumed_from(self) -> Checkpoint | None:
        """Where the task goes on; its state may come over an edge."""
        resume_from = self.order.task.resume_from
        inlet = self._edges.state_inlet
        if resume_from is None or inlet is None:
            return resume_from
        packets = [packet async for packet in inlet]
        steps = packets[0].metadata.get("steps") if len(packets) == 1 else None
        if steps != resume_from.steps:
            raise InvalidRequestError(
                f"edge {STATE_EDGE} brought a state after {steps} steps; resume_from says {resume_from.steps}",
                reason="INVALID_CHECKPOINT",
            )
        return replace(resume_from, tensors=packets[0].tensors)

    async def _compute(self, task: Task) -> None:
        events = self._engine.submit(task)
        self._with_engine = True
        try:
            async for event in events:
                self.heard += 1
                if isinstance(event, Emission):
                    self._tell(event)
                    add_rows(self._rows, event.packet)
                    if self.order.outputs:
                        self._with_engine = False
                        await self._edges.outlets.send(event.packet)
                        self._with_engine = True
                elif isinstance(event, Progress):
                    if self._progress_pace.is_due(event):
                        self.journal.append(event)
                elif isinstance(event, Checkpoint):
                    self._keep(event)
                elif isinstance(event, Paused):
                    self.paused = self._counted(event.checkpoint)
                else:
                    self._usage = event
        finally:
            # An engine that lets go is not to be broken into.
            self._interruptible = False
            self._with_engine = True
            await events.aclose()
            self._with_engine = False
            self._interruptible = True
        self._raise_cause()

    def _raise_cause(self) -> None:
        """For a stop that came where it could not break in."""
        if self._cause is not None:
            raise self._cause

    def _feed(self, edge: str, inlet: Inlet) -> EdgeInput:
        transform = next(binding.transform for binding in self.order.inputs if binding.edge == edge)
        return EdgeInput(
            inlet,
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
        """What was emitted before a checkpoint is made by it; the rest is to come after it.

        One whose rows an edge does not count as they are emitted would not say where that edge stands.
        """
        if not self._rows_can_be_told:
            return
        state = self._counted(checkpoint)
        if told(state) is not state:
            self._on_state(self.order.request_id, state)
        self._let_go_of_told()
        self._told = self.journal.append(told(state)), told(state)

    def _let_go_of_told(self) -> None:
        """Who comes later goes on from a newer state, or has no need to: this one leaves no more than its place."""
        if self._told is not None:
            index, state = self._told
            self.journal.replace(index, place_of(state))
            self._told = None

    def _counted(self, checkpoint: Checkpoint) -> Checkpoint:
        return replace(checkpoint, outputs=self._outputs.made, rows=dict(self._rows))

    async def _finish(self) -> None:
        for output in self._outputs.finish():
            self.journal.append(output)
        if self.paused is not None:
            await self._send_state(self.paused)
            self._let_go_of_told()
            # It stays in `States` as far as there is room; here is what its callers are told.
            self.paused = told(self.paused)
            self._told = self.journal.append(Paused(self.paused)), self.paused
            return
        await self._edges.outlets.finish()
        edges = self._edges.outlets.usages
        self._let_go_of_told()
        self.journal.append(Finished(self._usage, self._stopwatch.timings(), edges))

    async def _send_state(self, state: Checkpoint) -> None:
        self._on_state(self.order.request_id, state)
        outlet = self._edges.state_outlet
        if outlet is not None:
            await outlet.send(Packet(state.tensors, {"steps": state.steps}))
            await outlet.finish()

    async def _let_go(self, error: StagemeshError | None) -> None:
        if error is None and self.paused is not None and self._pause_wish.asked:
            # Its neighbours wait for whoever goes on with it.
            error = handed_on(self._where)
        await self._edges.close(error, left_state=self.paused is not None)
        if error is None and not self._edges.is_over:
            self._on_left(self._edges)
        if self._abandoning is not None:
            self._abandoning.cancel()
            self._abandoning = None
        self._set_deadline(None)
        # The run is kept for callers that attach again; they need the journal alone. A cause that was raised
        # holds on to the frames that it came through, and so to a packet and its lease.
        self._edges = StepEdges(replace(self.order, inputs=(), outputs=()), self._data_plane)
        self._cause = None
        self._feeds = []
        self.order = replace(self.order, task=Task(self.order.request_id, self.order.task.seed))
