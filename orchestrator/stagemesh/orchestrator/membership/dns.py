"""Members whose addresses a name stands for, as that of a headless service does."""

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Collection
from typing import TypeAlias

from stagemesh.orchestrator.config import DnsName
from stagemesh.orchestrator.membership.base import Member, MembershipListener

_log = logging.getLogger(__name__)

_RESOLVE_TIMEOUT_S = 5.0

Resolve: TypeAlias = Callable[[str], Awaitable[Collection[str]]]
"""The IP addresses of a host name; raises OSError where there is no answer."""


async def resolve(host: str) -> Collection[str]:
    """Asks the system's resolver. See Resolve."""
    found = await asyncio.get_running_loop().getaddrinfo(host, None, type=socket.SOCK_STREAM)
    return [str(address) for *_, (address, *_) in found]


class DnsSource:
    """The replicas of one stage at all addresses of a name, asked again and again.

    What was last answered holds while there is no answer: a resolver that fails takes no replica away, and whether one
    still serves is seen without it.
    """

    def __init__(self, stage: str, name: DnsName, *, resolve: Resolve = resolve) -> None:
        self._stage, self._name, self._resolve = stage, name, resolve
        self._members: dict[str, Member] = {}
        self._failed = False

    async def follow(self, roster: MembershipListener) -> None:
        """See MemberSource."""
        while True:
            try:
                async with asyncio.timeout(_RESOLVE_TIMEOUT_S):
                    addresses = await self._resolve(self._name.host)
            except (OSError, UnicodeError) as exc:
                # A timeout is an OSError; a name that is none in DNS cannot even be encoded.
                self._note_failure(exc)
            else:
                self._failed = False
                self._take(addresses, roster)
            await asyncio.sleep(self._name.poll_s)

    def _take(self, addresses: Collection[str], roster: MembershipListener) -> None:
        found = {_endpoint(address, self._name.port) for address in addresses}
        for endpoint in self._members.keys() - found:
            roster.leave(self._members.pop(endpoint), f"{self._name.host} no longer has its address")
        for endpoint in sorted(found - self._members.keys()):
            self._members[endpoint] = Member(self._stage, endpoint)
            roster.join(self._members[endpoint])

    def _note_failure(self, exc: Exception) -> None:
        if not self._failed:
            _log.warning(
                "%s, where the replicas of stage %s are, cannot be resolved (%s); the %d known ones stay",
                self._name.host,
                self._stage,
                str(exc) or "no answer",
                len(self._members),
            )
        self._failed = True


def _endpoint(address: str, port: int) -> str:
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
