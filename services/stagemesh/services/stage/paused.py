"""Requests that were paused here, kept until they go on or others need the room."""

from collections import OrderedDict
from dataclasses import replace

from stagemesh.services.engines.base import Checkpoint
from stagemesh.services.stage.order import StepOrder

MAX_BYTES = 1 << 30


class PausedRequests:
    """The latest state of each; the oldest go first where they take more than `MAX_BYTES`."""

    def __init__(self) -> None:
        self._states: OrderedDict[str, Checkpoint] = OrderedDict()

    def keep(self, request_id: str, state: Checkpoint) -> None:
        """Instead of an earlier one of the same request."""
        self._states[request_id] = state
        self._states.move_to_end(request_id)
        while len(self._states) > 1 and sum(map(_size_bytes, self._states.values())) > MAX_BYTES:
            self._states.popitem(last=False)

    def forget(self, request_id: str) -> None:
        """The request is over."""
        self._states.pop(request_id, None)

    def completed(self, order: StepOrder) -> StepOrder:
        """The order with the state that it names by its steps alone, where that is here."""
        resume_from = order.task.resume_from
        if resume_from is None or resume_from.tensors or resume_from.token_ids:
            return order
        kept = self._states.get(order.request_id)
        if kept is None or kept.steps != resume_from.steps:
            return order
        return replace(order, task=replace(order.task, resume_from=kept))


def _size_bytes(state: Checkpoint) -> int:
    return sum(tensor.nbytes for tensor in state.tensors.values())
