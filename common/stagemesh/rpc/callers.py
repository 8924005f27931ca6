"""The identity of a caller: its roles, and the names in its certificate or its token.

A certificate has subject alternative names of the form `stagemesh://ROLE/NAME`: `stagemesh://stage/thinker-0` for a
replica, `stagemesh://orchestrator/main`, `stagemesh://operator/alice` and `stagemesh://client/web`. In the name of a
replica, `*` stands for any text, so that the replicas of a stage can share a certificate.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import TypeAlias

from google.protobuf import descriptor_pool

from stagemesh.common.errors import PermissionDeniedError
from stagemesh.v1 import roles_pb2

Role: TypeAlias = "roles_pb2.CallerRole.ValueType"

CLIENT = roles_pb2.CALLER_ROLE_CLIENT
ORCHESTRATOR = roles_pb2.CALLER_ROLE_ORCHESTRATOR
STAGE = roles_pb2.CALLER_ROLE_STAGE
OPERATOR = roles_pb2.CALLER_ROLE_OPERATOR


@lru_cache(maxsize=256)
def roles_of(method: str) -> frozenset[Role]:
    """Returns the roles that may call an RPC, given its path ("/stagemesh.v1.StageService/Describe").

    Returns an empty set for an RPC that is not part of the API, for example a health check.
    """
    try:
        found = descriptor_pool.Default().FindMethodByName(method.removeprefix("/").replace("/", "."))
    except KeyError:
        return frozenset()
    return frozenset(found.GetOptions().Extensions[roles_pb2.caller_roles])


SCHEME = "stagemesh://"
ROLE_NAMES: Mapping[str, Role] = {"client": CLIENT, "orchestrator": ORCHESTRATOR, "stage": STAGE, "operator": OPERATOR}
"""The roles by their names in certificates."""


@dataclass(frozen=True)
class Identity:
    """The names of a caller, each with a role, as its credentials prove them."""

    names: Sequence[tuple[Role, str]]

    @property
    def roles(self) -> frozenset[Role]:
        """The roles of the caller."""
        return frozenset(role for role, _ in self.names)

    def names_as(self, role: Role) -> list[str]:
        """Returns the names of the caller in a role."""
        return [name for each, name in self.names if each == role]


_CURRENT: ContextVar[Identity | None] = ContextVar("caller", default=None)


def set_identity(identity: Identity) -> None:
    """Sets the identity of the current RPC's caller. The current RPC is the RPC that this task serves."""
    _CURRENT.set(identity)


def identity_of_certificate(properties: Mapping[str, Iterable[bytes]]) -> Identity | None:
    """Returns the identity in the certificate of a peer, or None if the certificate names no role.

    `properties` are the certificate's properties. `peer_uri` has its URIs.
    """
    uris = (uri.decode(errors="replace") for uri in properties.get("peer_uri", ()))
    parts = (uri.removeprefix(SCHEME).partition("/") for uri in uris if uri.startswith(SCHEME))
    names = [(ROLE_NAMES[role], name) for role, _, name in parts if role in ROLE_NAMES and name]
    return Identity(names) if names else None


def caller_of(*, claimed: str) -> str:
    """Returns the name of the current RPC's caller.

    - `claimed` is the name that the request states, or empty.

    Without credentials, the caller's name is `claimed`. With credentials, it is one of the client names in them:
    `claimed` if it is among them, or the first name if `claimed` is empty.

    Raises PermissionDeniedError (CALLER_MISMATCH) if the credentials do not contain `claimed`. The request is
    rejected, not attributed to another caller, because its sender would otherwise not notice whose share it uses.
    """
    identity = _CURRENT.get()
    if identity is None:
        return claimed
    names = identity.names_as(CLIENT)
    if claimed in names:
        return claimed
    if claimed:
        raise PermissionDeniedError(
            f"caller {claimed!r} is not named by the credentials; use one of {', '.join(names)}, or omit it",
            reason="CALLER_MISMATCH",
            metadata={"caller": claimed},
        )
    return names[0]


def caller_key(*, default: str) -> str:
    """Returns a key for what counts per caller: the first name of the current RPC's caller, or else `default`."""
    identity = _CURRENT.get()
    return default if identity is None else str(identity.names[0])


def may_act_for(caller: str) -> bool:
    """Returns whether the current RPC's caller may act for the caller with this name.

    Returns True if the current RPC's caller has no credentials.
    """
    identity = _CURRENT.get()
    return identity is None or caller in identity.names_as(CLIENT)


def check_replica(name: str) -> None:
    """Checks that the current RPC's caller may use this name of a replica.

    Raises PermissionDeniedError (REPLICA_MISMATCH) if the caller's certificate does not contain the name. Accepts any
    name if the caller has no credentials. Also accepts any name of an orchestrator, because orchestrators send the
    input of requests under names of their own.
    """
    identity = _CURRENT.get()
    if identity is None or ORCHESTRATOR in identity.roles:
        return
    patterns = identity.names_as(STAGE)
    if not any(fnmatchcase(name, pattern) for pattern in patterns):
        raise PermissionDeniedError(
            f"the caller's certificate does not name replica {name!r}; it names {', '.join(patterns) or 'none'}",
            reason="REPLICA_MISMATCH",
            metadata={"replica": name},
        )
