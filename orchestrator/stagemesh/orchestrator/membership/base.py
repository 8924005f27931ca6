"""Members and their sources: which replicas there are, and which ones are accepted."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

from stagemesh.common.versions import WIRE_VERSION
from stagemesh.orchestrator.spec import Pipeline


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


class Belonging(Protocol):
    """The fields of DescribeResponse and ReplicaIdentity that say where a replica belongs."""

    wire_version: int
    pipeline: str
    generation: str
    stage: str


def find_refusal(description: Belonging, *, stage: str, pipeline: Pipeline, generations: Collection[str] = ()) -> str:
    """Returns why a replica does not belong to this stage, for people, or an empty text if it does.

    Replicas of `generations` are accepted in addition to those of the pipeline's own generation.
    """
    generation = description.generation if description.generation in generations else pipeline.generation
    facts = {
        "wire version": (description.wire_version, WIRE_VERSION),
        "pipeline": (description.pipeline, pipeline.name),
        "generation": (description.generation, generation),
        "stage": (description.stage, stage),
    }
    return "; ".join(f"its {what} is {has}, expected {want}" for what, (has, want) in facts.items() if has != want)
