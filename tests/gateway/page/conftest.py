import shutil
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
from playwright.async_api import ConsoleMessage, Page, async_playwright, expect

NAMES = ("chromium", "chromium-browser", "google-chrome")
ARGUMENTS = ("--no-sandbox", "--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream")

expect.set_options(timeout=20_000)


@pytest.fixture
async def page() -> AsyncGenerator[Page]:
    """A tab of a new Chromium with a microphone that beeps. Fails the test if a script of the page fails."""
    chromium = next(filter(None, map(shutil.which, NAMES)), None)
    if chromium is None:
        pytest.skip("needs Chromium: run `make browser`")
    defects = list[str]()

    def check(message: ConsoleMessage) -> None:
        if "Content Security Policy" in message.text:
            defects.append(message.text)

    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=chromium, args=ARGUMENTS)
        page = await browser.new_page()
        await page.add_init_script(path=Path(__file__).with_name("hear_output.js"))
        page.on("console", check)
        page.on("pageerror", lambda error: defects.append(str(error)))
        yield page
        await browser.close()
    assert defects == []
