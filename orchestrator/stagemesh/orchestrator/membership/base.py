"""Types for the members of a pipeline, and the check whether a replica belongs to the pipeline."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Protocol

from stagemesh.common.versions import WIRE_VERSION
from stagemesh.orchestrator.spec import Pipeline


@dataclass(frozen=True)
class Member:
    """A replica of a pipeline: its stage and the address at which it serves ("host:port")."""

    stage: str
    endpoint: str
    name: str = ""
    """The replica's name in the pipeline. Empty if it is known only from the replica's description."""


class MembershipListener(Protocol):
    """Receives the members of a pipeline as they join and leave.

    Several sources may report the same member. The member leaves when none of the sources reports it any longer.
    """

    def join(self, member: Member) -> None:
        """Called when a source reports a new member.

        A source reports a member only once until it reports that the member leaves.
        """

    def leave(self, member: Member, why: str) -> None:
        """Called when a source no longer reports a member. `why` is a human-readable reason."""


class MemberSource(Protocol):
    """Finds members of a pipeline and reports them to a listener."""

    async def follow(self, listener: MembershipListener) -> None:
        """Reports all members, and every later change, to the listener. Runs until it is cancelled.

        Must be called only once.
        """


class Belonging(Protocol):
    """The fields of DescribeResponse and of ReplicaIdentity that say to which pipeline and stage a replica belongs."""

    wire_version: int
    pipeline: str
    generation: str
    stage: str


def find_refusal(description: Belonging, *, stage: str, pipeline: Pipeline, generations: Collection[str] = ()) -> str:
    """Returns a human-readable reason why a replica does not belong to a stage, or an empty string if it belongs to it.

    Accepts replicas of `generations` in addition to replicas of the pipeline's own generation.
    """
    generation = description.generation if description.generation in generations else pipeline.generation
    facts = {
        "wire version": (description.wire_version, WIRE_VERSION),
        "pipeline": (description.pipeline, pipeline.name),
        "generation": (description.generation, generation),
        "stage": (description.stage, stage),
    }
    return "; ".join(f"its {what} is {has}, expected {want}" for what, (has, want) in facts.items() if has != want)
