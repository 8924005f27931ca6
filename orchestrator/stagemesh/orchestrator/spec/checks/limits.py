"""Checks what a pipeline file limits."""

from stagemesh.orchestrator.spec.checks.problems import Problems
from stagemesh.orchestrator.spec.model import Bounds, Limits
from stagemesh.orchestrator.spec.schema import LimitsShape


def resolve_limits(shape: LimitsShape, problems: Problems) -> Limits:
    """The limits; those of a caller that could never be reached go to `problems`."""
    pipeline = shape.model_dump(exclude={"per_caller"})
    per_caller = shape.per_caller.model_dump(exclude_none=True)
    for key, value in per_caller.items():
        if value > pipeline[key]:
            problems.add(
                ("limits", "per_caller", key),
                f"limits.per_caller.{key} is {value}, over limits.{key} ({pipeline[key]}); lower it, or leave it out",
            )
    return Limits(**pipeline, per_caller=Bounds(**per_caller))
