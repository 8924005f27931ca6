"""The gateway's page in a browser, with an orchestrator that follows scripts."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from playwright.async_api import Locator, Page

from stagemesh.rpc.authentication import TokenChecker
from stagemesh.v1.signature_pb2 import Signature
from tests.client.scripted import Script, ScriptedOrchestrator, Talk, served
from tests.gateway.making import describe, serving


@asynccontextmanager
async def visiting(
    page: Page,
    *scripts: Script,
    outputs: Sequence[str] = ("text", "audio"),
    talks: Sequence[Talk] = (),
    tokens: TokenChecker | None = None,
    **settings: Any,
) -> AsyncGenerator[ScriptedOrchestrator]:
    """Opens the page of a gateway, whose pipeline "p" has one stage with these outputs. Yields the orchestrator.

    `settings` are those of the gateway's config.
    """
    async with served(tokens=tokens) as orchestrator:
        describe(orchestrator, *outputs, signature=Signature(media=True), detects_turns=bool(talks))
        orchestrator.scripts.extend(scripts)
        orchestrator.talks.extend(talks)
        async with serving(orchestrator.endpoint, **settings) as address:
            await page.goto(f"http://{address}/")
            yield orchestrator
            await page.close()


async def send(page: Page, prompt: str) -> None:
    """Sends a prompt by the keyboard."""
    field = page.get_by_label("Prompt", exact=True)
    await field.fill(prompt)
    await field.press("Enter")


def answer(page: Page) -> Locator:
    """Returns the last answer."""
    return page.get_by_role("article", name="Answer").last


async def samples(page: Page, name: str) -> int:
    """Returns a number of samples of the last answer: those that were `heard`, or those that were `received`."""
    return int(await answer(page).locator(".heard").get_attribute(f"data-{name}") or 0)
