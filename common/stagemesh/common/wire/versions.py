"""The versions of the wire that this software speaks, and the rejection of what only a newer version knows."""

from functools import cache

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from stagemesh.common.errors import NotReadyError, UnsupportedError
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
    if lowest and max(lowest, ours.lowest_version) <= min(highest, ours.highest_version):
        return
    older = own_name if lowest > ours.highest_version else peer
    raise NotReadyError(
        f"{peer} speaks {_described(theirs)}, but {own_name} speaks {_described(ours)}; upgrade {older}",
        reason=NO_COMMON_VERSION,
        metadata={"peer_versions": f"{lowest}-{highest}", "versions": f"{LOWEST_VERSION}-{HIGHEST_VERSION}"},
    )


def _described(protocol: protocol_pb2.Protocol) -> str:
    software = f" ({protocol.software})" if protocol.software else ""
    if not protocol.lowest_version:
        return f"no version of the wire that it names{software}"
    return f"wire versions {protocol.lowest_version} to {protocol.highest_version}{software}"


UNKNOWN_KIND = "UNKNOWN_KIND"


def unknown_kind(message: Message, *, of: str) -> UnsupportedError | None:
    """Returns the error for a message whose oneof has no field that this process knows.

    Returns None if the message is empty, or if the sender has marked it as ignorable. `of` is the name of the sender.
    """
    return None if getattr(message, "ignorable", False) else _error(message, "of an unknown kind (field {})", of=of)


def refuse_unknown(message: Message, *, of: str) -> None:
    """Raises the error that `unknown_kind` returns. Does nothing if it returns None."""
    error = unknown_kind(message, of=of)
    if error is not None:
        raise error


def refuse_unknown_fields(message: Message, *, of: str) -> None:
    """Raises UnsupportedError (UNKNOWN_KIND) if the message has any field that this process does not know.

    For messages none of whose fields may be ignored. `of` is the name of the sender.
    """
    error = _error(message, "with the unknown field {}", of=of)
    if error is not None:
        raise error


def _error(message: Message, what: str, *, of: str) -> UnsupportedError | None:
    unknown = UnknownFieldSet(message)
    name, fields = message.DESCRIPTOR.name, ", ".join(str(unknown[n].field_number) for n in range(len(unknown)))
    if not fields:
        return None
    return UnsupportedError(
        f"{of} sent a {name} {what.format(fields)}; upgrade this process, or let the sender use only what both "
        "versions know",
        reason=UNKNOWN_KIND,
        metadata={"message": name, "field": fields},
    )
