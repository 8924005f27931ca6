"""Chromium with the gateway's page: one browser for all tests of a process, and a tab of its own for each test.

A test with a `page` runs on the event loop of the session: `@pytest.mark.asyncio(loop_scope="session")`.
"""

import shutil
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import pytest_asyncio

if TYPE_CHECKING:
    from playwright.async_api import Browser, ConsoleMessage, Page

_NAMES = ("chromium", "chromium-browser", "google-chrome")
_ARGUMENTS = ("--no-sandbox", "--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream")
_SCRIPT = Path(__file__).parent / "gateway/page/hear_output.js"
_EXPECT_MS = 20_000


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def browser() -> "AsyncGenerator[Browser]":
    """A Chromium with a microphone that beeps."""
    from playwright.async_api import async_playwright, expect

    chromium = next(filter(None, map(shutil.which, _NAMES)), None)
    if chromium is None:
        pytest.skip("needs Chromium: run `make browser`")
    expect.set_options(timeout=_EXPECT_MS)
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=chromium, args=_ARGUMENTS)
        yield browser
        await browser.close()


@pytest_asyncio.fixture(loop_scope="session")
async def page(browser: "Browser") -> "AsyncGenerator[Page]":
    """A tab without cookies, storage or cached files of other tests. Fails the test if a script of the page fails."""
    defects = list[str]()

    def check(message: "ConsoleMessage") -> None:
        if "Content Security Policy" in message.text:
            defects.append(message.text)

    async with await browser.new_context() as context:
        page = await context.new_page()
        await page.add_init_script(path=_SCRIPT)
        page.on("console", check)
        page.on("pageerror", lambda error: defects.append(str(error)))
        yield page
    assert defects == []
