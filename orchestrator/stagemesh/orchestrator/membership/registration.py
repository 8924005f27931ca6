"""Members that register themselves: each holds a lease, and leaves when it says so or when the lease ends.

Leases are counted by the event loop's clock, which does not jump when somebody sets the time.
"""

import asyncio
import logging
from collections.abc import Collection
from dataclasses import dataclass

from stagemesh.common.errors import ExistsError, InvalidRequestError, NotReadyError, StaleAttemptError
from stagemesh.orchestrator.fleet.replica import find_refusal
from stagemesh.orchestrator.membership.base import Member, MembershipListener
from stagemesh.orchestrator.spec import Pipeline
from stagemesh.v1 import membership_pb2

_log = logging.getLogger(__name__)


@dataclass(eq=False)
class Lease:
    """A registered replica's right to be a member."""

    member: Member
    incarnation: str
    ends_at_s: float
    streams: int = 0
    """On which it can renew the lease; none where its connection broke."""
    timer: asyncio.TimerHandle | None = None


class RegistrationSource:
    """The replicas that hold a lease. `pipeline` and `generations` say who may."""

    def __init__(self, pipeline: Pipeline, *, lease_s: float, generations: Collection[str] = ()) -> None:
        self.lease_s = lease_s
        self._pipeline, self._generations = pipeline, generations
        self._leases: dict[str, Lease] = {}
        self._roster: MembershipListener | None = None
        self.closed = asyncio.Event()
        """Set when there is no more registering."""

    async def follow(self, roster: MembershipListener) -> None:
        """See MemberSource."""
        self._roster = roster
        try:
            await asyncio.Event().wait()
        finally:
            self._roster = None
            self.closed.set()
            for lease in self._leases.values():
                _stop_timer(lease)
            self._leases.clear()

    def register(self, who: membership_pb2.ReplicaIdentity) -> Lease:
        """Begins a lease, or goes on with the one that the same incarnation holds.

        Raises InvalidRequestError (INVALID_REPLICA) for an identity that is not complete, NotReadyError
        (REPLICA_REFUSED) for a replica that belongs elsewhere, ExistsError (REPLICA_EXISTS) while another one of the
        name is there.
        """
        if self._roster is None:
            raise NotReadyError("the orchestrator is starting or stopping; try again", reason="NOT_RUNNING")
        _check_complete(who)
        self._check_belongs(who)
        member = Member(who.stage, who.endpoint, who.replica)
        held = self._leases.get(who.replica)
        if held is not None and (held.member, held.incarnation) == (member, who.incarnation):
            held.streams += 1
            self.renew(held)
            return held
        if held is not None:
            self._make_way(held, member)
        lease = Lease(member, who.incarnation, ends_at_s=0.0, streams=1)
        self._leases[who.replica] = lease
        self.renew(lease)
        self._roster.join(member)
        return lease

    def renew(self, lease: Lease) -> None:
        """Lets the lease last from now on. Raises StaleAttemptError where another replica has taken its place, and
        NotReadyError (LEASE_ENDED) where it has ended: register again.
        """
        now = self._leases.get(lease.member.name)
        if now is not lease:
            if now is not None:
                raise StaleAttemptError(f"another process has registered as {lease.member.name} since; it takes over")
            raise NotReadyError(f"the lease of {lease.member.name} has ended; register again", reason="LEASE_ENDED")
        loop = asyncio.get_running_loop()
        lease.ends_at_s = loop.time() + self.lease_s
        if lease.timer is None:
            lease.timer = loop.call_at(lease.ends_at_s, self._look_at, lease)

    def leave(self, lease: Lease) -> None:
        """The replica ends its lease itself; harmless where it has ended."""
        self._end(lease, "it said so")

    def disconnect(self, lease: Lease) -> None:
        """A stream is no longer there: the lease lasts until its end, unless another stream renews it."""
        lease.streams -= 1

    def _check_belongs(self, who: membership_pb2.ReplicaIdentity) -> None:
        if who.stage not in self._pipeline.stages:
            refusal = f"pipeline {self._pipeline.name!r} has no stage {who.stage!r}"
        else:
            refusal = find_refusal(who, stage=who.stage, pipeline=self._pipeline, generations=self._generations)
        if refusal:
            _log.warning("replica %s at %s is refused: %s", who.replica, who.endpoint, refusal)
            raise NotReadyError(
                f"replica {who.replica} at {who.endpoint} is refused: {refusal}; start it from the pipeline file that "
                "this orchestrator serves, and in the same version",
                reason="REPLICA_REFUSED",
                metadata={"stage": who.stage, "replica": who.replica},
            )

    def _make_way(self, held: Lease, member: Member) -> None:
        """A replica of the same name takes over, at an address where only one can be or from one that fell silent."""
        if held.streams and held.member.endpoint != member.endpoint:
            raise ExistsError(
                f"a replica named {member.name} is registered from {held.member.endpoint}; give the one at "
                f"{member.endpoint} a name of its own, or stop the other",
                reason="REPLICA_EXISTS",
                metadata={"replica": member.name, "endpoint": held.member.endpoint},
                retry_after_s=self.lease_s,
            )
        self._end(held, "another process took its name over")

    def _look_at(self, lease: Lease) -> None:
        loop = asyncio.get_running_loop()
        if loop.time() < lease.ends_at_s:
            lease.timer = loop.call_at(lease.ends_at_s, self._look_at, lease)
        else:
            self._end(lease, f"it did not renew its lease of {self.lease_s:g} s")

    def _end(self, lease: Lease, why: str) -> None:
        if self._leases.get(lease.member.name) is lease:
            del self._leases[lease.member.name]
            _stop_timer(lease)
            if self._roster is not None:
                self._roster.leave(lease.member, why)


def _stop_timer(lease: Lease) -> None:
    if lease.timer is not None:
        lease.timer.cancel()
        lease.timer = None


def _check_complete(who: membership_pb2.ReplicaIdentity) -> None:
    missing = [name for name in ("replica", "incarnation", "endpoint") if not getattr(who, name)]
    if missing:
        raise InvalidRequestError(
            f"a replica registers without its {' and '.join(missing)}; the first message must have it",
            reason="INVALID_REPLICA",
        )
    _, colon, port = who.endpoint.rpartition(":")
    if not (colon and port.isdecimal() and 0 < int(port) < 1 << 16):
        raise InvalidRequestError(
            f"replica {who.replica} registers with endpoint {who.endpoint!r}; it must be host:port",
            reason="INVALID_REPLICA",
        )
