"""Relays the events of one step from its replica to the request's record, each event once."""

import asyncio
from contextlib import suppress

from stagemesh.common.backoff import Backoff
from stagemesh.common.errors import InternalError, StagemeshError, UnavailableError
from stagemesh.common.notification import Notifier
from stagemesh.common.output_position import Position
from stagemesh.orchestrator.fleet.replica import Replica
from stagemesh.orchestrator.fleet.replica_client import REPLICA_LOST
from stagemesh.orchestrator.fleet.step_stream import TakeEvent
from stagemesh.orchestrator.request.failures import Failures
from stagemesh.orchestrator.request.record import RequestRecord
from stagemesh.orchestrator.request.recovery import Graph, Phase, States, is_checkpoint_useful
from stagemesh.orchestrator.request.step_requests import StepRequests
from stagemesh.orchestrator.request.step_state import StepState
from stagemesh.v1 import stage_pb2

ACCEPT_S = 5.0
"""Maximum time in seconds from sending a step to its acceptance by the replica."""
REATTACH_S = 2.0
"""Maximum time in seconds to reconnect to an unreachable replica before its steps are run on another replica.

A replica retains the steps of a broken connection for longer than this.
"""
DRAINED = "DRAINED"
"""The error reason of a step that a draining replica has paused. The step continues on another replica."""
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 0.4


class StepEvents:
    """Processes the events that replicas send for a request's steps.

    Updates the steps' states and the request's record.
    """

    def __init__(
        self,
        graph: Graph,
        states: States,
        *,
        requests: StepRequests,
        record: RequestRecord,
        failures: Failures,
        changed: Notifier,
    ) -> None:
        self._graph, self._states = graph, states
        self._requests, self._record, self._failures, self._changed = requests, record, failures, changed
        self._delivered = Position()
        """The length of each pipeline output in the record, for example in tokens or audio samples."""

    def take(self, state: StepState, attempt: int, event: stage_pb2.ExecuteStepResponse) -> None:
        """Applies an event of an attempt. Ignores the event if a newer attempt has replaced the attempt.

        Raises UnavailableError (DRAINED) if the replica has paused the step.
        """
        if state.attempt != attempt:
            # A newer attempt has replaced this attempt, which will soon be cancelled.
            return
        assert state.notes is not None, "its replica is chosen"
        match event.WhichOneof("event"):
            case "output":
                state.notes.note_output()
                self._take_output(state, event)
            case "progress":
                state.notes.note_progress(event.progress)
                # A restarted stage repeats earlier progress, which the client must not see again.
                if event.progress.steps > state.shown_steps or not state.restarts:
                    state.shown_steps = max(state.shown_steps, event.progress.steps)
                    self._record.add_progress(state.name, event.progress)
            case "accepted" if state.phase is Phase.STARTING:
                state.notes.note_accepted(event.accepted)
                state.phase = Phase.RUNNING
                self._record.note_started()
                self._changed.fire()
            case "checkpoint":
                self._take_checkpoint(state, event.checkpoint)
            case "finished":
                state.notes.note_finished(event.finished)
                self.finish(state, event.finished)
            case "paused":
                self._take_checkpoint(state, event.paused.checkpoint)
                raise UnavailableError(
                    f"replica {state.replica.name} of stage {state.name!r} drains; its steps continue elsewhere",
                    reason=DRAINED,
                )
            case _:
                # A second acceptance, or an event of a newer API version, is ignored.
                pass

    def finish(self, state: StepState, finished: stage_pb2.StepFinished) -> None:
        """Marks a stage as finished, and releases its replica.

        Also called for a lost stage if no stage needs its results any longer.
        """
        state.phase = Phase.FINISHED
        state.release_replica()
        if state.notes is not None:
            state.notes.end(None)
        self._record.note_finished(state.name, finished)
        self._changed.fire()

    def _take_output(self, state: StepState, event: stage_pb2.ExecuteStepResponse) -> None:
        output = event.output
        tensor, seq = output.name, output.seq
        # An attempt that resumed from a checkpoint continues the checkpoint's numbers.
        due = state.next_seqs.get(tensor, seq if state.resumed is not None else 0)
        if seq != due or state.phase is Phase.FINISHED:
            detail = f"where {due} was expected" if seq != due else "after it had finished"
            message = f"stage {state.name!r} sent fragment {seq} of output {tensor!r} {detail}; see its log"
            self._failures.add_final(state.name, InternalError(message, reason="OUTPUT_OUT_OF_ORDER"))
            return
        state.next_seqs[tensor] = due + 1
        output.name = state.step.output_names.get(tensor, "")
        rest = self._delivered.remainder(output, replayed=state.position) if output.name else None
        if rest is not None:
            self._record.add_output(rest.name, rest)

    def _take_checkpoint(self, state: StepState, checkpoint: stage_pb2.Checkpoint) -> None:
        useful = is_checkpoint_useful(self._graph, self._states, state.name, checkpoint.rows)
        if useful and self._requests.can_resume_from(checkpoint):
            state.store_checkpoint(checkpoint)


async def follow_step(replica: Replica, request: bytes, *, stage: str, deadline_s: float, take: TakeEvent) -> None:
    """Executes a step to its end, and calls `take` exactly once for each event. The first event is the acceptance.

    - `request` is a serialized ExecuteStepRequest. It is retained until the step ends, and a parsed message would need
      several times as much memory.
    - `deadline_s` is a time in seconds on the event loop's clock.

    If the connection breaks, calls the replica again. The replica then replays the step's events.

    Raises the error with which the step failed, or the error that `take` raised. Raises UnavailableError (NOT_ACCEPTED)
    if the replica does not accept the step within ACCEPT_S, and UnavailableError (REPLICA_LOST) if the replica remains
    unreachable for REATTACH_S.
    """
    loop = asyncio.get_running_loop()
    relay, broken_s = _EventRelay(take, stage=stage), 0.0
    backoff = Backoff(first_s=_FIRST_PAUSE_S, longest_s=_LONGEST_PAUSE_S)
    while True:
        try:
            async with asyncio.timeout(ACCEPT_S) as relay.accept_timeout:
                relay.replayed = Position()
                message = stage_pb2.ExecuteStepRequest.FromString(request)
                running = replica.client.execute(message, timeout_s=max(0.0, deadline_s - loop.time()), take=relay.take)
                del message
                await running
        except TimeoutError as exc:
            raise _not_accepted(replica, stage=stage) from exc
        except StagemeshError as exc:
            if exc.reason != REPLICA_LOST:
                raise
            if relay.has_events:
                broken_s = 0.0
                backoff.reset()
            broken_s = broken_s or loop.time()
            if replica.end_cause is not None or loop.time() - broken_s >= REATTACH_S:
                raise
            await asyncio.sleep(backoff.next_s())
            await _check_incarnation(replica, stage=stage, timeout_s=max(0.0, broken_s + REATTACH_S - loop.time()))
        else:
            if not relay.has_events:
                raise _acceptance_missing(stage)
            return
        finally:
            # A timeout refers to its task. If the task is cancelled, its frames would keep it alive.
            relay.accept_timeout = None


class _EventRelay:
    """Passes each event of a step to `take` exactly once, although each call of the step replays all events."""

    def __init__(self, take: TakeEvent, *, stage: str) -> None:
        self._take, self._stage = take, stage
        self._passed = Position()
        self.replayed = Position()
        """The events that the current call has received so far."""
        self.accept_timeout: asyncio.Timeout | None = None
        """The timeout for the acceptance. None after the first event of the current call."""

    @property
    def has_events(self) -> bool:
        """Whether the current call has received an event."""
        return bool(self.replayed.counts)

    def take(self, event: stage_pb2.ExecuteStepResponse) -> None:
        new = self._passed.remainder(event, replayed=self.replayed)
        if self.accept_timeout is not None:
            if event.WhichOneof("event") != "accepted":
                raise _acceptance_missing(self._stage)
            self.accept_timeout.reschedule(None)
            self.accept_timeout = None
        if new is not None:
            self._take(new)


def _acceptance_missing(stage: str) -> InternalError:
    return InternalError(f"stage {stage!r} did not report that it accepted the request; see its log")


def _not_accepted(replica: Replica, *, stage: str) -> UnavailableError:
    return UnavailableError(
        f"stage {stage!r} (replica {replica.name} at {replica.endpoint}) did not accept the request within "
        f"{ACCEPT_S:.0f} s; try again, and see its log",
        reason="NOT_ACCEPTED",
    )


async def _check_incarnation(replica: Replica, *, stage: str, timeout_s: float) -> None:
    """Raises the replica's end cause if the replica has ended.

    First asks the address for its incarnation. If a different process answers, the replica has ended. That process does
    not know the step, and would start the step again.
    """
    with suppress(StagemeshError):
        description = await replica.client.describe(timeout_s=timeout_s)
        if description.incarnation != replica.incarnation:
            restarted = UnavailableError(
                f"replica {replica.name} of stage {stage!r} at {replica.endpoint} restarted while it ran the request",
                reason="REPLICA_RESTARTED",
                metadata={"stage": stage, "replica": replica.name},
            )
            replica.end(restarted)
    if replica.end_cause is not None:
        raise replica.end_cause
