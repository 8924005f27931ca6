"""Members that were listed when the orchestrator started."""

from collections.abc import Mapping, Sequence

from stagemesh.orchestrator.config import ReplicaAddress
from stagemesh.orchestrator.membership.base import Member, MembershipListener


class StaticSource:
    """The replicas of a config, by stage; they never leave."""

    def __init__(self, replicas: Mapping[str, Sequence[ReplicaAddress]]) -> None:
        self._members = [
            Member(stage, address.endpoint, address.name)
            for stage, addresses in replicas.items()
            for address in addresses
        ]

    async def follow(self, roster: MembershipListener) -> None:
        """See MemberSource."""
        for member in self._members:
            roster.join(member)
