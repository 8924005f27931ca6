"""The documentation site: the build of `make docs`, the generated pages, and what Python-Markdown needs."""

import re
import sys
from pathlib import Path

import pytest
from playwright.async_api import Browser, Route

from benchmarks.report import Figure, Report, report
from tests.repository.commands import ROOT, run
from tools.docs_site.api import render_api
from tools.docs_site.commands import render_commands
from tools.docs_site.lists import indent_lists
from tools.docs_site.metrics import describe_metrics
from tools.docs_site.pages import find_copies, page_of, relocate_links
from tools.docs_site.performance import PAGE, find_unexplained, read_reports, render_performance
from tools.docs_site.pipeline_file import describe_pipeline_file

OUTSIDE = re.compile(r"<(?:script|link|img|iframe)\b[^>]*\b(?:src|href)=\"?(?:https?:)?//")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the folder of the site, which is built as `make docs` does: a broken link fails the build."""
    folder = tmp_path_factory.mktemp("site")
    run("env", "NO_MKDOCS_2_WARNING=1", sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder))
    return folder


@pytest.mark.parametrize(
    ("page", "content"),
    [
        ("index.html", "A crash does not end a request"),
        ("reference/commands.html", "--gateway"),
        ("reference/metrics.html", "stagemesh_requests_total"),
        ("performance.html", "python -m benchmarks.client_import"),
        ("reference/pipeline-file.html", "left_context_frames"),
        ("reference/api/orchestrator.html", "GenerateRequest"),
        ("repository/protos/stagemesh/v1/orchestrator.proto.html", "OrchestratorService"),
        ("extending.html", "Add an engine"),
    ],
)
def test_a_page_has_its_content(site: Path, page: str, content: str) -> None:
    assert content in (site / page).read_text()


def test_no_page_loads_anything_from_another_host(site: Path) -> None:
    pages = list(site.rglob("*.html"))
    assert len(pages) > 60
    assert [page.name for page in pages if OUTSIDE.search(page.read_text())] == []


@pytest.mark.asyncio(loop_scope="session")
async def test_diagrams_are_drawn_without_another_host(site: Path, browser: Browser) -> None:
    diagrams = (ROOT / "docs/protocol.md").read_text().count("```mermaid")
    defects, others = list[str](), list[str]()

    async def serve(route: Route) -> None:
        if not route.request.url.startswith("http://site/"):
            others.append(route.request.url)
            return await route.abort()
        return await route.fulfill(path=site / route.request.url.removeprefix("http://site/"))

    page = await browser.new_page()
    page.on("console", lambda message: defects.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: defects.append(str(error)))
    await page.route("**", serve)
    # The theme draws each diagram in a shadow tree, which it closes.
    await page.add_init_script(
        "const attach = Element.prototype.attachShadow;"
        "Element.prototype.attachShadow = function () { return attach.call(this, {mode: 'open'}); }"
    )
    await page.goto("http://site/protocol.html")
    await page.wait_for_function(f"document.querySelectorAll('div.mermaid').length === {diagrams}")
    texts = await page.locator("div.mermaid svg").all_text_contents()
    await page.close()
    assert (defects, others) == ([], [])
    assert len(texts) == diagrams > 0
    assert "ExecuteStep" in "".join(texts)


def test_a_benchmark_writes_a_file_that_the_page_shows(tmp_path: Path) -> None:
    figures = [
        Figure("first audio, services / one process", 0.8, "ratio", "<=1.15", "audio"),
        Figure("rate", 0.5, "1/s", ">=0.8", "audio"),
        Figure("lost", 0, "", "<=0", "outputs"),
    ]
    with pytest.raises(SystemExit, match="1"):
        report("edges", figures, json_file=tmp_path / "edges.json", left_out={"nixl": "no package nixl"})
    (read,) = read_reports(tmp_path)
    assert read.results == figures
    assert read.processor is not None
    page = render_performance([read])
    assert "Measures edges: each connector against its underlying transport" in page
    assert f"Measured on {read.date} with version {read.version} on {read.processor.count} logical core" in page
    assert "| first audio, services / one process | 0.8 ratio | ≤ 1.15 | met |" in page
    assert "| rate | 0.5 1/s | ≥ 0.8 | **missed** |" in page
    assert "**Not measured**: nixl, because no package nixl" in page
    # A goal of 0 has no bar.
    assert re.findall(r"\d+ %(?:, missed)?</text>", page) == ["70 %</text>", "160 %, missed</text>"]


def test_a_file_of_an_older_version_has_no_processor() -> None:
    older = Report(benchmark="edges", results=[Figure("rate", 1.0, "1/s")])
    assert "on a machine that the file does not describe" in render_performance([older])


def test_the_page_of_the_repository_has_the_stored_figures() -> None:
    expected = render_performance(read_reports(), with_charts=False)
    assert PAGE.read_text() == expected, "run `python -m tools.docs_site.performance`"


def test_each_missed_goal_has_a_reason_and_each_reason_a_missed_goal() -> None:
    assert find_unexplained(read_reports()) == [], "edit benchmarks/missed_goals.py"


def test_a_missed_goal_without_a_reason_is_found() -> None:
    missed = Report(benchmark="edges", results=[Figure("rate", 0.5, "1/s", ">=0.8", "audio")])
    assert find_unexplained([missed])[0] == "edges: audio: rate"
    assert "- audio: rate. The reason is not known yet." in render_performance([missed])


def test_the_page_says_that_there_are_no_figures(tmp_path: Path) -> None:
    assert "No figures are stored" in render_performance(read_reports(tmp_path))


def test_a_code_block_in_a_list_is_a_code_block(site: Path) -> None:
    text = (site / "extending.html").read_text()
    assert "```" not in text
    assert text.count("<ol>") == 6


def test_every_key_of_a_pipeline_file_has_a_meaning() -> None:
    keys = describe_pipeline_file()
    assert {"pipeline", "stages", "edges", "outputs"} <= {key.name for key in keys["PipelineFile"]}
    assert [f"{name}.{key.name}" for name, found in keys.items() for key in found if not key.meaning] == []


def test_the_document_of_operations_names_only_metrics_that_exist() -> None:
    served = {metric.name for metrics in describe_metrics().values() for metric in metrics}
    text = (ROOT / "docs/operations.md").read_text()
    named = {re.sub(r"_(sum|count|bucket)$", "", name) for name in re.findall(r"`(stagemesh_[a-z_]+)`", text)}
    assert len(named) > 20
    assert named <= served


@pytest.mark.parametrize(
    ("name", "labels"),
    [
        ("stagemesh_request_errors_total", ("reason",)),
        ("stagemesh_stage_recoveries_total", ("stage", "reason")),
        ("stagemesh_chunk_transfer_seconds", ("edge", "connector")),
        ("stagemesh_gateway_requests_total", ("endpoint", "status")),
    ],
)
def test_a_metric_without_samples_has_its_labels(name: str, labels: tuple[str, ...]) -> None:
    found = [each for metrics in describe_metrics().values() for each in metrics if each.name == name]
    assert found
    for metric in found:
        assert metric.labels == labels
        assert metric.text


def test_every_element_of_the_api_has_a_meaning() -> None:
    pages = render_api()
    assert len(pages) == len(list((ROOT / "protos/stagemesh/v1").glob("*.proto"))) + 1
    assert [line for text in pages.values() for line in text.splitlines() if line.endswith("|  |")] == []


def test_the_reference_of_commands_has_subcommands() -> None:
    assert "## `stagemesh admin lora load`" in render_commands().replace("####", "##").replace("###", "##")


@pytest.mark.parametrize(
    ("path", "link", "relocated"),
    [
        ("docs/cli.md", "errors.md#codes", "errors.md#codes"),
        ("docs/cli.md", "../README.md", "index.md"),
        ("docs/cli.md", "../protos/stagemesh/v1", "repository/protos/stagemesh/v1/index.md"),
        ("docs/cli.md", "../LICENSE", "repository/LICENSE.md"),
        ("README.md", "benchmarks/results", "performance.md"),
        ("README.md", "docs/cli.md", "cli.md"),
        ("README.md", "docs/pipeline.svg", "pipeline.svg"),
        ("examples/typescript/README.md", "../../docs/protocol.md", "../../../protocol.md"),
        ("docs/cli.md", "missing.md", "missing.md"),
        ("docs/cli.md", "#waiting", "#waiting"),
        ("docs/cli.md", "https://example.com/a.md", "https://example.com/a.md"),
    ],
)
def test_a_link_leads_to_the_page_of_its_target(path: str, link: str, relocated: str) -> None:
    assert relocate_links(path, f"[text]({link})") == f"[text]({relocated})"


def test_linked_files_of_the_repository_have_pages() -> None:
    copies = find_copies({"docs/a.md": "[x](../examples/graph) [y](b.md) [z](../CONTRIBUTING.md)"})
    assert {"examples/graph", "examples/graph/pipeline.yaml", "CONTRIBUTING.md"} <= copies.keys()
    assert "````yaml\n" in copies["examples/graph/pipeline.yaml"]
    assert page_of("examples/graph/pipeline.yaml") == "repository/examples/graph/pipeline.yaml.md"


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ("a\n- b\n  c\n- d\n", "a\n\n-   b\n    c\n-   d\n"),
        ("- a\n  - b\n    - c\n", "-   a\n    -   b\n        -   c\n"),
        (
            "1. a\n\n   ```python\n   if b:\n       c\n   ```\n2. d\n",
            "1.  a\n\n    ```python\n    if b:\n        c\n    ```\n\n2.  d\n",
        ),
        ("10. a\n    b\n", "10. a\n    b\n"),
        ("- a\nb\n", "-   a\n    b\n"),
        ("```text\n- a\n```\n", "```text\n- a\n```\n"),
    ],
)
def test_lists_have_four_spaces_for_each_level(written: str, read: str) -> None:
    assert indent_lists(written) == read
