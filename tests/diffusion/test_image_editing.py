"""Qwen-Image-Edit: a prompt has an input image, and invalid images are rejected."""

from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
import pytest_asyncio
from PIL import Image

from stagemesh.common.errors import InternalError, StagemeshError
from stagemesh.services.engines.base import Task
from stagemesh.services.engines.diffusion.engine import DiffusionEngine
from stagemesh.services.engines.diffusion.model.loading import load_image_processor
from stagemesh.services.engines.prompts import ChatMessage, Conversation, MediaFile
from tests.diffusion.stages import image_task, made_frames, md5, painting
from tests.diffusion.tiny.calls import ImageSpec, classic_image, load
from tests.diffusion.tiny.pipelines import write_qwen_image_edit
from tests.engines.support import collect
from tests.engines.vllm.media_files import encoded, pixels
from tests.module_fixtures import made_for_module
from tests.pictures import encoded_image

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(180)]

PIXELS = pixels(64, 16)
SPEC = ImageSpec("make it red", seed=1, width=48, steps=2)


folder = made_for_module(write_qwen_image_edit)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engine(folder: Path) -> AsyncGenerator[DiffusionEngine]:
    async with painting(folder) as made:
        yield made


def task(*images: MediaFile) -> Task:
    return image_task(SPEC, prompt=Conversation([ChatMessage("user", "", (SPEC.prompt, *images))]))


def png(data: bytes = encoded(PIXELS)) -> MediaFile:
    return MediaFile("image", data, "image/png")


def expected(folder: Path) -> str:
    """Returns the digest of the image of `__call__`."""
    classic = load(folder, processor=load_image_processor(folder))
    return md5(classic_image("qwen-image", classic, SPEC, image=Image.fromarray(PIXELS)).numpy())


async def test_an_edited_image_equals_that_of_the_call(folder: Path, engine: DiffusionEngine) -> None:
    # The second time, the prompt and the image are in the prompt cache.
    made = [await made_frames(engine, task(png())) for _ in range(2)]
    assert {md5(one) for one in made} == {expected(folder)}
    assert engine.load().running == 0


def damaged(at: int) -> bytes:
    data = bytearray(encoded(PIXELS))
    data[at : at + 8] = b"\xff" * 8
    return bytes(data)


UNREADABLE = (
    *(b"", b"not an image", encoded(PIXELS)[:200], damaged(8), damaged(60), b"RIFF\x24\x00\x00\x00WAVEfmt "),
    # Pillow would read the first, and start Ghostscript for the second.
    *(encoded(PIXELS, "TIFF"), encoded(PIXELS, "EPS"), encoded_image(Image.new("1", (9_500, 9_500)))),
)


@pytest.mark.parametrize(
    ("images", "error"),
    [
        *(((png(data),), "the image cannot be read") for data in UNREADABLE),
        ((), "the prompt has 0 images; this model needs one image"),
        ((png(), png()), "the prompt has 2 images; this model needs one image"),
        ((MediaFile("audio", b"RIFF", "audio/wav"),), "a diffusion stage accepts images, but not audio or video"),
    ],
)
async def test_an_invalid_image_is_rejected(images: tuple[MediaFile, ...], error: str, engine: DiffusionEngine) -> None:
    with pytest.raises(StagemeshError, match=error) as caught:
        await collect(engine.submit(task(*images)))
    assert not isinstance(caught.value, InternalError)
    assert (engine.load().running, engine.load().queued) == (0, 0)
