"""The pipeline file's terms in the contract's."""

from stagemesh.connectors.edge import ChunkPolicy, FramesPolicy, WholePolicy
from stagemesh.v1 import stage_pb2


def policy_to_wire(policy: ChunkPolicy) -> stage_pb2.ChunkPolicy:
    """The message for a chunk policy."""
    if isinstance(policy, WholePolicy):
        return stage_pb2.ChunkPolicy(whole=stage_pb2.WholePolicy())
    if isinstance(policy, FramesPolicy):
        frames = stage_pb2.FramesPolicy(
            frames=policy.frames,
            initial_frames=policy.initial_frames,
            left_context_frames=policy.left_context_frames,
        )
        return stage_pb2.ChunkPolicy(frames=frames)
    return stage_pb2.ChunkPolicy()
