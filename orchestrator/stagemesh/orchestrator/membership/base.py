"""The contract between those who know which replicas there are, and whoever watches them."""

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True)
class Member:
    """A replica that there is: its stage, and where it serves ("host:port")."""

    stage: str
    endpoint: str
    name: str = ""
    """In the pipeline; empty where only the replica itself can say."""


class MembershipListener(Protocol):
    """The members as they come and go. Several sources may tell of the same one; it leaves when none does."""

    def join(self, member: Member) -> None:
        """It is there. Once a source, until it leaves."""

    def leave(self, member: Member, why: str) -> None:
        """It is no longer there; `why` is for people."""


class MemberSource(Protocol):
    """A way to know the members."""

    async def follow(self, roster: MembershipListener) -> None:
        """Tells the roster of all members, and of every change, until it is cancelled. Called once."""
