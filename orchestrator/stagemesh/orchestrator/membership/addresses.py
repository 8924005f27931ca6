"""Finds members at the addresses in the orchestrator's config: fixed addresses, and DNS names.

A DNS name may resolve to several addresses, for example the name of a headless Kubernetes service.
"""

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from typing import TypeAlias

from stagemesh.orchestrator.config import DnsName, ReplicaAddress
from stagemesh.orchestrator.membership.base import Member, MembershipListener

_log = logging.getLogger(__name__)

_RESOLVE_TIMEOUT_S = 5.0

Resolve: TypeAlias = Callable[[str], Awaitable[Collection[str]]]
"""An async function that returns the IP addresses of a host name. Raises OSError if the resolver does not answer."""


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
        found = {_endpoint(address, self._name.port) for address in addresses}
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


def _endpoint(address: str, port: int) -> str:
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
