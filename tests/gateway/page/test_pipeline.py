"""The pipeline on the page, and the endpoint that reports it."""

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from playwright.async_api import Locator, Page, expect

from tests.deployment import Deployment, deployed_for_module
from tests.gateway.making import error_of, gateway
from tests.gateway.page.visiting import answer, send, visiting
from tests.system.pipelines import pipeline_file

PIPELINE = """
pipeline: rehearsal
stages:
  thinker: {engine: fake, function: source, options: {steps: 500, step_s: 0.02}}
  frames: {engine: fake, function: frames}
  vocoder: {engine: fake, function: sound}
edges:
  - {from: thinker, to: frames}
  - {from: frames, to: vocoder}
outputs: {text: thinker, audio: vocoder}
"""


up = deployed_for_module(lambda folder: pipeline_file(folder, PIPELINE))


@pytest.fixture(scope="module")
def url(up: Deployment) -> Iterator[str]:
    with gateway(up.endpoint) as url:
        yield url


def stage(page: Page, name: str) -> Locator:
    return page.get_by_role("listitem", name=f"{name}:")


def test_the_endpoint_reports_stages_and_edges(url: str) -> None:
    state = httpx.get(f"{url}/v1/stagemesh/pipelines/rehearsal").json()
    assert [each["name"] for each in state["stages"]] == ["thinker", "frames", "vocoder"]
    (replica,) = state["stages"][0]["replicas"]
    assert replica["state"] == "ready"
    assert (replica["load"]["running"], replica["load"]["queued"]) == (0, 0)
    first, second = state["edges"]
    assert (first["from"], first["to"], second["to"]) == ("thinker", "frames", "vocoder")
    assert first["links"] == [{"producer": "thinker-0", "consumer": "frames-0", "connector": "shm", "error": None}]
    assert {each["name"]: each["kind"] for each in state["outputs"]} == {"text": "text", "audio": "audio"}


def test_the_endpoint_rejects_an_unknown_pipeline(url: str) -> None:
    answer = httpx.get(f"{url}/v1/stagemesh/pipelines/other")
    assert "use one of rehearsal" in error_of(answer, 404)["message"]


@pytest.mark.asyncio(loop_scope="session")
async def test_the_graph_shows_the_load_of_each_stage(page: Page, url: str) -> None:
    await page.goto(url)
    for name in ("thinker", "frames", "vocoder"):
        await expect(stage(page, name)).to_have_attribute("aria-label", f"{name}: 1 of 1 replicas ready, idle")
    edge = page.locator('[data-edge="thinker->frames"]')
    await expect(edge).to_have_attribute("data-connectors", "shm")
    await send(page, "go")
    await expect(stage(page, "thinker")).to_have_attribute("data-running", "1")
    await expect(edge).to_have_class("edge busy")
    await expect(page.locator("#status")).to_contain_text("1 of 64 requests in flight")
    await page.get_by_role("button", name="Interrupt").click()
    await expect(stage(page, "thinker")).to_have_attribute("data-running", "0")
    await expect(edge).to_have_class("edge")
    await expect(answer(page)).to_have_attribute("aria-busy", "false")


@pytest.mark.asyncio(loop_scope="session")
async def test_a_narrow_page_has_the_pipeline_from_top_to_bottom(page: Page, url: str) -> None:
    await page.set_viewport_size({"width": 360, "height": 700})
    await page.goto(url)
    await expect(stage(page, "thinker")).to_be_hidden()
    await page.get_by_text("Pipeline").click()
    places = [await stage(page, name).bounding_box() for name in ("thinker", "frames", "vocoder")]
    tops = [place["y"] for place in places if place is not None]
    assert tops == sorted(tops)
    assert len(set(tops)) == 3
    assert await page.evaluate("document.scrollingElement.scrollWidth") == 360


@pytest.mark.asyncio(loop_scope="session")
async def test_the_page_is_dark_where_the_system_is(page: Page, url: str) -> None:
    colors = list[str]()
    for scheme in ("light", "dark"):
        await page.emulate_media(color_scheme="dark" if scheme == "dark" else "light")
        await page.goto(url)
        colors.append(await page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert colors == ["rgb(247, 247, 249)", "rgb(20, 21, 27)"]


@pytest.mark.asyncio(loop_scope="session")
async def test_a_lost_orchestrator_is_reported(page: Page) -> None:
    async with visiting(page) as orchestrator:
        await expect(page.get_by_label("Model")).to_have_value("p")
        orchestrator.description.protocol.Clear()
        await expect(page.locator("#status")).to_contain_text("version")


@pytest.mark.asyncio(loop_scope="session")
async def test_layers_are_the_longest_paths(page: Page, url: str) -> None:
    await page.goto(url)
    layout = await page.evaluate("""async () => {
        const { layOut } = await import("./assets/layout.js");
        const nodes = ["a", "b", "c", "d"].map((id) => ({ id, length: 100, breadth: 50 }));
        const edges = [["a", "b"], ["b", "c"], ["a", "c"], ["a", "d"]].map(([from, to]) => ({ from, to }));
        const { places, paths } = layOut(nodes, edges, { layer: 40, node: 10 });
        return { us: nodes.map(({ id }) => places.get(id).u), bends: paths.map((path) => path.length - 2) };
    }""")
    assert layout == {"us": [0, 140, 280, 140], "bends": [0, 0, 1, 0]}


def test_files_are_kept_until_they_change(url: str) -> None:
    for path, kind in (("/", "text/html"), ("/assets/main.js", "javascript"), ("/assets/style.css", "text/css")):
        first = httpx.get(f"{url}{path}")
        assert first.status_code == 200
        assert kind in first.headers["content-type"]
        assert first.headers["cache-control"] == "no-cache"
        assert "default-src 'none'" in first.headers["content-security-policy"]
        assert "unsafe" not in first.headers["content-security-policy"]
        again = httpx.get(f"{url}{path}", headers={"if-none-match": first.headers["etag"]})
        assert (again.status_code, again.content) == (304, b"")


def test_only_files_of_the_page_are_served(url: str) -> None:
    for path in ("/assets/", "/assets/other.js", "/assets/..%2Findex.html", "/assets/%2Fetc%2Fpasswd"):
        assert httpx.get(f"{url}{path}").status_code == 404


def test_a_gateway_without_the_page_serves_only_the_api(up: Deployment) -> None:
    with gateway(up.endpoint, arguments=["--no-page"]) as url:
        assert httpx.get(f"{url}/").status_code == 404
        assert httpx.get(f"{url}/assets/main.js").status_code == 404
        assert httpx.get(f"{url}/v1/stagemesh/pipelines/rehearsal").is_success


def test_the_page_loads_nothing_from_other_hosts() -> None:
    folder = Path(__file__).parents[3] / "gateway" / "stagemesh" / "gateway" / "page"
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert len(files) > 10
    assert [path.name for path in files if "://" in _without_namespaces(path)] == []


def _without_namespaces(path: Path) -> str:
    return path.read_text().replace("http://www.w3.org/2000/svg", "")
