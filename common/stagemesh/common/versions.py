"""The versions of the wire that this software speaks, and the check whether another process speaks one of them."""

from functools import cache

from stagemesh.common.errors import NotReadyError
from stagemesh.v1 import protocol_pb2

LOWEST_VERSION = HIGHEST_VERSION = 1
"""The range of wire versions that this software speaks. Both ends are included."""
NO_COMMON_VERSION = "NO_COMMON_VERSION"
OFFERS = "offers"
"""The feature of a consumer that answers offers of a producer's arena."""


@cache
def own_protocol(*features: str) -> protocol_pb2.Protocol:
    """Returns the versions, the software version and these features, as this process reports them. Do not modify it."""
    # Importing it here keeps the import of the client fast.
    from importlib.metadata import version

    return protocol_pb2.Protocol(
        lowest_version=LOWEST_VERSION,
        highest_version=HIGHEST_VERSION,
        features=features,
        software=f"stagemesh {version('stagemesh')}",
    )


def check_version(theirs: protocol_pb2.Protocol, *, peer: str, own_name: str) -> None:
    """Raises NotReadyError (NO_COMMON_VERSION) if `theirs` has no wire version in common with this process.

    `theirs` is the protocol that the process called `peer` reported. `own_name` is the name of this process in the
    error, which the peer may show, too.
    """
    ours = own_protocol()
    lowest, highest = theirs.lowest_version, theirs.highest_version
    if highest and max(lowest, ours.lowest_version) <= min(highest, ours.highest_version):
        return
    older = peer if highest < ours.lowest_version else own_name
    raise NotReadyError(
        f"{peer} speaks {_described(theirs)}, but {own_name} speaks {_described(ours)}; upgrade {older}",
        reason=NO_COMMON_VERSION,
        metadata={"peer_versions": f"{lowest}-{highest}", "versions": f"{LOWEST_VERSION}-{HIGHEST_VERSION}"},
    )


def _described(protocol: protocol_pb2.Protocol) -> str:
    software = f" ({protocol.software})" if protocol.software else ""
    if not protocol.highest_version:
        return f"no version of the wire that it names{software}"
    return f"wire versions {protocol.lowest_version} to {protocol.highest_version}{software}"
