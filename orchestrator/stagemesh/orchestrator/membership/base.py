"""Members and their sources: which replicas there are."""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Member:
    """A replica: its stage and the address at which it serves ("host:port")."""

    stage: str
    endpoint: str
    name: str = ""
    """The replica's name in the pipeline. Empty if only the replica itself knows it."""


class MembershipListener(Protocol):
    """Gets the members as they join and leave. Several sources may report the same member, which leaves with the last
    report.
    """

    def join(self, member: Member) -> None:
        """Called when a source reports a new member; once for each source until the member leaves."""

    def leave(self, member: Member, why: str) -> None:
        """Called when a source no longer reports a member. `why` is a text for people."""


class MemberSource(Protocol):
    """A source of members."""

    async def follow(self, listener: MembershipListener) -> None:
        """Reports all members and every change to the listener until it is cancelled. Called once."""
