"""The state of a replica, as the replica reports it and as orchestrators and operators see it."""

from enum import Enum

from stagemesh.v1 import stage_pb2


class ReplicaState(Enum):
    """The state of a replica. Each value is the number of the state in the protobuf enum."""

    LOADING = stage_pb2.REPLICA_STATE_LOADING
    READY = stage_pb2.REPLICA_STATE_READY
    DRAINING = stage_pb2.REPLICA_STATE_DRAINING
    FAILED = stage_pb2.REPLICA_STATE_FAILED
    ASLEEP = stage_pb2.REPLICA_STATE_ASLEEP
    UNREACHABLE = stage_pb2.REPLICA_STATE_UNREACHABLE

    @classmethod
    def _missing_(cls, value: object) -> "ReplicaState":
        """Returns FAILED for a state number that this version does not know."""
        del value
        return cls.FAILED
