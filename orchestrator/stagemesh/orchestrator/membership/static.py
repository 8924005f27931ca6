"""Reads members from the orchestrator's config."""

from collections.abc import Mapping, Sequence

from stagemesh.orchestrator.config import ReplicaAddress
from stagemesh.orchestrator.membership.base import Member, MembershipListener


class StaticSource:
    """Reports the replicas in the orchestrator's config as members. These members never leave."""

    def __init__(self, replicas: Mapping[str, Sequence[ReplicaAddress]]) -> None:
        self._members = [
            Member(stage, address.endpoint, address.name)
            for stage, addresses in replicas.items()
            for address in addresses
        ]

    async def follow(self, listener: MembershipListener) -> None:
        for member in self._members:
            listener.join(member)
