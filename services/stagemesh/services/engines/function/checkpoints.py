"""The checkpoints of a function stage's requests.

A checkpoint contains the function's state, the function's name, and the number of input rows that the state includes.
A resumed request receives all of its inputs again, and drops these rows.
"""

from typing import TypeVar

import numpy as np

from stagemesh.common.errors import InvalidRequestError
from stagemesh.common.tensors import Array, Tensors
from stagemesh.connectors.edge import Packet
from stagemesh.connectors.flow.packet_queue import ReceivedRows
from stagemesh.services.engines.base import Checkpoint

T = TypeVar("T")

_FUNCTION = "function"
_STATE, _INPUT = "state.", "input."


class RequestCheckpoints:
    """Counts the inputs of one request, decides when its state is saved, and makes its checkpoints.

    `function` is the name of the function. `interval_rows` is the number of rows between two checkpoints, or 0 for no
    checkpoints. `resumed` is the checkpoint from which the request resumes, or None.

    Raises InvalidRequestError (INVALID_CHECKPOINT) if the checkpoint is not one of this function.
    """

    def __init__(self, *, function: str, interval_rows: int, resumed: Checkpoint | None) -> None:
        self._name: Array = np.frombuffer(function.encode(), np.uint8)
        self._interval = interval_rows
        self._resumed = resumed
        if resumed is not None and not np.array_equal(resumed.tensors.get(_FUNCTION, ()), self._name):
            raise invalid_checkpoint(f"does not contain a state of the function {function}")
        self._rows = ReceivedRows(edge="input", counted=_input_rows(resumed) if resumed is not None else {})
        self._rows.begin({})
        self._saved_rows = self._row_count

    @property
    def state(self) -> Tensors:
        """The saved state from which the request resumes."""
        assert self._resumed is not None, "the request starts from its beginning"
        return _with_prefix(_STATE, self._resumed.tensors)

    @property
    def is_due(self) -> bool:
        """Whether the state of the request must be saved now.

        Inputs with left context are not counted, because their rows depend on how the producer has cut its chunks.
        """
        if not self._interval or self._rows.is_repeating or self._rows.has_context:
            return False
        return self._row_count // self._interval > self._saved_rows // self._interval

    def new_part(self, packet: Packet) -> Packet | None:
        """Returns the rows of an input that the checkpoint does not include, or None if it includes all of them."""
        return self._rows.new_part(packet)

    def check_end(self) -> None:
        """Raises InvalidRequestError if the inputs have ended before the checkpoint."""
        if self._rows.is_repeating:
            raise invalid_checkpoint("includes more input rows than the request has")

    def make(self, state: Tensors, *, steps: int) -> Checkpoint:
        """Returns the checkpoint of the request after `steps` inputs. `state` is the function's state."""
        self._saved_rows = self._row_count
        tensors: dict[str, Array] = {_FUNCTION: self._name}
        tensors |= {_STATE + name: tensor for name, tensor in state.items()}
        tensors |= {_INPUT + name: np.array(rows) for name, rows in self._rows.counted.items()}
        return Checkpoint(steps, tensors=tensors)

    @property
    def _row_count(self) -> int:
        return max(self._rows.counted.values(), default=0)


def invalid_checkpoint(problem: str) -> InvalidRequestError:
    """Returns the error for a checkpoint with a `problem`."""
    return InvalidRequestError(
        f"the checkpoint {problem}; send a checkpoint of this request back unchanged, or omit resume_from",
        reason="INVALID_CHECKPOINT",
    )


def _input_rows(checkpoint: Checkpoint) -> dict[str, int]:
    try:
        rows = {name: int(each) for name, each in _with_prefix(_INPUT, checkpoint.tensors).items()}
    except (TypeError, ValueError) as exc:
        raise invalid_checkpoint(f"has damaged numbers of input rows: {exc}") from exc
    if not any(rows.values()) or min(rows.values()) < 0:
        raise invalid_checkpoint("includes no input rows")
    return rows


def _with_prefix(prefix: str, tensors: Tensors) -> dict[str, Array]:
    return {name.removeprefix(prefix): each for name, each in tensors.items() if name.startswith(prefix)}
