"""The report of a load: percentiles of each figure, throughput, errors and goodput."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from stagemesh.orchestrator.cli.bench.loads import Load, LoadRun
from stagemesh.orchestrator.cli.bench.measurements import FIGURES, Measurement, meets
from stagemesh.orchestrator.cli.output import Column, make_table, number

if TYPE_CHECKING:
    from rich.table import Table

C50_LIMIT_S = 0.05
"""The longest underrun of a stream that counts as continuous, in seconds."""
# Shorter times are printed in milliseconds, unless they would be rounded to 1,000.0 ms.
_SECOND_S = 0.99995


@dataclass(frozen=True)
class Summary:
    """The distribution of a figure. The percentiles are interpolated linearly."""

    count: int
    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float


@dataclass(frozen=True)
class Throughput:
    """The successful requests, and what they produced, per second of the load."""

    requests_per_s: float
    tokens_per_s: float
    audio_s_per_s: float


@dataclass(frozen=True)
class Goodput:
    """The requests that meet all limits: their number, their share of all requests, and their rate."""

    limits: Mapping[str, float]
    requests: int
    share: float
    requests_per_s: float


@dataclass(frozen=True)
class LoadReport:
    """The results of a load. The figures are those of successful requests."""

    load: Load
    seconds: float
    requests: int
    errors: Mapping[str, int]
    """The number of failed requests by reason, the most frequent reason first."""
    error_messages: Mapping[str, str]
    """The message of the first error of each reason."""
    figures: Mapping[str, Summary]
    """The distribution of each figure, by its name in `FIGURES`. Figures without values are omitted."""
    c50: float | None
    """The share of audio streams without an underrun over 50 ms. None without audio."""
    throughput: Throughput
    goodput: Goodput | None
    """None if no limit is set."""


def summarize(values: Sequence[float]) -> Summary:
    """Returns the distribution of at least one value."""
    array = np.asarray(values, np.float64)
    p50, p90, p95, p99 = np.percentile(array, [50, 90, 95, 99]).tolist()
    return Summary(len(values), float(array.mean()), p50, p90, p95, p99, float(array.max()))


def make_report(run: LoadRun, limits: Mapping[str, float]) -> LoadReport:
    """Returns the report of a load. `limits` are the limits of the goodput by figure."""
    succeeded = [one for one in run.measurements if one.failure is None]
    failures = [one.failure for one in run.measurements if one.failure is not None]
    errors = Counter(failure.reason for failure in failures)
    pooled = {name: [value for one in succeeded for value in figure.values(one)] for name, figure in FIGURES.items()}
    seconds = max(run.seconds, 1e-9)
    return LoadReport(
        load=run.load,
        seconds=run.seconds,
        requests=len(run.measurements),
        errors=dict(errors.most_common()),
        error_messages={failure.reason: failure.message for failure in reversed(failures)},
        figures={name: summarize(values) for name, values in pooled.items() if values},
        c50=_c50(pooled["underrun"]),
        throughput=Throughput(
            requests_per_s=len(succeeded) / seconds,
            tokens_per_s=sum(one.output_tokens for one in succeeded) / seconds,
            audio_s_per_s=sum(one.audio_s for one in succeeded) / seconds,
        ),
        goodput=_goodput(run.measurements, limits, seconds) if limits else None,
    )


def _c50(underruns_s: Sequence[float]) -> float | None:
    return sum(each <= C50_LIMIT_S for each in underruns_s) / len(underruns_s) if underruns_s else None


def _goodput(measurements: Sequence[Measurement], limits: Mapping[str, float], seconds: float) -> Goodput:
    good = sum(meets(one, limits) for one in measurements)
    return Goodput(limits, good, good / len(measurements) if measurements else 0.0, good / seconds)


def to_document(report: LoadReport) -> dict[str, Any]:
    """Returns a report as a JSON object. The keys of its figures name their units."""
    figures = {FIGURES[name].key: asdict(summary) for name, summary in report.figures.items()}
    load = {"concurrency": report.load.concurrency, "rate_per_s": report.load.rate_per_s}
    return {**asdict(report), "load": load, "figures": figures}


def to_table(report: LoadReport) -> "Table":
    """Returns a table of the figures, with the other results in its title."""
    columns = (
        Column("", lambda row: FIGURES[row[0]].title),
        *(number(name, _cell(name)) for name in ("p50", "p90", "p95", "p99", "mean", "max")),
    )
    return make_table(columns, report.figures.items(), title="\n".join(_headlines(report)))


def _cell(attribute: str) -> Any:
    def cell(row: tuple[str, Summary]) -> str:
        value = float(getattr(row[1], attribute))
        return _time(value) if FIGURES[row[0]].is_time else f"{value:,.2f}" if value < 10 else f"{value:,.0f}"

    return cell


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:,.1f} ms" if seconds < _SECOND_S else f"{seconds:,.2f} s"


def _headlines(report: LoadReport) -> list[str]:
    failed = sum(report.errors.values())
    rates = report.throughput
    lines = [
        f"{report.load.name}: {report.requests:,} requests in {report.seconds:.1f} s, {failed:,} failed",
        *(f"{count:,} {reason}: {report.error_messages[reason]}" for reason, count in report.errors.items()),
    ]
    lines.append(
        f"{rates.requests_per_s:.2f} requests/s, {rates.tokens_per_s:,.1f} tokens/s, "
        f"{rates.audio_s_per_s:.2f} s of audio/s"
    )
    if report.c50 is not None:
        lines.append(f"C50: {report.c50:.1%} of the streams without an underrun over 50 ms")
    if report.goodput is not None:
        limits = ", ".join(f"{name} <= {limit:g}" for name, limit in report.goodput.limits.items())
        lines.append(f"goodput ({limits}): {report.goodput.share:.1%}, {report.goodput.requests_per_s:.2f} requests/s")
    return lines
