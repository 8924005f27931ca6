"""What a replica says of the steps that it has under way, free of the wire."""

from collections.abc import Sequence
from dataclasses import dataclass

from stagemesh.connectors.edge import FlowStatus

DEFAULT_PAGE, MAX_PAGE = 100, 1000


@dataclass(frozen=True)
class FlowReport:
    """One end of a flow, and the replica at the other."""

    peer: str
    standing: FlowStatus


@dataclass(frozen=True)
class StepReport:
    """A step at one moment."""

    request_id: str
    step_id: str
    attempt: int
    age_s: float
    """Since it was accepted."""
    started: bool
    """Whether the engine has had something of it to work on."""
    inlets: tuple[FlowReport, ...]
    outlets: tuple[FlowReport, ...]


@dataclass(frozen=True)
class StepPage:
    """Some of the steps, by id; `next_token` is empty for the last page."""

    steps: Sequence[StepReport]
    next_token: str


def page_of(reports: Sequence[StepReport], *, page_size: int, page_token: str) -> StepPage:
    """Those whose ids follow `page_token`, at most `page_size` of them; 0 is DEFAULT_PAGE."""
    left = sorted((report for report in reports if report.step_id > page_token), key=lambda report: report.step_id)
    page = left[: min(page_size or DEFAULT_PAGE, MAX_PAGE)]
    return StepPage(page, page[-1].step_id if len(page) < len(left) else "")
