"""States that requests can go on from, kept here until they do or others need the room."""

from collections import OrderedDict
from collections.abc import AsyncGenerator
from dataclasses import replace

from stagemesh.common.errors import NotFoundError
from stagemesh.connectors.edge import EdgeKey, Packet
from stagemesh.connectors.stream.replay import replay_packet
from stagemesh.services.engines.base import Checkpoint
from stagemesh.services.stage.step.spec import StepSpec
from stagemesh.v1 import stage_pb2

MAX_KEPT_BYTES = 1 << 30
MAX_TOLD_BYTES = 6 << 20
"""A state that takes more is not told with its event; it is read from here. A message that resumes from one holds an
input besides (`MAX_MESSAGE_BYTES`)."""

_TOKEN_BYTES = 8


class PausedStates:
    """The latest of each request; the oldest go first where they take more than `MAX_KEPT_BYTES`."""

    def __init__(self) -> None:
        self._states: OrderedDict[str, Checkpoint] = OrderedDict()

    def keep(self, request_id: str, state: Checkpoint) -> None:
        """Instead of an earlier one of the same request."""
        self._states[request_id] = state
        self._states.move_to_end(request_id)
        while len(self._states) > 1 and sum(map(size_bytes, self._states.values())) > MAX_KEPT_BYTES:
            self._states.popitem(last=False)

    def forget(self, request_id: str) -> None:
        """The request is over."""
        self._states.pop(request_id, None)

    def completed(self, order: StepSpec) -> StepSpec:
        """The order with the state that it names by its steps alone, where that is here."""
        resume_from = order.task.resume_from
        if resume_from is None or resume_from.tensors or resume_from.token_ids or order.takes_state:
            return order
        kept = self._states.get(order.request_id)
        if kept is None or kept.steps != resume_from.steps:
            return order
        return replace(order, task=replace(order.task, resume_from=kept))

    def read(self, key: EdgeKey) -> AsyncGenerator[stage_pb2.GetChunkResponse]:
        """A request's state as a flow of one chunk; raises NotFoundError where it is not here."""
        state = self._states.get(key.request_id)
        if state is None:
            raise NotFoundError(f"no state of request {key.request_id} is kept here", reason="UNKNOWN_FLOW")
        return replay_packet(key, Packet(state.tensors, {"steps": state.steps}))


def size_bytes(state: Checkpoint) -> int:
    """What it takes in memory."""
    return sum(tensor.nbytes for tensor in state.tensors.values()) + _TOKEN_BYTES * len(state.token_ids)


def told(state: Checkpoint) -> Checkpoint:
    """The state as its event says it: a large one only by where it is."""
    return state if size_bytes(state) <= MAX_TOLD_BYTES else place_of(state)


def place_of(state: Checkpoint) -> Checkpoint:
    """Where a state is, without what it takes to go on from it."""
    return replace(state, tensors={}, token_ids=())
