"""The caller of a request, from the credentials of its connection or from the request itself."""

from collections.abc import Iterable
from typing import Protocol

from stagemesh.common.errors import PermissionDeniedError


class AuthenticatedContext(Protocol):
    """The method of grpc.aio.ServicerContext that returns the authenticated identities of the peer."""

    def peer_identities(self) -> Iterable[bytes] | None:
        """Returns the names in the peer's certificate, or None if the connection is not authenticated."""
        ...


def caller_of(context: AuthenticatedContext, *, claimed: str) -> str:
    """Returns the name of an RPC's caller. `claimed` is the name that the request states, or empty.

    Without credentials, this is `claimed`. With credentials, for example a client certificate, it is one of the names
    in them: `claimed` if it is among them, or the first name if `claimed` is empty. A certificate's names are its
    subject alternative names, or its common name if it has none.

    Raises PermissionDeniedError (CALLER_MISMATCH) if the credentials contain names, but not `claimed`. The request is
    rejected, not attributed to another caller, because its sender would otherwise not notice whose share it uses.
    """
    names = [identity.decode(errors="replace") for identity in context.peer_identities() or ()]
    if not names or claimed in names:
        return claimed
    if claimed:
        raise PermissionDeniedError(
            f"caller {claimed!r} is not named by the credentials; use one of {', '.join(names)}, or omit it",
            reason="CALLER_MISMATCH",
            metadata={"caller": claimed},
        )
    return names[0]
