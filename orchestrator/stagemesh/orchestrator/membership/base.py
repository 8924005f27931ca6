"""Types for the members of a pipeline, and the check whether a replica belongs to the pipeline."""

from collections.abc import Collection
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Protocol

from stagemesh.orchestrator.spec import Pipeline


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


class Belonging(Protocol):
    """The fields that identify the pipeline and the stage to which a replica belongs.

    The messages DescribeResponse and ReplicaIdentity have these fields.
    """

    pipeline: str
    generation: str
    stage: str


def find_refusal(description: Belonging, *, stage: str, pipeline: Pipeline, generations: Collection[str] = ()) -> str:
    """Returns a human-readable reason why a replica does not belong to a stage of the pipeline.

    Returns an empty string if the replica belongs to the stage. Generations that match a pattern in `generations` are
    accepted in addition to the pipeline's own generation.
    """
    is_additional = any(fnmatchcase(description.generation, pattern) for pattern in generations)
    generation = description.generation if is_additional else pipeline.generation
    facts = {
        "pipeline": (description.pipeline, pipeline.name),
        "generation": (description.generation, generation),
        "stage": (description.stage, stage),
    }
    return "; ".join(f"its {what} is {has}, expected {want}" for what, (has, want) in facts.items() if has != want)
