"""End-to-end test of the digits pipeline: three services draw digits, and a classifier reads them."""

import io
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from examples.digits.classifier import read
from examples.digits.prompts import NAMES, prompt
from PIL import Image

from stagemesh.client import Client
from tests.deployment import Deployment, deployed

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
