"""Takes screenshots of the gateway's page with real pipelines: docs/page-speech.png and docs/page-digits.png.

The question has a short answer, which the small language model often knows. Answers are sampled: the script asks again
until the answer is correct.

Run it in the repository's root, after `make models` and `make browser`: python -m tools.recordings.page
"""

import asyncio
import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from playwright.async_api import Page, ViewportSize, async_playwright, expect

ROOT = Path(__file__).resolve().parents[2]
QUESTION, ANSWER = "What is the capital of France?", "The capital of France is Paris."
DIGIT = "the digit eight"
_STAGEMESH = str(Path(sys.executable).with_name("stagemesh"))
_CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
_SIZE: ViewportSize = {"width": 1040, "height": 760}
_TIMEOUT_MS, _ANSWER_MS = 120_000, 15_000
_ATTEMPTS = 12


async def main() -> None:
    """Takes both screenshots."""
    chromium = next(filter(None, map(shutil.which, _CHROMIUM)), None)
    if chromium is None:
        sys.exit("needs Chromium: run `make browser`")
    expect.set_options(timeout=_TIMEOUT_MS)
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = await browser.new_page(viewport=_SIZE)
        with _served("speech") as url:
            await _ask_for_answer(page, url)
            # The graph is updated once a second. The vocoder works longer than the thinker.
            await expect(page.get_by_text("1 running").first).to_be_visible()
            await page.screenshot(path=ROOT / "docs/page-speech.png")
        with _served("examples/digits/pipeline.yaml") as url:
            await _ask(page, url, DIGIT)
            answer = page.get_by_role("article", name="Answer").last
            await expect(answer).to_have_attribute("aria-busy", "false")
            await expect(page.get_by_text("0 of 64 requests in flight")).to_be_visible()
            await page.screenshot(path=ROOT / "docs/page-digits.png")
        await browser.close()


@contextmanager
def _served(pipeline: str) -> Generator[str]:
    """Runs a pipeline with a gateway. Yields the URL of its page."""
    command = [_STAGEMESH, "up", pipeline, "--port", "0", "--gateway", "127.0.0.1:0", "--json"]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            documents = map(json.loads, process.stdout)
            url = next((each["gateway_url"] for each in documents if each["event"] == "ready"), None)
            if url is None:
                sys.exit("`stagemesh up` ended before the pipeline was ready")
            yield url.removesuffix("/v1")
        finally:
            process.send_signal(signal.SIGTERM)
            process.stdout.read()


async def _ask_for_answer(page: Page, url: str) -> None:
    """Asks the question in new conversations until the answer is correct. Exits after _ATTEMPTS."""
    for _ in range(_ATTEMPTS):
        await _ask(page, url, QUESTION)
        text = page.get_by_role("article", name="Answer").last.locator(".text")
        try:
            await expect(text).to_have_text(ANSWER, timeout=_ANSWER_MS)
        except AssertionError:
            continue
        return
    sys.exit(f"no answer was {ANSWER!r} in {_ATTEMPTS} attempts")


async def _ask(page: Page, url: str, prompt: str) -> None:
    await page.goto(url)
    field = page.get_by_label("Prompt", exact=True)
    await field.fill(prompt)
    await field.press("Enter")


if __name__ == "__main__":
    asyncio.run(main())
