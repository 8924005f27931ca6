"""The journal of a step's events, and the states from which paused requests resume on another replica.

The total size of the stored states is limited.
"""

from collections import OrderedDict
from collections.abc import AsyncGenerator, Callable, Mapping
from dataclasses import replace

from stagemesh.common.errors import NotFoundError, UnavailableError
from stagemesh.common.notification import Journal
from stagemesh.connectors.flow.sent_chunks import replay_packet
from stagemesh.connectors.packets import EdgeKey, Packet
from stagemesh.services.engines.base import Checkpoint
from stagemesh.services.stage.step.spec import StepSpec, checkpoint_to_wire
from stagemesh.v1 import stage_pb2

MAX_KEPT_BYTES = 1 << 30
MAX_EVENT_BYTES = 6 << 20
"""The maximum total size of the tensors and token ids in a checkpoint event, in bytes. If they are larger, the event
omits them, and they can be read from `PausedStates` instead. The limit leaves space for the request's input, because
the message that resumes a request contains both and has at most `MAX_MESSAGE_BYTES` bytes."""

_TOKEN_BYTES = 8


class PausedStates:
    """The latest paused state of each request. Drops the oldest states while the total size of all states exceeds
    `MAX_KEPT_BYTES`, but always retains the newest state.
    """

    def __init__(self) -> None:
        self._states: OrderedDict[str, Checkpoint] = OrderedDict()

    def keep(self, request_id: str, state: Checkpoint) -> None:
        """Stores the state of a request. Replaces an earlier state of the same request."""
        self._states[request_id] = state
        self._states.move_to_end(request_id)
        while len(self._states) > 1 and sum(map(size_bytes, self._states.values())) > MAX_KEPT_BYTES:
            self._states.popitem(last=False)

    def forget(self, request_id: str) -> None:
        """Drops the state of a request that has ended."""
        self._states.pop(request_id, None)

    def with_state(self, spec: StepSpec) -> StepSpec:
        """Returns a copy of the spec that contains the request's stored state, or the unchanged spec.

        Adds the state only if the spec resumes from a checkpoint without tensors and token ids, no edge delivers the
        state, and the stored state has the same number of completed steps as the checkpoint.
        """
        resume_from, kept = spec.task.resume_from, self._states.get(spec.request_id)
        if resume_from is None or kept is None or kept.steps != resume_from.steps:
            return spec
        if resume_from.tensors or resume_from.token_ids or spec.takes_state:
            return spec
        return replace(spec, task=replace(spec.task, resume_from=kept))

    def read(self, key: EdgeKey) -> AsyncGenerator[stage_pb2.GetChunkResponse]:
        """Yields the messages of a flow with one chunk: the stored state of the request in `key`. Raises NotFoundError
        if no state of the request is stored.
        """
        state = self._states.get(key.request_id)
        if state is None:
            raise NotFoundError(f"no state of request {key.request_id} is stored here", reason="UNKNOWN_FLOW")
        return replay_packet(key, Packet(state.tensors, {"engine_steps": state.steps}))


def size_bytes(state: Checkpoint) -> int:
    """Returns the total size of a state's tensors and token ids, in bytes."""
    return sum(tensor.nbytes for tensor in state.tensors.values()) + _TOKEN_BYTES * len(state.token_ids)


def without_large_state(state: Checkpoint) -> Checkpoint:
    """Returns the unchanged checkpoint if its tensors and token ids have at most `MAX_EVENT_BYTES` bytes. Otherwise
    returns a copy without them.
    """
    return state if size_bytes(state) <= MAX_EVENT_BYTES else without_state(state)


def without_state(state: Checkpoint) -> Checkpoint:
    """Returns a copy of the checkpoint without tensors and token ids. The copy retains the numbers of steps, outputs
    and rows.
    """
    return replace(state, tensors={}, token_ids=())


def drained_error(where: Mapping[str, str]) -> UnavailableError:
    """Returns the error for a step that must continue on another replica, because this replica is being drained.
    `where` contains the names of this stage and replica.
    """
    return UnavailableError(
        f"replica {where['replica']} of stage {where['stage']} is drained and hands its steps over to other replicas",
        reason="DRAINED",
        metadata=where,
    )


class StepJournal:
    """Writes the events of one step. At most one of them is a checkpoint with its state.

    A step whose spec has a trace also reports its spans.
    """

    def __init__(self, spec: StepSpec, states: PausedStates, *, on_abandoned: Callable[[], None]) -> None:
        """`states` retains the states that are too large for an event.

        `on_abandoned` is called when the journal has lost its last reader before it was closed.
        """
        self.journal = Journal[bytes](on_abandoned=on_abandoned)
        """The serialized ExecuteStepResponses. Message objects would need ten times as much memory."""
        self._request_id, self._trace, self._states = spec.request_id, spec.trace, states
        self._checkpoint: tuple[int, Checkpoint] | None = None
        """The index of the newest checkpoint in the journal, and a copy of this checkpoint without its state. The copy
        later replaces the checkpoint. None if the journal contains no checkpoint with a state."""

    def append(self, event: stage_pb2.ExecuteStepResponse) -> int:
        """Appends an event and returns its index."""
        return self.journal.append(event.SerializeToString())

    def append_accepted(self, *, queue_position: int) -> None:
        """Appends the first event of the step."""
        accepted = stage_pb2.StepAccepted(queue_position=queue_position)
        self.append(stage_pb2.ExecuteStepResponse(accepted=accepted))

    def update_accepted(self, flow_attempts: Mapping[str, int]) -> None:
        """Replaces the first event, which then states the attempts of the step's flows by edge name.

        Does nothing if there is no event yet: the step has just begun, or has failed before it was accepted.
        """
        if not self.journal.items:
            return
        event = stage_pb2.ExecuteStepResponse.FromString(self.journal.items[0])
        event.accepted.flow_attempts.update(flow_attempts)
        self.journal.replace(0, event.SerializeToString())

    def append_spans(self, *, at_least: int = 1) -> None:
        """Appends the new spans of the step if there are at least `at_least`, and if the step is traced."""
        if self._trace is not None and len(self._trace) >= at_least:
            self.append(stage_pb2.ExecuteStepResponse(spans=self._trace.take(), ignorable=True))

    def append_checkpoint(self, state: Checkpoint) -> None:
        """Appends a checkpoint. The checkpoint covers all outputs that the engine emitted before it."""
        journaled = without_large_state(state)
        if journaled is not state:
            self._states.keep(self._request_id, state)
        self.clear_checkpoint()
        event = stage_pb2.ExecuteStepResponse(checkpoint=checkpoint_to_wire(journaled))
        self._checkpoint = self.append(event), without_state(state)

    def clear_checkpoint(self) -> None:
        """Replaces the newest checkpoint in the journal with a copy without the state, to free memory.

        Callers that subscribe later resume from a newer checkpoint or do not need one.
        """
        if self._checkpoint is not None:
            index, placeholder = self._checkpoint
            event = stage_pb2.ExecuteStepResponse(checkpoint=checkpoint_to_wire(placeholder))
            self.journal.replace(index, event.SerializeToString())
            self._checkpoint = None
