"""The members of a pipeline, and the sources that report them to the fleet.

The sources are the addresses in the orchestrator's config, DNS names, and the registrations of replicas. A registered
replica has a lease, and leaves when it deregisters or when its lease expires. Leases are measured with the event
loop's clock, which does not jump when the system time is set.
"""

import asyncio
import logging
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Protocol, TypeAlias

import grpc

from stagemesh.common.errors import ExistsError, InvalidRequestError, NotReadyError, StaleAttemptError, UnavailableError
from stagemesh.common.tasks import result_before
from stagemesh.common.wire.versions import check_version, own_protocol
from stagemesh.orchestrator.config import DnsName, ReplicaAddress
from stagemesh.pipeline import Pipeline
from stagemesh.rpc.callers import check_replica
from stagemesh.rpc.channels import MAX_NAME
from stagemesh.rpc.handlers import answering, streaming
from stagemesh.v1 import membership_pb2, membership_pb2_grpc, stage_pb2

_log = logging.getLogger(__name__)
_RESOLVE_TIMEOUT_S = 5.0
_FREE_TEXTS = frozenset({"detail", "model"})
Resolve: TypeAlias = Callable[[str], Awaitable[Collection[str]]]
"""An async function that returns the IP addresses of a host name. Raises OSError if the resolver does not answer."""
SERVICE_NAME = membership_pb2.DESCRIPTOR.services_by_name["MembershipService"].full_name
_Context: TypeAlias = "grpc.aio.ServicerContext[membership_pb2.RegisterRequest, membership_pb2.RegisterResponse]"


@dataclass(frozen=True)
class Member:
    """A replica of a pipeline, identified by its stage and by the address at which it serves ("host:port")."""

    stage: str
    endpoint: str
    name: str = ""
    """The replica's name in the pipeline. Empty if the membership source provides only the address."""
    server_name: str = ""
    """The name in the replica's TLS certificate. Empty if it is the host in `endpoint`."""


class MembershipListener(Protocol):
    """Receives the members of a pipeline as they join and leave.

    Several sources may report the same member. The member leaves when no source reports it any longer.
    """

    def join(self, member: Member) -> None:
        """Called when a source reports a new member.

        The same source does not report the member again until it has reported that the member leaves.
        """

    def leave(self, member: Member, why: str) -> None:
        """Called when a source no longer reports a member. `why` is the human-readable reason."""


class MemberSource(Protocol):
    """Finds members of a pipeline and reports them to a listener."""

    async def follow(self, listener: MembershipListener) -> None:
        """Reports the current members and every later change to the listener, until this call is cancelled.

        Returns early if no change can occur. Must be called only once.
        """


Belonging: TypeAlias = stage_pb2.DescribeResponse | membership_pb2.ReplicaIdentity
"""A message that identifies the pipeline and the stage to which a replica belongs."""


def find_refusal(description: Belonging, *, stage: str, pipeline: Pipeline, generations: Collection[str] = ()) -> str:
    """Returns a human-readable reason why a replica does not belong to a stage of the pipeline.

    Returns an empty string if the replica belongs to the stage. Generations that match a pattern in `generations` are
    accepted in addition to the pipeline's own generation.
    """
    # A pattern's `*` would also match line breaks.
    is_named = description.generation.isprintable()
    is_additional = is_named and any(fnmatchcase(description.generation, pattern) for pattern in generations)
    generation = description.generation if is_additional else pipeline.generation
    facts = {
        "pipeline": (description.pipeline, pipeline.name),
        "generation": (description.generation, generation),
        "stage": (description.stage, stage),
    }
    return "; ".join(f"its {what} is {has}, expected {want}" for what, (has, want) in facts.items() if has != want)


async def resolve(host: str) -> Collection[str]:
    """Returns the IP addresses of a host name, as reported by the system's resolver.

    Raises OSError if the resolver does not answer.
    """
    found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return [str(address) for *_, (address, *_) in found]


class StaticSource:
    """Reports the replicas that the orchestrator's config lists as members. These members never leave."""

    def __init__(self, replicas: Mapping[str, Sequence[ReplicaAddress]]) -> None:
        self._members = [
            Member(stage, address.endpoint, address.name, address.server_name)
            for stage, addresses in replicas.items()
            for address in addresses
        ]

    async def follow(self, listener: MembershipListener) -> None:
        for member in self._members:
            listener.join(member)


class DnsSource:
    """Resolves a DNS name periodically, and reports each address of the name as a member of one stage.

    If the resolver fails, the addresses of the last answer remain members. The fleet detects unreachable replicas
    without the resolver.
    """

    def __init__(self, stage: str, name: DnsName, *, resolve: Resolve = resolve) -> None:
        self._stage, self._name, self._resolve = stage, name, resolve
        self._members: dict[str, Member] = {}
        self._failed = False

    async def follow(self, listener: MembershipListener) -> None:
        while True:
            try:
                async with asyncio.timeout(_RESOLVE_TIMEOUT_S):
                    addresses = await self._resolve(self._name.host)
            except (OSError, UnicodeError) as exc:
                # TimeoutError is an OSError. A name that is not valid in DNS cannot be encoded.
                self._note_failure(exc)
            else:
                self._failed = False
                self._update(addresses, listener)
            await asyncio.sleep(self._name.poll_s)

    def _update(self, addresses: Collection[str], listener: MembershipListener) -> None:
        port = self._name.port
        found = {f"[{address}]:{port}" if ":" in address else f"{address}:{port}" for address in addresses}
        for endpoint in self._members.keys() - found:
            listener.leave(self._members.pop(endpoint), f"{self._name.host} no longer has its address")
        for endpoint in sorted(found - self._members.keys()):
            self._members[endpoint] = Member(self._stage, endpoint, server_name=self._name.host)
            listener.join(self._members[endpoint])

    def _note_failure(self, exc: Exception) -> None:
        if not self._failed:
            _log.warning(
                "the name %s of the replicas of stage %s cannot be resolved (%s); the %d known replicas remain",
                self._name.host,
                self._stage,
                str(exc) or "no answer",
                len(self._members),
            )
        self._failed = True


@dataclass(eq=False)
class Lease:
    """A replica's membership for a limited time.

    `incarnation` identifies the replica's process. `timer` ends the lease, and is None after the lease has ended.
    """

    member: Member
    incarnation: str
    streams: int = 0
    """The number of open streams on which the replica can renew the lease. 0 if the replica is disconnected."""
    timer: asyncio.TimerHandle | None = None


class RegistrationSource:
    """Accepts registrations of replicas, and reports each replica as a member while the replica's lease is valid."""

    def __init__(self, pipeline: Pipeline, *, lease_s: float, generations: Collection[str] = ()) -> None:
        """Creates a source that grants leases of `lease_s` seconds.

        Replicas of `generations` may register in addition to replicas of the pipeline's own generation.
        """
        self.lease_s = lease_s
        self._pipeline, self._generations = pipeline, generations
        self._leases: dict[str, Lease] = {}
        self._listener: MembershipListener | None = None
        self.closed = asyncio.Event()
        """An event that is set when this source stops accepting registrations."""

    async def follow(self, listener: MembershipListener) -> None:
        self._listener = listener
        try:
            await asyncio.Event().wait()
        finally:
            self._listener = None
            self.closed.set()
            for lease in self._leases.values():
                _stop_timer(lease)
            self._leases.clear()

    def register(self, identity: membership_pb2.ReplicaIdentity) -> Lease:
        """Registers a replica, or adds a stream to the lease of a replica process that is already registered.

        Returns the replica's lease. Raises InvalidRequestError (INVALID_REPLICA) if the identity is incomplete. Raises
        NotReadyError (NO_COMMON_VERSION) if the replica has no wire version in common with this orchestrator, and
        NotReadyError (REPLICA_REFUSED) if the replica does not belong to the pipeline. Raises ExistsError
        (REPLICA_EXISTS) if a connected replica at another address has the same name. Raises UnavailableError
        (NOT_RUNNING) if the orchestrator is starting or stopping.
        """
        if self._listener is None:
            raise UnavailableError("the orchestrator is starting or stopping; try again", reason="NOT_RUNNING")
        _check_complete(identity)
        self._check_belongs(identity)
        member = Member(identity.stage, identity.endpoint, identity.replica, identity.server_name)
        held = self._leases.get(identity.replica)
        if held is not None and (held.member, held.incarnation) == (member, identity.incarnation):
            held.streams += 1
            self.renew(held)
            return held
        if held is not None:
            self._replace_holder(held, member)
        lease = Lease(member, identity.incarnation, streams=1)
        self._leases[identity.replica] = lease
        self.renew(lease)
        self._listener.join(member)
        return lease

    def renew(self, lease: Lease) -> None:
        """Extends a lease until `lease_s` seconds from now.

        Raises StaleAttemptError if another process has registered under the replica's name. Raises NotReadyError
        (LEASE_ENDED) if the lease has expired, so that the replica must register again.
        """
        holder = self._leases.get(lease.member.name)
        if holder is not lease:
            if holder is not None:
                raise StaleAttemptError(f"another process has registered as {lease.member.name} since and replaces it")
            raise NotReadyError(f"the lease of {lease.member.name} has ended; register again", reason="LEASE_ENDED")
        _stop_timer(lease)
        why = f"it did not renew its lease of {self.lease_s:g} s"
        lease.timer = asyncio.get_running_loop().call_later(self.lease_s, self._end, lease, why)

    def leave(self, lease: Lease) -> None:
        """Ends the lease of a replica that deregisters. Does nothing if the lease has already ended."""
        self._end(lease, "it deregistered")

    def disconnect(self, lease: Lease) -> None:
        """Records that one of the replica's streams has closed. The lease remains valid until it expires.

        The replica can renew the lease on any other stream.
        """
        lease.streams -= 1

    def _check_belongs(self, identity: membership_pb2.ReplicaIdentity) -> None:
        peer = f"replica {identity.replica} at {identity.endpoint}"
        check_version(identity.protocol, peer=peer, own_name="this orchestrator")
        if identity.stage not in self._pipeline.stages:
            refusal = f"pipeline {self._pipeline.name!r} has no stage {identity.stage!r}"
        else:
            refusal = find_refusal(
                identity, stage=identity.stage, pipeline=self._pipeline, generations=self._generations
            )
        if refusal:
            _log.warning("replica %s at %s is refused: %s", identity.replica, identity.endpoint, refusal)
            raise NotReadyError(
                f"{peer} is refused: {refusal}; start it from the pipeline file that this orchestrator serves",
                reason="REPLICA_REFUSED",
                metadata={"stage": identity.stage, "replica": identity.replica},
            )

    def _replace_holder(self, held: Lease, member: Member) -> None:
        """Ends `held`, the lease of another process that has the same name as the new member.

        Raises ExistsError (REPLICA_EXISTS) if that process is connected and its address differs from the new member's
        address.
        """
        if held.streams and held.member.endpoint != member.endpoint:
            raise ExistsError(
                f"a replica named {member.name} is registered from {held.member.endpoint}; rename the "
                f"replica at {member.endpoint}, or stop the other replica",
                reason="REPLICA_EXISTS",
                metadata={"replica": member.name, "endpoint": held.member.endpoint},
                retry_after_s=self.lease_s,
            )
        self._end(held, "another process registered under its name")

    def _end(self, lease: Lease, why: str) -> None:
        if self._leases.get(lease.member.name) is lease:
            del self._leases[lease.member.name]
            _stop_timer(lease)
            if self._listener is not None:
                self._listener.leave(lease.member, why)


def _stop_timer(lease: Lease) -> None:
    if lease.timer is not None:
        lease.timer.cancel()
        lease.timer = None


def _check_complete(identity: membership_pb2.ReplicaIdentity) -> None:
    missing = [name for name in ("replica", "incarnation", "endpoint") if not getattr(identity, name)]
    if missing:
        raise _invalid(f"a replica registers without its {' and '.join(missing)}; the first message must contain it")
    check_names(identity)
    _, colon, port = identity.endpoint.rpartition(":")
    if not (colon and len(port) < 6 and port.isascii() and port.isdecimal() and 0 < int(port) < 1 << 16):
        raise _invalid(f"replica {identity.replica} registers with {identity.endpoint!r}; it must be host:port")


def check_names(message: Belonging | stage_pb2.WatchLoadResponse) -> None:
    """Raises InvalidRequestError (INVALID_REPLICA) if a replica reports a name or an address that is too long."""
    for field, value in message.ListFields():
        texts = [value] if isinstance(value, str) else value if field.type == field.TYPE_STRING else ()
        if field.name not in _FREE_TEXTS and any(len(text) > MAX_NAME for text in texts):
            raise _invalid(f"a replica reports a {field.name} of more than {MAX_NAME} characters; shorten it")


def _invalid(message: str) -> InvalidRequestError:
    return InvalidRequestError(message, reason="INVALID_REPLICA")


class MembershipServicer(membership_pb2_grpc.MembershipServiceServicer):
    """Serves MembershipService for one orchestrator. Rejects all registrations if `source` is None."""

    def __init__(self, source: RegistrationSource | None) -> None:
        self._source = source

    @streaming
    async def Register(
        self, request_iterator: AsyncIterator[membership_pb2.RegisterRequest], context: _Context
    ) -> AsyncIterator[membership_pb2.RegisterResponse]:
        async with answering(context):
            source = self._source
            if source is None:
                raise NotReadyError(
                    "replicas cannot register with this orchestrator; list them in its config, or set `registration` "
                    "there",
                    reason="REGISTRATION_CLOSED",
                )
            first = await anext(request_iterator, None)
            if first is None or not first.HasField("replica"):
                raise _invalid("the first message must contain the replica's identity")
            check_replica(first.replica.replica, stage=first.replica.stage)
            lease = source.register(first.replica)
            answer = membership_pb2.RegisterResponse(lease_s=source.lease_s, protocol=own_protocol())
            try:
                yield answer
                while await _next(request_iterator, source.closed):
                    source.renew(lease)
                    yield answer
                # A broken connection may look like the orderly end of the replica's stream. If so, sending this
                # answer raises an error.
                yield answer
                source.leave(lease)
            finally:
                source.disconnect(lease)


async def _next(requests: AsyncIterator[membership_pb2.RegisterRequest], closed: asyncio.Event) -> bool:
    """Waits for the replica's next message. Returns True if a message arrives.

    Returns False if the replica closes its stream instead. Raises UnavailableError (NOT_RUNNING) if `closed` is set
    first, because the orchestrator stops.
    """
    request = await result_before(closed, anext(requests, None))
    if request is None and closed.is_set():
        raise UnavailableError("the orchestrator stops; register again", reason="NOT_RUNNING")
    return request is not None
