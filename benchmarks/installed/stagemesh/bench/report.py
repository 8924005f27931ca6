"""The report of a load: percentiles of each figure, throughput, errors and goodput."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from stagemesh.bench.loads import Load, LoadRun
from stagemesh.bench.measurements import FIGURES, Measurement, meets

C50_LIMIT_S = 0.05
"""The longest underrun of a stream that counts as continuous, in seconds."""


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
