"""The identity of a caller: its roles, and the names in its certificate or its token.

A certificate has subject alternative names of the form `stagemesh://ROLE/NAME`: `stagemesh://orchestrator/main`,
`stagemesh://operator/alice` and `stagemesh://client/web`. The name of a replica contains its stage:
`stagemesh://stage/thinker/thinker-0`. In the part after the stage, `*` stands for letters, digits, `_` and `.`. The
replicas of a stage can therefore share a certificate. `*` does not stand for `-`: `omni-*` does not match
`omni-private-0`.
"""

import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

from google.protobuf import descriptor_pool

from stagemesh.common.errors import PermissionDeniedError, UnauthenticatedError
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
_INPUT = "@input"
"""The start of the name by which an orchestrator sends the input that clients stream. No replica has such a name."""


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

    `properties` are the certificate's properties. `peer_uri` has its URIs. Raises UnauthenticatedError
    (UNKNOWN_IDENTITY) if a name is not valid.
    """
    names = read_names(uri.decode(errors="replace") for uri in properties.get("peer_uri", ()))
    return Identity(names) if names else None


def read_names(uris: Iterable[str]) -> list[tuple[Role, str]]:
    """Returns the names in the URIs of a certificate, each with its role. Ignores URIs that are not such names.

    Raises UnauthenticatedError (UNKNOWN_IDENTITY) if a name is of the former scheme, which did not name the stage, or
    has two `*` without a `-` between them.
    """
    names = list[tuple[Role, str]]()
    for role, slash, name in (uri.removeprefix(SCHEME).partition("/") for uri in uris if uri.startswith(SCHEME)):
        if role not in ROLE_NAMES or not slash or not name or not name.isprintable():
            continue
        if ROLE_NAMES[role] == STAGE and not all(name.partition("/")):
            raise UnauthenticatedError(
                f"the certificate's name {SCHEME}{role}/{name} does not contain a stage, as names did before this "
                "version; make a new certificate: `stagemesh certificate new FOLDER --authority AUTHORITY --name "
                f"stage/STAGE/{name.strip('/')} --host HOST`",
                reason="UNKNOWN_IDENTITY",
            )
        if ROLE_NAMES[role] == STAGE and any(part.count("*") > 1 for part in name.split("-")):
            raise UnauthenticatedError(
                f"the certificate's name {SCHEME}{role}/{name} has two * without a - between them, which takes long to "
                "compare; make a certificate with another name",
                reason="UNKNOWN_IDENTITY",
            )
        names.append((ROLE_NAMES[role], name))
    return names


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


def may_act_for(caller: str) -> bool:
    """Returns whether the current RPC's caller may act for the caller with this name.

    Returns True if the current RPC's caller has no credentials.
    """
    identity = _CURRENT.get()
    return identity is None or caller in identity.names_as(CLIENT)


def check_replica(name: str, *, stage: str | None = None) -> None:
    """Checks that the current RPC's caller is the replica with this name.

    `stage` is the replica's stage, or None if the caller does not state it. Raises PermissionDeniedError
    (REPLICA_MISMATCH) if the caller's certificate does not name the replica. Accepts any name if the caller has no
    credentials. An orchestrator is the producer of the input that clients stream, whose name begins with "@input".
    """
    _check_named(stage, name, others={ORCHESTRATOR} if name.startswith(_INPUT) else ())


def check_reader(*, stage: str | None = None, replica: str | None = None) -> None:
    """Checks that the current RPC's caller may read what is for a replica, or for any replica of a stage.

    These are replicas whose certificate names it, orchestrators and operators, and all callers without credentials.
    Raises PermissionDeniedError (REPLICA_MISMATCH) otherwise.
    """
    _check_named(stage, replica, others={ORCHESTRATOR, OPERATOR})


def _check_named(stage: str | None, replica: str | None, *, others: Collection[Role]) -> None:
    """Raises PermissionDeniedError (REPLICA_MISMATCH) if the caller's certificate does not name this replica.

    None stands for any stage or any replica. Callers without credentials, and with one of the roles `others`, pass.
    """
    identity = _CURRENT.get()
    if identity is None or identity.roles.intersection(others):
        return
    patterns = identity.names_as(STAGE)
    for own_stage, _, pattern in (each.partition("/") for each in patterns):
        if stage in (None, own_stage) and (replica is None or _matches(replica, pattern)):
            return
    wanted = f"replica {replica!r}" if replica is not None else "a replica"
    raise PermissionDeniedError(
        f"the caller's certificate does not name {wanted}{f' of stage {stage!r}' if stage is not None else ''}; it "
        f"names {', '.join(patterns) or 'none'}",
        reason="REPLICA_MISMATCH",
        metadata={"replica": replica} if replica is not None else {},
    )


def _matches(name: str, pattern: str) -> bool:
    return re.fullmatch(r"[\w.]*".join(map(re.escape, pattern.split("*"))), name, re.ASCII) is not None
