"""Calls the replicas of one choice's stages: executes, rebinds and cancels steps, and processes their events."""

import asyncio
import logging
import secrets
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from copy import copy

import numpy as np

from stagemesh.common.backoff import Backoff
from stagemesh.common.errors import (
    InternalError,
    InvalidChunkError,
    StagemeshError,
    StaleAttemptError,
    UnavailableError,
)
from stagemesh.common.media.files import suffix_of
from stagemesh.common.notification import Notifier
from stagemesh.common.plugins.connectors import number_of
from stagemesh.common.requests.output_position import length_of
from stagemesh.common.wire.tensors import checked_layout
from stagemesh.common.wire.versions import refuse_unknown
from stagemesh.orchestrator.fleet.replica import Replica
from stagemesh.orchestrator.fleet.replica_loss import ACCEPT_S, REATTACH_S, REPLICA_LOST
from stagemesh.orchestrator.fleet.step_stream import TakeEvent
from stagemesh.orchestrator.planning.chunk_policies import policy_to_wire
from stagemesh.orchestrator.request.failures import NOT_REBOUND, Failures
from stagemesh.orchestrator.request.output_record import CALLER_DISCONNECTED, RequestRecord
from stagemesh.orchestrator.request.parameters import parameters_of
from stagemesh.orchestrator.request.recovery import (
    Phase,
    StepState,
    SupersededAttempt,
    attempt_of,
    carried_rows,
    find_overtaken,
    is_checkpoint_useful,
    is_open,
)
from stagemesh.orchestrator.request.timeline import StepNotes
from stagemesh.orchestrator.request.validation import ValidRequest
from stagemesh.orchestrator.spans import step_path
from stagemesh.pipeline import Edge, PipelineOutput, Route
from stagemesh.rpc.channels import MAX_MESSAGE_BYTES
from stagemesh.v1 import orchestrator_pb2, request_pb2, stage_pb2

_log = logging.getLogger(__name__)
DRAINED = "DRAINED"
"""The error reason of a step that was paused because its replica drains. The step continues on another replica."""
_CONTENTS: Mapping[str, Sequence[str]] = {
    "text": ("text", "message"),
    **{kind: (kind,) for kind in ("audio", "image", "tensor", "media")},
    "tokens": ("token_ids",),
}
"""The content of a part of an output that is not a file, by the output's kind."""
_PAUSES = Backoff(first_s=0.05, longest_s=0.1)
_MOST_BREAKS = 16
_ENDED = -1
"""The position of an output after its part with `finish`."""
_REBIND_S = 5.0
_CANCEL_S = 5.0
_BINDINGS_BYTES = 256 << 10
"""The maximum size of an ExecuteStep message without its input, parameters and checkpoint, in bytes."""


class StepCalls:
    """Calls the replicas of the stages of one choice of a request.

    Builds the messages from the current states of the stages. Applies each event that arrives to the state of its stage
    and to the request's record.
    """

    def __init__(
        self,
        request: ValidRequest,
        route: Route,
        states: Mapping[str, StepState],
        *,
        record: RequestRecord,
        failures: Failures,
        changed: Notifier,
        input_producer: str,
    ) -> None:
        """`input_producer` is the name by which stages know the producer of the edges from "@input"."""
        self._input_producer = input_producer
        self._request, self._route, self._states = request, route, states
        self._record, self._failures, self._changed = record, failures, changed
        self._input_bytes = request.input.ByteSize() + request.parameters.ByteSize()
        self._output_names: dict[str, dict[str, str]] = {stage.name: {} for stage in route.stages}
        """The names of the pipeline outputs, by stage name and then by the stage's tensor name."""
        self._run_folder = f"{request.request_id}.{secrets.token_hex(8)}"
        """The name of the folder for the stored outputs. A run at another orchestrator uses another folder."""
        for output in route.outputs.values():
            self._output_names[output.stage][output.tensor] = output.name

    def flow_attempts(self, state: StepState) -> Mapping[str, int]:
        """Returns the attempt number of each flow of a step that starts now, by edge name.

        Omits edges to finished consumers.
        """
        edges = (*self._route.incoming[state.name], *self._open_edges(state))
        return {edge.name: attempt_of(edge, self._states) for edge in edges}

    def execute(self, state: StepState) -> stage_pb2.ExecuteStepRequest:
        """Returns the message that starts the newest attempt of a stage. Omits edges to finished consumers."""
        incoming = (*self._route.incoming[state.name], *self._route.inputs[state.name])
        continues = state.attempt == self._request.running_attempt
        return stage_pb2.ExecuteStepRequest(
            request_id=self._request.choice_id,
            step_id=self._step_id(state),
            attempt=state.attempt,
            input=self._input(state) if not incoming or state.step.stage.signature.takes_prompt else None,
            parameters=parameters_of(state.step.stage, self._request.parameters),
            seed=self._request.seed,
            inputs=map(self._input_binding, incoming),
            absent=self._route.absent(state.step.stage),
            outputs=map(self._output_binding, self._open_edges(state)),
            streamed=self._streamed(state),
            priority=self._request.priority,
            resume_from=state.resumed,
            traceparent=self._traceparent(state),
            # Another orchestrator has started these attempts.
            attach_only=continues,
            lowest_attempt=self._request.first_attempt if continues else 0,
        )

    def can_resume_from(self, checkpoint: stage_pb2.Checkpoint, *, max_bytes: int = MAX_MESSAGE_BYTES) -> bool:
        """Returns whether the checkpoint contains a state and fits into a message with the request's input.

        `max_bytes` is the size of the largest message that the stage accepts.
        """
        has_state = bool(checkpoint.token_ids or checkpoint.tensors)
        return has_state and self._input_bytes + checkpoint.ByteSize() + _BINDINGS_BYTES <= max_bytes

    async def rebind(self, state: StepState, edges: Collection[str]) -> None:
        """Notifies the stage's replica of the new producers and consumers on some edges. `edges` contains edge names.

        Raises the error that the replica returns, or the replica's end cause if the replica has ended.
        """
        if state.replica.end_cause is not None:
            raise copy(state.replica.end_cause)
        incoming = [edge for edge in self._route.incoming[state.name] if edge.name in edges]
        outgoing = [edge for edge in self._route.outgoing[state.name] if edge.name in edges]
        attempts = {edge.name: attempt_of(edge, self._states) for edge in (*incoming, *outgoing)}
        request = stage_pb2.RebindStepRequest(
            request_id=self._request.choice_id,
            step_id=self._step_id(state),
            inputs=map(self._input_rebinding, incoming),
            outputs=map(self._output_binding, outgoing),
        )
        await state.replica.client.rebind(request, timeout_s=_REBIND_S)
        assert state.notes is not None, "its replica is chosen"
        state.bound = {**state.bound, **attempts}
        state.notes.note_rebound(list(attempts))
        _log.info("stage %s continues with other replicas on %s", state.name, ", ".join(attempts))

    async def cancel(self, attempt: SupersededAttempt, error: StagemeshError | None = None) -> None:
        """Cancels an attempt on its replica. If the call fails, logs the error instead of raising it.

        `error` is the reason for the cancellation, or None if a newer attempt has replaced this attempt. If
        `may_continue` is True for the error, the replica does not cancel an attempt that another orchestrator follows.
        Does nothing if the replica has ended.
        """
        if attempt.replica.end_cause is not None:
            return
        request = stage_pb2.CancelStepRequest(
            request_id=self._request.choice_id,
            attempt=attempt.attempt,
            reason=error.message if error is not None else "a newer attempt has replaced it",
            when_left=error is not None and may_continue(error),
        )
        try:
            response = await attempt.replica.client.cancel(request, timeout_s=_CANCEL_S)
        except StagemeshError as exc:
            _log.warning("replica %s may still run the request: %s", attempt.replica.name, exc.message)
            return
        state = self._states[attempt.replica.stage]
        if state.attempt == attempt.attempt and state.notes is not None and response.HasField("usage"):
            state.notes.usage = response.usage

    def take(self, state: StepState, attempt: int, event: stage_pb2.ExecuteStepResponse) -> None:
        """Applies an event of an attempt to the state of its stage.

        `attempt` is the number of the attempt. Ignores the event if a newer attempt has replaced this attempt. Raises
        UnavailableError (DRAINED) if the replica has paused the step.
        """
        if state.attempt != attempt:
            # A newer attempt has replaced this attempt, which will soon be cancelled.
            return
        assert state.notes is not None, "its replica is chosen"
        match event.WhichOneof("event"):
            case "output":
                self._take_output(state, event.output, state.notes)
            case "usage":
                state.notes.usage = event.usage
            case "spans":
                state.notes.note_spans(event.spans)
            case "progress":
                state.notes.note_progress(event.progress)
                self._show_progress(state, event.progress)
            case "accepted":
                self._take_accepted(state, event.accepted, state.notes)
            case "checkpoint":
                self._take_checkpoint(state, event.checkpoint)
            case "finished":
                state.notes.note_finished(event.finished)
                self.finish(state)
            case "paused":
                self._take_checkpoint(state, event.paused.checkpoint)
                raise UnavailableError(
                    f"replica {state.replica.name} of stage {state.name!r} drains; its steps continue elsewhere",
                    reason=DRAINED,
                )
            case _:
                refuse_unknown(event, of=f"replica {state.replica.name}")

    def finish(self, state: StepState) -> None:
        """Ends the work of a stage, and releases its replica.

        The stage has finished, or it is lost and its results are no longer needed.
        """
        state.phase = Phase.FINISHED
        state.release_replica()
        if state.notes is not None:
            state.notes.end(None)
        self._changed.fire()

    def _traceparent(self, state: StepState) -> str:
        request, trace = self._request, self._record.timeline.trace
        if trace is None:
            return ""
        path = step_path(request.request_id, state.name, index=request.index, attempt=state.attempt)
        return str(trace.traceparent(path))

    def _step_id(self, state: StepState) -> str:
        return f"{self._request.choice_id}/{state.name}/{state.attempt}"

    def _streamed(self, state: StepState) -> Iterator[stage_pb2.StreamedOutput]:
        """Yields the outputs that the newest attempt of a stage sends or stores.

        Omits a stored output that is complete, so that a restarted stage does not store it again.
        """
        for tensor, name in self._output_names[state.name].items():
            output = self._route.outputs[name]
            if not output.stored or (name, self._request.index) not in self._record.position.finished:
                yield stage_pb2.StreamedOutput(
                    tensor=tensor,
                    media_type=output.media_type or "",
                    frame_rate=output.frame_rate or None,
                    uri=self._object_uri(output, state.attempt),
                    parsed=self._request.parsed and output.kind == "text" and not output.file_type,
                )

    def _object_uri(self, output: PipelineOutput, attempt: int) -> str:
        """Returns the URI of the object for an output, or an empty URI if the output is sent.

        Each attempt has its own object, so that a superseded attempt cannot overwrite a newer one.
        """
        if not output.stored:
            return ""
        suffix = suffix_of(output.file_type)
        return f"{output.folder_uri}/{self._run_folder}/{output.name}.{attempt}{suffix}"

    def _open_edges(self, state: StepState) -> list[Edge]:
        """Returns the edges over which the newest attempt of a stage sends, whose consumers have not finished."""
        return [edge for edge in self._route.outgoing[state.name] if is_open(edge, self._states)]

    def _input_binding(self, edge: Edge) -> stage_pb2.InputBinding:
        return stage_pb2.InputBinding(
            edge=edge.name,
            producer=self._input_producer if edge.is_input else self._states[edge.producer].replica.name,
            attempt=attempt_of(edge, self._states),
            transform="" if edge.transforms_at_producer else edge.transform or "",
            apart=edge.apart,
        )

    def _input_rebinding(self, edge: Edge) -> stage_pb2.InputRebinding:
        first_rows = carried_rows(edge, self._states[edge.producer].first_rows)
        return stage_pb2.InputRebinding(binding=self._input_binding(edge), first_rows=first_rows)

    def _output_binding(self, edge: Edge) -> stage_pb2.OutputBinding:
        consumer = self._states[edge.consumer].replica
        return stage_pb2.OutputBinding(
            edge=edge.name,
            consumer=consumer.name,
            endpoint=consumer.endpoint,
            server_name=consumer.server_name,
            connector=number_of(edge.connector),
            attempt=attempt_of(edge, self._states),
            policy=policy_to_wire(edge.policy),
            tensors=edge.tensors,
            tokens=stage_pb2.TokenSelection.Value(f"TOKEN_SELECTION_{edge.tokens.upper()}"),
            transform=(edge.transforms_at_producer and edge.transform) or "",
        )

    def _input(self, state: StepState) -> request_pb2.Input:
        """Returns the request's input, without the negative prompt if the stage does not support negative prompts."""
        given = self._request.input
        if state.step.stage.signature.negative_prompt or not given.negative_prompt:
            return given
        accepted = request_pb2.Input()
        accepted.CopyFrom(given)
        accepted.ClearField("negative_prompt")
        return accepted

    def _show_progress(self, state: StepState, progress: stage_pb2.StepProgress) -> None:
        # A restarted stage repeats earlier progress, which the client must not see again.
        if progress.engine_steps > state.shown_steps or not state.restarts:
            state.shown_steps = max(state.shown_steps, progress.engine_steps)
            shown = orchestrator_pb2.RequestProgress(stage=state.name, index=self._request.index, progress=progress)
            self._record.add(orchestrator_pb2.GenerateResponse(progress=shown))

    def _take_accepted(self, state: StepState, accepted: stage_pb2.StepAccepted, notes: StepNotes) -> None:
        # A second acceptance is ignored.
        if state.phase is Phase.STARTING:
            notes.note_accepted(accepted)
            state.phase = Phase.RUNNING
            self._restart_replaced_peers(state, accepted.flow_attempts)
            self._changed.fire()

    def _restart_replaced_peers(self, state: StepState, flow_attempts: Mapping[str, int]) -> None:
        """Restarts the peers of a stage that another orchestrator has replaced before this one continued.

        `flow_attempts` is the attempt in which each flow of the stage's step is bound, by edge name. To the other
        orchestrator, these peers were lost. They may run, and then wait for a flow that no producer opens.
        """
        for edge in find_overtaken(self._route, self._states, state.name, flow_attempts):
            state.bound = {**state.bound, edge.name: flow_attempts[edge.name]}
            other = self._states[edge.producer if edge.consumer == state.name else edge.consumer]
            error = UnavailableError(f"another orchestrator has replaced stage {other.name!r}", reason=NOT_REBOUND)
            if other.phase is not Phase.FINISHED:
                self._failures.add(other, other.attempt, error)
            elif other.name == edge.producer:
                self._failures.require_fresh(other.name, error)

    def _take_output(self, state: StepState, output: request_pb2.Output, notes: StepNotes) -> None:
        if output.WhichOneof("content"):
            notes.note_output()
        tensor, begin = output.name, output.position
        # An attempt that resumed from a checkpoint continues at the checkpoint's positions.
        resumed = state.resumed.outputs.get(tensor, 0) if state.resumed is not None else 0
        due = state.positions.get(tensor, resumed)
        if begin != due or state.phase is Phase.FINISHED:
            detail = f"where {due} was expected" if due not in (begin, _ENDED) else "after it had finished"
            message = f"stage {state.name!r} sent output {tensor!r} from position {begin} {detail}; see its log"
            self._failures.add_final(state.name, InternalError(message, reason="OUTPUT_OUT_OF_ORDER"))
            return
        state.positions[tensor] = _ENDED if output.HasField("finish") else begin + length_of(output)
        output.name, output.index = self._output_names[state.name].get(tensor, ""), self._request.index
        if output.name:
            _check_content(output, self._route.outputs[output.name], stage=state.name)
            self._record.add_output(output)

    def _take_checkpoint(self, state: StepState, checkpoint: stage_pb2.Checkpoint) -> None:
        useful = is_checkpoint_useful(self._route, self._states, state.name, checkpoint.rows)
        if useful and self.can_resume_from(checkpoint, max_bytes=state.replica.max_message_bytes):
            state.store_checkpoint(checkpoint)


def _check_content(output: request_pb2.Output, declared: PipelineOutput, *, stage: str) -> None:
    """Raises InternalError (INVALID_RESULT) if a stage sends an output as something other than its signature declares.

    Stages of Stagemesh check their results themselves, and external stages may not.
    """
    content, problem = output.WhichOneof("content"), ""
    if declared.stored or declared.file_type:
        file = "file" if declared.stored else "media"
        expected: Sequence[str] = (file, "image") if declared.kind == "image" else (file,)
    else:
        expected = _CONTENTS[declared.kind]
    if content is not None and content not in expected:
        problem = f"it is {content}, and must be {expected[0]}"
    elif content in ("audio", "tensor"):
        tensor = output.audio.samples if content == "audio" else output.tensor
        try:
            dtype, shape = checked_layout(tensor, size_bytes=len(tensor.inline))
        except InvalidChunkError as exc:
            problem = exc.message
        else:
            is_audio = dtype == np.float32 and len(shape) in (1, 2)
            if content == "audio" and not (is_audio and output.audio.sample_rate_hz == declared.sample_rate_hz):
                problem = f"it is {dtype}{list(shape)} at {output.audio.sample_rate_hz} Hz"
    if problem:
        text = f"stage {stage!r} sent output {output.name!r} of kind {declared.kind}, but {problem}; correct the stage"
        raise InternalError(text, reason="INVALID_RESULT", metadata={"tensor": declared.tensor})


def may_continue(error: StagemeshError) -> bool:
    """Returns whether another orchestrator may continue a request that ends here with `error`.

    The client has disconnected and may have called the other orchestrator, or that orchestrator has restarted a stage.
    """
    return error.reason in (CALLER_DISCONNECTED, StaleAttemptError.default_reason)


async def follow_step(replica: Replica, request: bytes, *, deadline_s: float, take: TakeEvent) -> None:
    """Executes a step until it ends. Calls `take` exactly once with each event. The first event is the acceptance.

    - `request` is a serialized ExecuteStepRequest. The serialized form is retained until the step ends, because a
      parsed message would need several times as much memory.
    - `deadline_s` is a time in seconds on the event loop's clock.

    If the connection breaks, calls the replica again. The replica then replays the step's events, or rejects the call
    if it does not know the step.

    Raises the error with which the step failed, or the error that `take` raised. Raises UnavailableError (NOT_ACCEPTED)
    if the replica does not accept the step within ACCEPT_S seconds, UnavailableError (REPLICA_LOST) if the replica
    remains unreachable for REATTACH_S seconds, and InternalError if _MOST_BREAKS calls in a row break without a new
    event although the replica is reachable.
    """
    loop = asyncio.get_running_loop()
    relay = _EventRelay(take, stage=replica.stage)
    while True:
        try:
            async with asyncio.timeout(ACCEPT_S) as relay.accept_timeout:
                relay.replayed = 0
                message = stage_pb2.ExecuteStepRequest.FromString(request)
                message.attach_only |= relay.passed > 0
                running = replica.client.execute(message, timeout_s=max(0.0, deadline_s - loop.time()), take=relay.take)
                del message
                await running
        except TimeoutError as exc:
            raise UnavailableError(
                f"stage {replica.stage!r} (replica {replica.name} at {replica.endpoint}) did not accept the request "
                f"within {ACCEPT_S:.0f} s; try again, and see its log",
                reason="NOT_ACCEPTED",
            ) from exc
        except StagemeshError as exc:
            if exc.reason != REPLICA_LOST:
                raise
            relay.count_break(exc)
            if not await _answers_again(replica, until_s=loop.time() + REATTACH_S):
                if replica.end_cause is None:
                    replica.doubt(exc)
                raise
        else:
            if not relay.replayed:
                raise _acceptance_missing(replica.stage)
            return
        finally:
            # A timeout refers to its task. The frames of a cancelled task would otherwise keep the task alive.
            relay.accept_timeout = None


class _EventRelay:
    """Passes each event of a step to `take` exactly once, although each repeated call receives all events again."""

    def __init__(self, take: TakeEvent, *, stage: str) -> None:
        self._take, self._stage = take, stage
        self.passed = 0
        """The number of events that were passed to `take`."""
        self._breaks = 0
        """The number of calls in a row that broke without a new event."""
        self.replayed = 0
        """The number of events that the current call has received."""
        self.accept_timeout: asyncio.Timeout | None = None
        """The timeout for the step's acceptance, or None if the current call has received its first event."""

    def take(self, event: stage_pb2.ExecuteStepResponse) -> None:
        self.replayed += 1
        if self.accept_timeout is not None:
            if event.WhichOneof("event") != "accepted":
                raise _acceptance_missing(self._stage)
            self.accept_timeout.reschedule(None)
            self.accept_timeout = None
        if self.replayed > self.passed:
            self.passed, self._breaks = self.replayed, 0
            self._take(event)

    def count_break(self, error: StagemeshError) -> None:
        """Counts a call that broke with `error`. Raises InternalError if _MOST_BREAKS calls broke without a new event.

        A stage that ends its calls with a status without a reason would otherwise be called until the deadline.
        """
        self._breaks += 1
        if self._breaks == _MOST_BREAKS:
            problem = f"{self._breaks} calls of stage {self._stage!r} in a row broke without a new event; see its log"
            raise InternalError(f"{problem}; the last one: {error.message}", metadata=error.metadata) from error


def _acceptance_missing(stage: str) -> InternalError:
    return InternalError(f"stage {stage!r} did not report that it accepted the request; see its log")


async def _answers_again(replica: Replica, *, until_s: float) -> bool:
    """Returns whether the process of a replica that became unreachable answers before a time on the event loop's clock.

    Returns False if the replica has ended. Raises the replica's end cause if a different process answers: the step is
    unknown to this process, which would start the step from the beginning.
    """
    loop, retries = asyncio.get_running_loop(), _PAUSES.retries()
    while replica.end_cause is None and (left_s := until_s - loop.time()) > 0:
        await asyncio.sleep(min(left_s, retries.next_s()))
        with suppress(StagemeshError):
            description = await replica.client.describe(timeout_s=max(0.0, until_s - loop.time()))
            if description.incarnation == replica.incarnation:
                return True
            replica.end(replica.loss("restarted while it ran the request", reason="REPLICA_RESTARTED"))
        if replica.end_cause is not None:
            raise replica.end_cause
    return False
