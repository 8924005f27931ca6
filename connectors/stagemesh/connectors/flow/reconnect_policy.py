"""A flow that lost one of its ends: what another replica may mend, and how long the end that lives waits for it."""

from stagemesh.common.errors import CancelledRequestError, StagemeshError, UnavailableError

REBIND_S = 15.0
"""How long an end whose peer is gone waits for another."""

NOT_READ = "NOT_READ"
"""The reason of a consumer that stopped reading of its own accord."""
PEER_LOST = "PEER_LOST"
"""That of one which ended before its time."""
_OF_THE_OTHER_END = frozenset({"UNKNOWN_FLOW", "STALE_ATTEMPT", "STALE_INCARNATION"})


def mendable(error: StagemeshError) -> bool:
    """Whether what ended a flow may be mended by another replica at its other end.

    What a stage says against the request itself is not: it would be said again.
    """
    if error.reason in _OF_THE_OTHER_END or isinstance(error, UnavailableError):
        return True
    return isinstance(error, CancelledRequestError) and error.reason != NOT_READ
