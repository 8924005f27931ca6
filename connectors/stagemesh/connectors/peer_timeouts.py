"""When a peer of a flow counts as lost: the time limits, and the errors that another replica may not have.

Other modules read the limits as attributes of this module, so that a test can change a limit in one place.
"""

from stagemesh.common.errors import CancelledRequestError, StagemeshError, UnavailableError

LOST_PRODUCER_S = 15.0
"""Time limit, in seconds, for a disconnected producer to reconnect before its flow fails."""
LOST_CONSUMER_S = 15.0
"""The time in seconds after which the flows to an unreachable consumer fail."""
REFUSING_CONSUMER_S = 0.5
"""The time in seconds after which the flows to a consumer fail if the consumer's address refuses connections.

A refused connection indicates that the consumer's process has terminated.
"""
REBIND_S = 15.0
"""Time limit, in seconds, for the replacement of a flow's unreachable producer or consumer."""
REOPEN_S, MAX_REOPEN_S = 2.0, 30.0
"""The initial and the maximum number of seconds without an answer from the consumer before the flow is reopened."""
TICKET_ANSWER_S = 15.0
"""The time limit for a producer to answer an acceptance, in seconds. A broken connection is repaired within it."""

NOT_READ = "NOT_READ"
"""The reason of a flow's error if the consumer's step failed or paused, so that no other consumer can help."""
_REPLICA_REASONS = frozenset({"UNKNOWN_FLOW", "STALE_ATTEMPT", "STALE_INCARNATION"})


def is_recoverable(error: StagemeshError) -> bool:
    """Returns whether a flow that failed with `error` can continue with another producer or consumer.

    An error about the request itself is not recoverable, because another replica would report the same error.
    """
    if error.reason in _REPLICA_REASONS or isinstance(error, UnavailableError):
        return True
    return isinstance(error, CancelledRequestError) and error.reason != NOT_READ
