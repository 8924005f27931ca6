"""The run of one step, from opening the step's edges to closing them."""

import asyncio
import itertools
import logging
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import KW_ONLY, asdict, dataclass, replace

from stagemesh.common.errors import (
    CancelledRequestError,
    DeadlineError,
    InternalError,
    InvalidRequestError,
    StagemeshError,
)
from stagemesh.common.media.store import MediaStore
from stagemesh.common.notification import Notifier
from stagemesh.common.plugins.descriptors import Signature
from stagemesh.common.process.logs import bind_log_context
from stagemesh.common.process.stage_process import StageConfig
from stagemesh.connectors.data_plane import DataPlane
from stagemesh.connectors.flow.outlet import FanOut
from stagemesh.connectors.packets import Packet, rows_of
from stagemesh.rpc.error_mapping import error_to_wire
from stagemesh.services.engines.base import Checkpoint, Emission, Engine, Paused, Progress, Task, Usage
from stagemesh.services.engines.user_errors import UserErrors
from stagemesh.services.stage.step.checks import FiniteCheck, ResultCheck
from stagemesh.services.stage.step.edges import StepEdges
from stagemesh.services.stage.step.inputs import EdgeInput, opened_media
from stagemesh.services.stage.step.journal import PausedStates, StepJournal, drained_error, without_large_state
from stagemesh.services.stage.step.outputs import (
    FileOutputs,
    ProgressThrottle,
    StreamedOutputs,
    finish_to_wire,
    logprobs_to_wire,
)
from stagemesh.services.stage.step.spec import STATE_EDGE, StepSpec, checkpoint_to_wire
from stagemesh.services.stage.step.timings import FrameIntervals, RowTimer, Stopwatch
from stagemesh.v1 import control_pb2, request_pb2, stage_pb2

_log = logging.getLogger(__name__)

ABANDON_S = 5.0
"""The time for which a run continues after its last caller has disconnected, in seconds."""
ABORT_S = 1.0
"""Time limit for the engine to release a stopped task, in seconds. If the engine exceeds it, callers and edges receive
the error with which the run was stopped, and the run is closed without the engine."""

_SPANS = 64
"""The number of new spans at which a traced step reports them, so that most are known if the replica is lost."""

_numbers = itertools.count(1)


@dataclass(frozen=True)
class StepContext:
    """The parts of one replica that all of its runs share."""

    engine: Engine
    data_plane: DataPlane
    signature: Signature
    """The stage's inputs and outputs."""
    config: StageConfig
    _: KW_ONLY
    states: PausedStates
    """The states from which requests can resume."""
    store: MediaStore | None
    """The pipeline's store for media, or None if it has none."""
    results: ResultCheck
    """The check of the engine's results."""
    where: Mapping[str, str]
    """The names of the stage and of the replica, for log records and errors."""
    frame_intervals: FrameIntervals
    """The measurements to which each run adds its own."""


class StepRun:
    """The run of one step on the engine, from the step's inlets to its outlets. Appends the step's events to `journal`.

    Call `start` once, then await `ended`. The journal closes when the engine has released the task, but no later than
    ABORT_S seconds after `stop`. Callers and peer stages therefore do not wait for an engine that ignores an abort.
    """

    def __init__(self, spec: StepSpec, context: StepContext) -> None:
        config, signature, store = context.config, context.signature, context.store
        if spec.task.resume_from is not None:
            spec = context.states.with_state(spec)
        self.request_id, self.step_id, self.attempt = spec.request_id, spec.step_id, spec.attempt
        self.fingerprint, self.priority = spec.fingerprint, spec.task.priority
        self._left = Notifier()
        """Fires when the last caller has disconnected."""
        self._events = StepJournal(spec, context.states, on_abandoned=self._abandoned)
        self.journal = self._events.journal
        """The events of the step as serialized messages."""
        self._spec, self._context = spec, context
        self._where = {**context.where, "request_id": spec.request_id}
        resume_from = spec.task.resume_from or Checkpoint(0)
        sent = [each.tensor for each in spec.streamed if not each.is_file]
        parsed = [each.tensor for each in spec.streamed if each.parsed]
        self._outputs = StreamedOutputs(sent, signature.emits, made=resume_from.outputs, parsed=parsed)
        self._files = FileOutputs([each for each in spec.streamed if each.is_file], signature.emits, store=store)
        self._rows = dict(resume_from.rows)
        self._row_timer = RowTimer()
        self._paused: Checkpoint | None = None
        """The checkpoint at which the run paused. None if the run has not paused."""
        self._user_errors = UserErrors(details=config.error_details, log=config.log)
        self.edges = StepEdges(spec, context.data_plane, model=config.model_path, user_errors=self._user_errors)
        self._stopwatch, self._progress = Stopwatch(), ProgressThrottle()
        self._usage = Usage()
        self._finite = FiniteCheck(
            signature.emits,
            encoded=[each.tensor for each in spec.streamed if each.is_file],
            maker=context.results.maker,
            fails=config.non_finite == "error",
        )
        self._audio_s = 0.0
        self._sample_rates_hz = {
            name: each.sample_rate_hz for name, each in signature.emits.items() if each.kind == "audio"
        }
        self._timer: asyncio.TimerHandle | None = None
        self._cause: StagemeshError | None = None
        self._task: asyncio.Task[None] | None = None
        self._early_close: asyncio.Task[StepEdges | None] | None = None
        self._closing = self._interruptible = False
        self._pause_requested = asyncio.Event()
        self._inputs: list[EdgeInput] = []
        self._with_engine = False
        self.event_count = 0
        """The number of events received from the engine."""
        self.number = next(_numbers)
        """The run's number. Runs that start later in this process have higher numbers."""

    @property
    def computes(self) -> bool:
        """Whether the run waits only for its engine. False while the run waits for input or for a consumer's credit."""
        return self._with_engine and not any(each.waits for each in self._inputs)

    @property
    def kept_bytes(self) -> int:
        """The total size of the run's serialized events, in bytes."""
        return sum(map(len, self.journal.items))

    @property
    def report(self) -> control_pb2.StepReport:
        """The current status of the step and its flows."""
        return control_pb2.StepReport(
            request_id=self.request_id,
            step_id=self.step_id,
            attempt=self.attempt,
            age_s=self._stopwatch.age_s,
            started=self._stopwatch.started_s is not None,
            inlets=self.edges.inlet_reports(),
            outlets=self.edges.outlet_reports(),
            waits_for_input=any(each.waits for each in self._inputs),
        )

    def start(self, *, deadline_s: float | None, on_ended: Callable[["StepRun", StepEdges | None], None]) -> None:
        """Starts the run. `deadline_s` is a time on the event loop's clock in seconds, or None for no deadline.

        When the run has ended, calls `on_ended` with this run and with the edges that it has left open. The edges are
        None unless the run succeeded and some of its consumers may still be replaced.
        """
        self._set_deadline(deadline_s)
        self._task = asyncio.create_task(self._run(on_ended), name=f"step {self.step_id}")

    def extend(self, *, deadline_s: float | None) -> None:
        """Extends the deadline for another caller. `deadline_s` is a time on the event loop's clock in seconds.

        Ignores a time before the current deadline. None removes the deadline.
        """
        if self._timer is not None and (deadline_s is None or deadline_s > self._timer.when()):
            self._set_deadline(deadline_s)

    def note_rebound(self, flow_attempts: Mapping[str, int]) -> None:
        """Makes later callers learn in which attempts the flows of the step are bound, by edge name."""
        self._events.update_accepted(flow_attempts)

    def stop(self, cause: StagemeshError) -> None:
        """Stops the run. The run ends with the error `cause` when the engine has released the task, or after ABORT_S
        seconds.

        Does nothing if the run has already been stopped, because the first cause counts, or if the run is closing.
        """
        assert self._task is not None, "`start` has not been called"
        if self._cause is None and not self._closing:
            self._cause = cause
            if self._interruptible:
                self._task.cancel()
            asyncio.get_running_loop().call_later(ABORT_S, self._close_early)

    def request_pause(self) -> None:
        """Requests that the engine pause the task after its current step, so that another replica can resume the
        request.

        Only for engines with the ability `can_pause`. A run that makes files does not pause, because the part of a file
        that is already encoded could not be continued elsewhere.
        """
        if not self._spec.makes_files:
            self._pause_requested.set()

    async def ended(self) -> None:
        """Waits until the engine has released the task and the journal is closed. Never raises the run's error."""
        assert self._task is not None, "`start` has not been called"
        await asyncio.wait([self._task])

    @property
    def has_callers(self) -> bool:
        """Whether the run has not ended and a caller follows it."""
        return bool(self.journal.readers) and not self.journal.closed

    async def left(self) -> None:
        """Waits until no caller follows the run. Set a time limit: the end of the run does not end the wait."""
        while self.has_callers:
            await self._left.wait()

    def _abandoned(self) -> None:
        """Called when the last caller has disconnected. Stops the run after ABANDON_S seconds unless a caller has
        reconnected.
        """
        self._left.fire()
        asyncio.get_running_loop().call_later(ABANDON_S, self._stop_abandoned)

    def _stop_abandoned(self) -> None:
        if not self.journal.readers:
            self.stop(CancelledRequestError("every caller of the step has disconnected", reason="CALLER_DISCONNECTED"))

    def _set_deadline(self, deadline_s: float | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        error = DeadlineError("the deadline passed while the step ran; allow more time, or request less")
        loop = asyncio.get_running_loop()
        self._timer = loop.call_at(deadline_s, self.stop, error) if deadline_s is not None else None

    async def _run(self, on_ended: Callable[["StepRun", StepEdges | None], None]) -> None:
        bind_log_context(**self._where, attempt=str(self.attempt))
        _log.debug("the step starts")
        error = await self._outcome()
        _log.debug("the step ended: %s", "it finished" if error is None else error)
        if error is not None:
            await self._files.discard()
        left = await (self._early_close or self._close(error))
        # `_close` does not drop the files, because it may run before the engine has released the task.
        self._files = FileOutputs((), {}, store=None)
        # An exception refers to the frames that it passed through, and thereby retains a packet and its lease.
        self._cause = None
        on_ended(self, left)

    async def _outcome(self) -> StagemeshError | None:
        """Runs the step until it ends. Returns the step's error, or None if it succeeds."""
        try:
            await self._execute()
        except StagemeshError as exc:
            if exc.reason == "INVALID_RESULT":
                _log.warning("%s", exc.message)
            return exc
        except asyncio.CancelledError:
            return self._cause or CancelledRequestError("the stage is shutting down", reason="ABORTED")
        except Exception as exc:  # noqa: BLE001  # an engine's exception fails only its own request
            return InternalError(self._user_errors.describe(self._context.results.maker, exc), reason="ENGINE_ERROR")
        finally:
            self._interruptible = False
        return None

    async def _execute(self) -> None:
        self._raise_cause()
        self._interruptible = True
        inputs = self.edges.open(self._context.signature.accepts, self._stopwatch.start)
        self._inputs = list(inputs.values())
        self._events.append_accepted(queue_position=self._context.engine.load().queued)
        spec = self._spec
        if not spec.inputs:
            self._stopwatch.start()
        await self._files.open()
        async with opened_media(spec.task.prompt, self._context.store):
            await self._compute(
                replace(
                    spec.task,
                    inlets=inputs,
                    apart=frozenset(binding.edge for binding in spec.inputs if binding.apart),
                    resume_from=await self._resumed_from(),
                    pause_requested=self._pause_requested,
                    wanted=spec.wanted_tensors,
                    tokens=spec.wanted_rows(self._context.signature),
                    trace=spec.trace,
                    deadline_s=self._timer.when() if self._timer is not None else None,
                )
            )
        await self._finish()

    async def _resumed_from(self) -> Checkpoint | None:
        """Returns the checkpoint from which the task resumes, or None if the task starts from the beginning.

        If an edge delivers the checkpoint's tensors, waits for them and adds them to the checkpoint.
        """
        resume_from = self._spec.task.resume_from
        inlet = self.edges.state_inlet
        if resume_from is None or inlet is None:
            return resume_from
        packets = [packet async for packet in inlet]
        steps = packets[0].metadata.get("engine_steps") if len(packets) == 1 else None
        if steps != resume_from.steps:
            raise InvalidRequestError(
                f"edge {STATE_EDGE} delivered a state after {steps} steps, but resume_from has {resume_from.steps}",
                reason="INVALID_CHECKPOINT",
            )
        return replace(resume_from, tensors=packets[0].tensors)

    async def _compute(self, task: Task) -> None:
        sent = self._spec.sent_tensors or frozenset()
        sends_all = self._spec.makes_files or self._spec.sent_tensors is None
        events, outlets = self._context.engine.submit(task), self.edges.outlets
        self._with_engine = True
        try:
            async for event in events:
                try:
                    # An engine that ignores the cancellation must not emit anything more.
                    if self._cause is not None:
                        raise self._cause
                    self.event_count += 1
                    self._events.append_spans(at_least=_SPANS)
                    if isinstance(event, Emission):
                        self._append_outputs(event)
                        # Engines often emit tensors that only the caller receives, such as text, in separate packets.
                        if sends_all or event.packet.tickets or not sent.isdisjoint(event.packet.tensors):
                            await self._send(event.packet, outlets)
                    else:
                        self._note(event)
                finally:
                    # The outlets have their own references to the tickets that they have sent.
                    if isinstance(event, Emission) and event.packet.tickets:
                        for ticket in event.packet.tickets.values():
                            ticket.release()
                    # Otherwise the packet would remain in memory while the engine computes the next one.
                    del event
        finally:
            # An engine must not be interrupted while it releases a task.
            self._interruptible = False
            self._with_engine = True
            await events.aclose()
            self._with_engine = False
            self._interruptible = True
        self._raise_cause()

    def _note(self, event: Progress | Checkpoint | Paused | Usage) -> None:
        """Processes an event of the engine that contains no tensors for callers and edges."""
        match event:
            case Progress():
                if self._progress.is_due(event):
                    progress = stage_pb2.StepProgress(engine_steps=event.steps, total_engine_steps=event.total_steps)
                    self._events.append(stage_pb2.ExecuteStepResponse(progress=progress))
            case Checkpoint():
                # The row counts of a checkpoint would not match the rows of an edge that transfers only some of them. A
                # file cannot be continued elsewhere, and neither can the beginning of a character.
                takes_all_rows = self._spec.edges_take_all_rows(self._context.signature)
                if not self._spec.makes_files and takes_all_rows and not self._outputs.is_within_character:
                    self._events.append_checkpoint(self._with_counts(event))
            case Paused():
                self._paused = self._with_counts(event.checkpoint)
            case Usage():
                self._usage = event

    async def _send(self, packet: Packet, outlets: FanOut | None) -> None:
        """Sends the tensors and tickets of one engine step over the outgoing edges, and adds them to the step's
        files.
        """
        self._row_timer.emitted(self._rows)
        self._with_engine = False
        for output in await self._files.push(packet):
            self._events.append(stage_pb2.ExecuteStepResponse(output=output))
        if outlets is not None:
            await outlets.send(packet)
        self._row_timer.resumed()
        self._with_engine = True

    def _raise_cause(self) -> None:
        """Raises the error that was passed to `stop`. Does nothing if `stop` has not been called. This check is needed
        because `stop` cannot always interrupt the run.
        """
        if self._cause is not None:
            raise self._cause

    def _append_outputs(self, emission: Emission) -> None:
        """Checks and counts the tensors of one engine step, and appends the outputs for callers to the journal.

        This happens before the packet is sent to edges, so that callers do not wait for an edge's credit. Runs for
        every token of every request.
        """
        packet = emission.packet
        self._context.results.check(packet)
        if self._finite.checks or emission.non_finite:
            self._finite.check(packet, non_finite=emission.non_finite)
        self._stopwatch.first_output()
        for output in self._outputs.push(emission):
            self.journal.append(output.SerializeToString())
        for name, sample_rate_hz in self._sample_rates_hz.items():
            if name in packet.tensors:
                self._audio_s += len(packet.tensors[name]) / sample_rate_hz
        for name, rows in rows_of(packet):
            self._rows[name] = self._rows.get(name, 0) + rows

    def usage(self) -> request_pb2.Usage:
        """Returns the work that the run has done so far."""
        counts = asdict(replace(self._usage, prompt_logprobs=(), warnings=()))
        del counts["finish"], counts["prompt_logprobs"], counts["context_tokens"], counts["warnings"]
        return request_pb2.Usage(**counts, audio_s=self._audio_s)

    def _with_counts(self, checkpoint: Checkpoint) -> Checkpoint:
        return replace(checkpoint, outputs=self._outputs.made, rows=dict(self._rows))

    async def _finish(self) -> None:
        self._row_timer.report(self._rows, self._context.frame_intervals)
        finish = self._usage.finish
        for part in self._outputs.finish(finish if self._paused is None else None):
            self._events.append(part)
        if self._paused is not None:
            await self._send_state(self._paused)
            self._events.clear_checkpoint()
            # `PausedStates` retains the whole state if its limit allows. The callers receive this checkpoint.
            self._paused = without_large_state(self._paused)
            self._events.append_spans()
            paused = stage_pb2.StepPaused(checkpoint=checkpoint_to_wire(self._paused))
            self._events.append(stage_pb2.ExecuteStepResponse(paused=paused))
            return
        for output in await self._files.finish(finish):
            self._events.append(stage_pb2.ExecuteStepResponse(output=output))
        outlets = self.edges.outlets
        if outlets is not None:
            await outlets.finish()
        await self.edges.discard_unread()
        # The last wait of the run. Nothing can fail after it, so no stored file belongs to a failed step.
        for output in await self._files.commit(finish):
            self._events.append(stage_pb2.ExecuteStepResponse(output=output))
        self._events.clear_checkpoint()
        self._events.append_spans()
        finished = stage_pb2.StepFinished(
            usage=self.usage(),
            timings=self._stopwatch.timings(),
            edges=outlets.usages if outlets else (),
            finish=finish_to_wire(finish),
            warnings=[*self._finite.warnings, *map(error_to_wire, self._usage.warnings)],
            prompt_logprobs=logprobs_to_wire(self._usage.prompt_logprobs),
            context_tokens=self._usage.context_tokens,
        )
        self._events.append(stage_pb2.ExecuteStepResponse(finished=finished))

    async def _send_state(self, state: Checkpoint) -> None:
        self._context.states.keep(self.request_id, state)
        outlet = self.edges.state_outlet
        if outlet is not None:
            await outlet.send(Packet(state.tensors, {"engine_steps": state.steps}))
            await outlet.finish()

    def _close_early(self) -> None:
        """Closes the flows and the journal although the engine has not yet released the task. `ended` still waits for
        the engine.
        """
        if not self._closing:
            _log.info("the engine has not released step %s within %g s after its stop", self.step_id, ABORT_S)
            self._early_close = asyncio.create_task(self._close(self._cause), name=f"close step {self.step_id}")

    async def _close(self, error: StagemeshError | None) -> StepEdges | None:
        """Closes the flows and the journal with the run's error, or None if the run succeeded or paused.

        Returns the step's edges if some of its consumers may still be replaced, otherwise None.
        """
        self._closing = True
        self._set_deadline(None)
        if error is not None:
            # The error is copied, because one cause may end several runs.
            error = copy(error).located(**self._where)
            # A step that was refused has sent nothing, and its first event would have to be the acceptance.
            if not self.journal.closed and self.journal.items:
                self._events.append_spans()
                self._events.append(stage_pb2.ExecuteStepResponse(usage=self.usage()))
        edges, edges_error = self.edges, error
        if error is None and self._paused is not None and self._pause_requested.is_set():
            # The peer stages wait for the replica that resumes the request.
            edges_error = drained_error(self._where)
        await edges.close(edges_error, left_state=self._paused is not None)
        if error is None and self._paused is None:
            self._context.states.forget(self.request_id)
        # The run is stored for callers that attach again. They need only the journal.
        self._spec = StepSpec(self.step_id, self.attempt, Task(self.request_id, self._spec.task.seed))
        self.edges = StepEdges(self._spec, self._context.data_plane, model=None, user_errors=self._user_errors)
        self._inputs, self._paused = [], None
        self.journal.close(error)
        return None if edges_error is not None or edges.is_over else edges
