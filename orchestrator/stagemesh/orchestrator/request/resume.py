"""Leaves out what a caller of a request has already: from which orchestrator it came does not matter."""

from collections.abc import Mapping

from stagemesh.orchestrator.request.output_position import after, length_of
from stagemesh.v1 import request_pb2


class Resumption:
    """For one caller that hears a request's outputs from their first piece on.

    An output that `next_positions` names goes by that, whatever its pieces were when the caller got them; any other by
    `next_seqs`.
    """

    def __init__(self, *, next_seqs: Mapping[str, int], next_positions: Mapping[str, int]) -> None:
        self._next_seqs = dict(next_seqs)
        self._left = dict(next_positions)
        """Of each output, how much is still to be left out."""

    @property
    def leaves_out(self) -> bool:
        """Whether there is anything to be left out, still."""
        return bool(self._next_seqs) or any(self._left.values())

    def rest_of(self, output: request_pb2.Output) -> request_pb2.Output | None:
        """What the caller lacks of the next piece: often all of it, or nothing."""
        left = self._left.get(output.name)
        if left is None:
            return output if output.seq >= self._next_seqs.get(output.name, 0) else None
        if not left:
            return output
        self._left[output.name] = max(0, left - length_of(output))
        return after(output, left)
