"""Chooses the sizes of the first chunks of each request, so that its audio does not run dry.

The first chunk is short, so that audio begins early. A chunk of any size occupies the consumer for about the same time,
so that a ramp of tiny chunks costs more than the audio lasts. Each later chunk therefore is the largest one that is
ready before the audio of the chunks before it has been played.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

from stagemesh.orchestrator.planning.planner import Plan
from stagemesh.orchestrator.spec.model import Edge
from stagemesh.orchestrator.spec.schema import FramesEntry
from stagemesh.v1 import request_pb2

_MARGIN_S = 0.005
"""The time by which a chunk must be ready earlier. A chunk spends it between its stages."""
_SHARED_CALLS = 2
"""The number of other requests' calls for which a chunk may have to wait. 2 makes gaps rare at 80 % of the capacity."""
_MAX_STEPS = 32
"""The maximum number of chunks of a ramp. Its last size is used for all later chunks."""
_MAX_SHARE = 1 / 8
"""The maximum duration of a call, as a share of its audio's duration, at which a size below the largest is repeated."""


@dataclass(frozen=True)
class Pace:
    """The measured speed of the two stages of an edge."""

    frame_interval_s: float
    """The time in which the producer makes one frame, in seconds."""
    frame_audio_s: float
    """The duration of the audio that the consumer makes from one frame, in seconds."""
    call_costs_s: Mapping[int, float]
    """The duration of the consumer's calls in seconds, by the maximum number of frames of a call. Not empty."""
    is_shared: bool = False
    """Whether the consumer runs other requests, so that a chunk may wait until one of their calls has ended."""

    def cost_s(self, frames: int) -> float:
        """Returns the estimated duration of a call with this number of frames, in seconds.

        A call takes no longer than one with more frames, even if an older measurement says so. A call with more frames
        than any measured one takes longer in proportion.
        """
        largest = max(self.call_costs_s)
        costs_s = [cost_s for most, cost_s in self.call_costs_s.items() if most >= frames]
        return min(costs_s) if costs_s else self.call_costs_s[largest] * frames / largest


def choose_sizes(sizes: Sequence[int], pace: Pace, *, context: int = 0) -> Sequence[int]:
    """Returns the numbers of frames of the chunks of a flow. The last one repeats.

    - `sizes` are the allowed numbers, ascending.
    - `context` is the number of preceding frames that each chunk repeats.

    The first chunk has the smallest size after which no chunk is late, or the largest size if there is none.
    """
    ramps = (climb(sizes[index:], pace, context=context) for index in range(len(sizes)))
    return next((ramp for ramp in ramps if ramp is not None), sizes[-1:])


def climb(sizes: Sequence[int], pace: Pace, *, context: int = 0) -> Sequence[int] | None:
    """Returns the sizes of the chunks after a first one of `sizes[0]` frames. Returns None if a chunk would be late.

    Each chunk has the largest size that is in time, and is larger than the one before it. Only the largest size, and
    sizes whose calls take little of the consumer's time, are repeated. When a chunk is complete, a shared consumer may
    have to finish calls of the largest size. The first chunk is assumed not to wait, because the audio of the others is
    then due early.
    """
    total, chosen = sizes[0], [sizes[0]]
    wait_s = _MARGIN_S + (_SHARED_CALLS * pace.cost_s(sizes[-1] + context) if pace.is_shared else 0.0)
    ready_s = began_s = total * pace.frame_interval_s + pace.cost_s(total)
    while len(chosen) < _MAX_STEPS:
        ready_by_s: dict[int, float] = {}
        for size in sizes:
            cost_s = pace.cost_s(size + min(context, total))
            is_allowed = size == sizes[-1] or cost_s <= _MAX_SHARE * size * pace.frame_audio_s
            if size > chosen[-1] or (size == chosen[-1] and is_allowed):
                ready_by_s[size] = max(ready_s, (total + size) * pace.frame_interval_s) + wait_s + cost_s
        in_time = [size for size, time_s in ready_by_s.items() if time_s <= began_s + total * pace.frame_audio_s]
        if not in_time:
            return None
        size = max(in_time)
        if size == chosen[-1] == sizes[-1]:
            break
        chosen.append(size)
        total, ready_s = total + size, ready_by_s[size]
    return chosen


def set_chunk_sizes(plan: Plan, parameters: request_pb2.Parameters) -> None:
    """Sets the chunk policies of this request for the edges of a plan's route.

    `parameters` are those of the request, which have been checked.
    """
    given = {name: parameters.stages[name].chunk for name in parameters.stages}
    none = request_pb2.ChunkParameters()
    edges = (_resolved(edge, plan, given.get(edge.consumer, none)) for edge in plan.route.edges)
    plan.route = replace(plan.route, edges=tuple(edges))


def _resolved(edge: Edge, plan: Plan, given: request_pb2.ChunkParameters) -> Edge:
    chunk, first = edge.chunk, given.initial_frames
    if not isinstance(chunk, FramesEntry) or (chunk.ramp != "auto" and given.WhichOneof("cut") is None):
        return edge
    if given.whole:
        return edge.model_copy(update={"chunk": "whole"})
    sizes: Sequence[int] = chunk.sizes_from(first or chunk.first_frames)
    pace = _measured_pace(edge, plan) if chunk.ramp == "auto" else None
    if pace is not None and first:
        sizes = climb(sizes, pace, context=chunk.left_context_frames) or sizes
    elif pace is not None:
        sizes = choose_sizes(sizes, pace, context=chunk.left_context_frames)
    *ramp, frames = sizes
    entry = FramesEntry(frames=frames, ramp=tuple(ramp) or None, left_context_frames=chunk.left_context_frames)
    return edge.model_copy(update={"chunk": entry})


def _measured_pace(edge: Edge, plan: Plan) -> Pace | None:
    """Returns the pace that the replicas at the ends of an edge have reported, or None if they have not measured it."""
    replica = plan.steps[edge.consumer].replica
    producer, consumer = plan.steps[edge.producer].replica.last_report, replica.last_report
    if producer is None or consumer is None:
        return None
    intervals_s = [producer.frame_intervals_s[name] for name in edge.tensors if name in producer.frame_intervals_s]
    costs_s = {cost.frames: cost.seconds for cost in consumer.call_costs}
    numbers = (*intervals_s, *costs_s, *costs_s.values(), consumer.frame_audio_s)
    if not intervals_s or not costs_s or not all(0 < number < inf for number in numbers):
        return None
    is_shared = replica.running > 1 or consumer.running + consumer.queued > 0
    return Pace(max(intervals_s), consumer.frame_audio_s, costs_s, is_shared)
