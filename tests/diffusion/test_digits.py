"""End-to-end test of the digits pipeline: three services draw digits, and a classifier reads them."""

import base64
import io
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from examples.digits.classifier import read
from examples.digits.prompts import NAMES, prompt
from PIL import Image
from playwright.async_api import Page, expect

from stagemesh.client import Client
from tests.deployment import Deployment, deployed
from tests.gateway.making import serving
from tests.gateway.page.visiting import answer, send

pytestmark = pytest.mark.timeout(240)

PIPELINE = Path("examples/digits/pipeline.yaml")
A_DIGIT = 8
ENOUGH = 76


@pytest.fixture(scope="module")
def up() -> Iterator[Deployment]:
    with deployed(PIPELINE) as deployment:
        yield deployment


def draw(client: Client, digit: int, seed: int) -> Image.Image:
    result = client.generate(prompt(digit), seed=seed).result()
    return Image.open(io.BytesIO(result.images["image"][0].data))


def test_eighty_digits_are_read_as_prompted(up: Deployment) -> None:
    digits = [digit for digit in range(len(NAMES)) for _ in range(A_DIGIT)]
    with up.client() as client, ThreadPoolExecutor(8) as pool:
        images = list(pool.map(lambda seed: draw(client, digits[seed], seed), range(len(digits))))
    assert {image.size for image in images} == {(32, 32)}
    right = sum(read == wanted for read, wanted in zip(read(images), digits, strict=True))
    assert right >= ENOUGH


@pytest.mark.asyncio(loop_scope="session")
async def test_the_page_of_the_gateway_shows_a_digit(up: Deployment, page: Page) -> None:
    async with serving(up.endpoint) as address:
        await page.goto(f"http://{address}/")
        images = list[Image.Image]()
        # The page chooses no seed, and a few digits cannot be read.
        for number in range(1, 4):
            await send(page, prompt(7))
            await expect(page.get_by_role("article", name="Answer")).to_have_count(number)
            await expect(answer(page)).to_have_attribute("aria-busy", "false")
            source = await answer(page).get_by_role("img", name=prompt(7)).get_attribute("src") or ""
            images.append(Image.open(io.BytesIO(base64.b64decode(source.partition(",")[2]))))
        await page.close()
    assert read(images).count(7) >= 2
