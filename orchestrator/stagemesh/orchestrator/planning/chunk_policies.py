"""The chunk policies of each request: what the request asks for, and how fast the stages of `ramp: auto` are."""

from collections.abc import Sequence
from dataclasses import replace

from stagemesh.common.wire.chunk_sizes import ChunkPolicy, FramesPolicy, PlayoutPace, WholePolicy
from stagemesh.common.wire.encoding import to_message
from stagemesh.orchestrator.planning.planner import Plan
from stagemesh.pipeline.graph import Edge
from stagemesh.pipeline.schema import FramesEntry
from stagemesh.v1 import playout_pb2, request_pb2, stage_pb2

_MARGIN_S = 0.005
"""The time by which a chunk must be ready earlier. A chunk spends it between its stages."""
_SHARED_CALLS = 2
"""The number of other requests' calls for which a chunk may have to wait. 2 makes gaps rare at 80 % of the capacity."""


def set_chunk_policies(plan: Plan, parameters: request_pb2.Parameters) -> None:
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
    *ramp, frames = sizes
    entry = FramesEntry(frames=frames, ramp=tuple(ramp) or None, left_context_frames=chunk.left_context_frames)
    pace = _measured_pace(edge, plan, largest=frames + chunk.left_context_frames) if chunk.ramp == "auto" else None
    return edge.model_copy(update={"chunk": entry, "pace": pace})


def _measured_pace(edge: Edge, plan: Plan, *, largest: int) -> PlayoutPace | None:
    """Returns the pace that the replicas at the ends of an edge have reported, or None if they have not measured it.

    `largest` is the largest number of frames of a call.
    """
    replica = plan.steps[edge.consumer].replica
    producer, consumer = plan.steps[edge.producer].replica.last_report, replica.last_report
    if producer is None or consumer is None:
        return None
    emitted_s, measured = producer.playout.frame_intervals_s, consumer.playout
    intervals_s = [emitted_s[name] for name in edge.tensors if name in emitted_s]
    costs_s = {cost.frames: cost.seconds for cost in measured.call_costs}
    try:
        reserve_s = _MARGIN_S + measured.audio_delay_s
        pace = PlayoutPace(max(intervals_s, default=0.0), measured.frame_audio_s, costs_s, reserve_s)
    except ValueError:
        return None
    is_shared = replica.running > 1 or consumer.running + consumer.queued > 0
    return replace(pace, reserve_s=reserve_s + _SHARED_CALLS * pace.cost_s(largest)) if is_shared else pace


def policy_to_wire(policy: ChunkPolicy) -> stage_pb2.ChunkPolicy:
    """Converts a chunk policy to its protobuf message. Returns the empty message for StepPolicy."""
    if isinstance(policy, WholePolicy):
        return stage_pb2.ChunkPolicy(whole=stage_pb2.WholePolicy())
    if isinstance(policy, FramesPolicy):
        pace = None if policy.pace is None else _pace_to_wire(policy.pace)
        return stage_pb2.ChunkPolicy(frames=to_message(stage_pb2.FramesPolicy, policy, pace=pace))
    return stage_pb2.ChunkPolicy()


def _pace_to_wire(pace: PlayoutPace) -> playout_pb2.PlayoutPace:
    costs = [playout_pb2.CallCost(frames=frames, seconds=cost_s) for frames, cost_s in pace.call_costs_s.items()]
    return to_message(playout_pb2.PlayoutPace, pace, call_costs=costs)
