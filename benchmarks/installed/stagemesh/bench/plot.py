"""The plot of a sweep: percentiles of latencies, throughput and goodput against load, as a PNG file."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from stagemesh.bench.measurements import FIGURES
from stagemesh.bench.report import LoadReport
from stagemesh.common.errors import InvalidRequestError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_LATENCIES = ("ttft", "ttfa", "e2e", "underrun")
_PERCENTILES = {"p50": "-", "p95": "--", "p99": ":"}
_PANEL_INCHES = (4.2, 3.4)
_COLUMNS = 3
_DOTS_PER_INCH = 120
_MARGIN = 1.15


def write_plot(path: Path, reports: Sequence[LoadReport]) -> None:
    """Writes a PNG file with one panel for each latency that was measured, and one for the throughput.

    The reports are those of a sweep, in any order. Raises InvalidRequestError (CANNOT_WRITE) if the file cannot be
    written.
    """
    ordered = sorted(reports, key=lambda report: report.load.value)
    measured = [name for name in _LATENCIES if any(name in report.figures for report in ordered)]
    count = len(measured) + 1
    columns = min(count, _COLUMNS)
    rows = -(-count // columns)
    figure = Figure(figsize=(_PANEL_INCHES[0] * columns, _PANEL_INCHES[1] * rows), layout="constrained")
    panels: list[Axes] = list(figure.subplots(rows, columns, squeeze=False).flat)
    for name, panel in zip(measured, panels, strict=False):
        _draw_latency(panel, name, ordered)
    _draw_throughput(panels[len(measured)], ordered)
    for panel in panels[:count]:
        panel.set_xlabel("requests at the same time" if ordered[0].load.concurrency else "arrivals per second")
        panel.set_ylim(0, (panel.dataLim.ymax or 1) * _MARGIN)
        if ordered[0].load.concurrency:
            panel.xaxis.set_major_locator(MaxNLocator(integer=True))
        panel.grid(alpha=0.3)
        panel.legend(fontsize="small")
    for panel in panels[count:]:
        panel.remove()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="png", dpi=_DOTS_PER_INCH)
    except OSError as exc:
        raise InvalidRequestError(f"--plot: cannot write {path}: {exc}", reason="CANNOT_WRITE") from exc


def _draw_latency(panel: "Axes", name: str, reports: Sequence[LoadReport]) -> None:
    points = [report for report in reports if name in report.figures]
    loads = [report.load.value for report in points]
    for percentile, style in _PERCENTILES.items():
        values = [getattr(report.figures[name], percentile) for report in points]
        panel.plot(loads, values, style, marker="o", markersize=4, label=percentile)
    limits = [report.goodput.limits.get(name) for report in points if report.goodput is not None]
    if limits and limits[0] is not None:
        panel.axhline(limits[0], color="red", linewidth=1, label="limit")
    panel.set_title(FIGURES[name].title)
    panel.set_ylabel("seconds")


def _draw_throughput(panel: "Axes", reports: Sequence[LoadReport]) -> None:
    loads = [report.load.value for report in reports]
    panel.plot(
        loads, [report.throughput.requests_per_s for report in reports], marker="o", markersize=4, label="throughput"
    )
    good = [report.goodput.requests_per_s for report in reports if report.goodput is not None]
    if good:
        panel.plot(loads, good, "--", marker="o", markersize=4, label="goodput")
    panel.set_title("throughput")
    panel.set_ylabel("requests per second")
