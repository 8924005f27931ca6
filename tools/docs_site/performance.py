"""The page of performance, generated from the files that the benchmarks write.

Write docs/performance.md: python -m tools.docs_site.performance
"""

import ast
from collections.abc import Iterable, Iterator, Sequence
from html import escape as escape_html
from itertools import groupby
from pathlib import Path

from pydantic import TypeAdapter

from benchmarks.missed_goals import MISSED_GOALS
from benchmarks.report import Figure, Processor, Report
from tools.docs_site.pages import ROOT
from tools.docs_site.tables import escape, make_table

RESULTS = ROOT / "benchmarks/results"
PAGE = ROOT / "docs/performance.md"
_REPORT = TypeAdapter(Report)
_HEAD = """\
# Performance

The last measured figures of the project's benchmarks, generated from the files in `benchmarks/results`, which
`make bench` writes. Times depend on the machine. Ratios compare two ways on the same machine in the same run. Most
models have random weights and at most 24 million parameters, so that their computation does not hide the costs of the
stages.
[Measuring](bench.md) says how to measure your own pipeline or server under load.

"""
_CHARTS = """\
A bar in a chart shows a value relative to its goal, or the goal relative to the value if more is better. At most 100 %
meets the goal, and less is better.

"""
_EMPTY = "No figures are stored: `benchmarks/results` has no files of benchmarks.\n"
_SIGNS = {"<=": "≤", ">=": "≥"}
_VERDICTS = {None: "", True: "met", False: "**missed**"}

_COLORS = {True: "#3d85c6", False: "#d9730d"}
"""The colors of bars of met and of missed goals, which are readable on light and dark pages."""
_WIDTH, _ROW, _BAR, _TOP = 720, 40, 14, 26
_SCALE, _MOST = 320, 2.0
"""The length of the bar of a value that equals its goal, and the longest bar in multiples of it."""


def read_reports(folder: Path = RESULTS) -> list[Report]:
    """Returns the reports that the JSON files of a folder contain, by the names of the files.

    Raises pydantic.ValidationError if a file is not a report.
    """
    return [_REPORT.validate_json(path.read_bytes()) for path in sorted(folder.glob("*.json"))]


def render_performance(reports: Sequence[Report], *, with_charts: bool = True) -> str:
    """Returns the reports of benchmarks as a Markdown document.

    Charts are SVG in the document, which the viewers of repositories do not show.
    """
    lines = (line for each in reports for line in _render(each, with_charts=with_charts))
    return _HEAD + _CHARTS * with_charts + ("\n".join(lines) or _EMPTY)


def find_unexplained(reports: Iterable[Report]) -> list[str]:
    """Returns the figures that miss their goals without a reason, and the reasons that belong to no missed goal."""
    missed = {(each.benchmark, _full_name(figure)) for each in reports for figure in _missed(each)}
    explained = {pair for pair in missed if _reason_of(*pair)}
    unused = [each for each in MISSED_GOALS if not any(_reason_of(*pair) == each.reason for pair in explained)]
    return sorted(": ".join(pair) for pair in missed - explained) + [f"{each[0]}: {each[1]}" for each in unused]


def _missed(report: Report) -> list[Figure]:
    return [figure for figure in report.results if figure.met is False]


def _full_name(figure: Figure) -> str:
    return ": ".join(part for part in (figure.subject, figure.name) if part)


def _reason_of(benchmark: str, name: str) -> str:
    """Returns the reason why a figure misses its goal, or an empty text if none is known."""
    return next((each.reason for each in MISSED_GOALS if each.benchmark == benchmark and each.figure in name), "")


def _explain(report: Report) -> Iterator[str]:
    """Yields a list with the reasons of the missed goals of a report."""
    missed = [_full_name(figure) for figure in _missed(report)]
    if not missed:
        return
    yield from ("**Missed goals**", "")
    reasons = {name: _reason_of(report.benchmark, name) for name in missed}
    for reason in dict.fromkeys(reasons.values()):
        listed = "; ".join(escape(name) for name in missed if reasons[name] == reason)
        yield f"- {listed}. {escape(reason or 'The reason is not known yet.')}"
    yield ""


def _render(report: Report, *, with_charts: bool) -> Iterator[str]:
    yield from (f"## {report.benchmark}", "")
    yield from (f"{_read_summary(report.benchmark)} `python -m benchmarks.{report.benchmark}` runs it.", "")
    yield from (_describe_run(report), "")
    yield from make_table(("figure", "value", "goal", ""), _rows(report.results))
    for reason, names in groupby(report.left_out, key=report.left_out.__getitem__):
        yield from (f"**Not measured**: {escape('; '.join(names))}, because {escape(reason)}", "")
    yield from _explain(report)
    if with_charts:
        yield from _draw_chart(report)


def _read_summary(benchmark: str) -> str:
    """Returns the first paragraph of a benchmark's docstring, without importing the benchmark."""
    module = ast.parse((ROOT / f"benchmarks/{benchmark}.py").read_text())
    return escape((ast.get_docstring(module) or "").partition("\n\n")[0])


def _describe_run(report: Report) -> str:
    parts = ["Measured"]
    if report.date:
        parts.append(f"on {report.date}")
    if report.version:
        parts.append(f"with version {report.version}")
    parts.append(f"on {_describe_processor(report.processor)}.")
    return " ".join(parts)


def _describe_processor(processor: Processor | None) -> str:
    if processor is None:
        return "a machine that the file does not describe"
    unit = "logical core" if processor.count == 1 else "logical cores"
    features = ", ".join(f"`{name}`" for name in processor.features)
    host = f"{processor.count} {unit} of {escape(processor.name)}" + (f" ({features})" if features else "")
    return " and ".join([*map(escape, processor.gpus), host])


def _rows(figures: Sequence[Figure]) -> Iterator[tuple[str, str, str, str]]:
    for subject, members in groupby(figures, key=lambda each: each.subject):
        if subject:
            yield (f"**{escape(subject)}**", "", "", "")
        for each in members:
            value = f"{_number(each.value)} {escape(each.unit)}".rstrip()
            goal = f"{_SIGNS[each.goal[:2]]} {_number(float(each.goal[2:]))}" if each.goal else ""
            yield (escape(each.name), value, goal, _VERDICTS[each.met])


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _relate(figure: Figure) -> float | None:
    """Returns a ratio of the value and its goal that is at most 1 if the goal is met.

    Returns None if the figure has no goal, or a goal of 0.
    """
    goal = float(figure.goal[2:] or 0)
    if goal <= 0 or figure.value < 0:
        return None
    if figure.goal.startswith("<="):
        return figure.value / goal
    return goal / figure.value if figure.value else float("inf")


def _draw_chart(report: Report) -> Iterator[str]:
    """Yields the lines of an SVG with a bar for each figure that has a goal. Yields none for fewer than two figures."""
    bars = [(each, relation) for each in report.results if (relation := _relate(each)) is not None]
    if len(bars) < 2:
        return
    height = _TOP + _ROW * len(bars)
    label = f"{report.benchmark}: the figures relative to their goals"
    size = f'width="{_WIDTH}" viewBox="0 0 {_WIDTH} {height}" style="max-width: 100%; height: auto"'
    yield "<div>"
    yield f'<svg {size} role="img" aria-label="{label}" fill="currentColor" font-size="13">'
    yield f'<text x="{_SCALE}" y="14" text-anchor="middle">goal</text>'
    for number, (figure, relation) in enumerate(bars):
        y = _TOP + _ROW * number
        length = round(_SCALE * min(relation, _MOST))
        name = _full_name(figure)
        share = f"{100 * relation:,.0f} %" if figure.met else f"{100 * relation:,.0f} %, missed"
        yield f'<text y="{y + 10}">{escape_html(name)}</text>'
        yield f'<rect y="{y + 16}" width="{length}" height="{_BAR}" fill="{_COLORS[bool(figure.met)]}"/>'
        yield f'<text x="{max(length, _SCALE) + 8}" y="{y + 28}">{share}</text>'
        yield f'<path d="M{_SCALE} {y + 13}v20" stroke="currentColor" stroke-width="2"/>'
    yield from ("</svg>", "</div>", "")


if __name__ == "__main__":
    PAGE.write_text(render_performance(read_reports(), with_charts=False))
