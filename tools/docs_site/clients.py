"""The page of stock clients, generated from the results that `make clients` writes.

Write docs/clients-matrix.md: python -m tools.docs_site.clients
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from pydantic import TypeAdapter

from tests.clients.environments import CLIENTS, RESULTS, StockClient
from tools.docs_site.pages import ROOT
from tools.docs_site.tables import escape, make_table

PAGE = ROOT / "docs/clients-matrix.md"
_HEAD = """\
# Clients of OpenAI's API

These programs have been run against [the gateway](gateway.md) with their own defaults. They were given only its URL and
the name of a model. This page is generated from the results of `make clients`. The models are the pipelines `speech`
and `digits`, a tiny Qwen3-Omni with random weights, and a script that calls the tools it is offered.
[Parameters](gateway-parameters.md) says what the gateway does with each parameter.

"""
_TAIL = """\
`make clients CLIENTS="openai langchain"` runs some of them, and `NEWEST=1` takes the newest versions instead of those
in `requirements/clients`. Each client is a script in `tests/clients`.
"""


@dataclass(frozen=True)
class Result:
    """The features of a client when it last ran."""

    digest: str
    """The client's digest at that time."""
    versions: Mapping[str, str]
    problems: Mapping[str, str | None]
    """The problem of each feature, or None if the feature works."""


def read_results() -> Mapping[str, Result]:
    """Returns the results that the clients have written, by their names."""
    parse = TypeAdapter(Result).validate_json
    return {path.stem: parse(path.read_bytes()) for path in sorted(RESULTS.glob("*.json"))}


def render_clients(results: Mapping[str, Result]) -> str:
    """Returns the results as a Markdown document."""
    rows = (row for name, client in CLIENTS.items() if name in results for row in _rows(client, results[name]))
    return _HEAD + "\n".join([*make_table(("client", "version", "feature", "result"), rows), _TAIL])


def _rows(client: StockClient, result: Result) -> Iterator[tuple[str, str, str, str]]:
    """Yields one row for the features that work, and one for each other."""
    versions = ", ".join(f"{name} {version}" for name, version in result.versions.items())
    working = ", ".join(feature for feature, problem in result.problems.items() if problem is None)
    rows = [(working, "works")] if working else []
    rows += [
        (feature, f"does not work: {escape(client.gaps.get(feature, problem))}")
        for feature, problem in result.problems.items()
        if problem is not None
    ]
    for number, (features, verdict) in enumerate(rows):
        yield ("", "", features, verdict) if number else (client.name, versions, features, verdict)


if __name__ == "__main__":
    PAGE.write_text(render_clients(read_results()))
