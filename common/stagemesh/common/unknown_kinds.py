"""The refusal of messages whose kind, the set field of a oneof, is unknown because the sender is newer."""

from google.protobuf.message import Message
from google.protobuf.unknown_fields import UnknownFieldSet

from stagemesh.common.errors import UnsupportedError

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
