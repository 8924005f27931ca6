"""Images in prompts whose KV cache a prefill engine hands over."""

from collections.abc import AsyncIterator, Mapping
from dataclasses import replace

import pytest
import pytest_asyncio
from pydantic import JsonValue

from stagemesh.services.engines.base import SamplingOptions, Task
from stagemesh.services.engines.prompts import ChatMessage, Conversation, MediaFile, Part
from tests.engines.support import collect, text_of
from tests.engines.vllm.media_files import image
from tests.engines.vllm.test_kv_handover import Pair, prefilled, started_pair, stream, ticket_of
from tests.engines.vllm.tiny_media_models import write_idefics3
from tests.engines.vllm.tiny_model import FLOAT32

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(400), pytest.mark.soak]

OPTIONS: Mapping[str, JsonValue] = {**FLOAT32, "max_model_len": 512, "limit_mm_per_prompt": {"image": 2}}
SAMPLING = SamplingOptions(max_tokens=20, temperature=1.0, ignore_eos=True)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engines(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Pair]:
    async with started_pair(write_idefics3(tmp_path_factory.mktemp("idefics3")), OPTIONS, min_tokens=1) as pair:
        yield pair


def task(*images: MediaFile) -> Task:
    parts: list[Part] = ["what is ", *images, " this? " * 20]
    return Task("images", 3, Conversation([ChatMessage("user", parts=parts)]), sampling=SAMPLING)


async def test_texts_equal_those_of_one_engine(engines: Pair) -> None:
    prefill, decode = engines
    each = replace(task(image(seed=1), image(40, 30, seed=2)), wanted=frozenset({"text"}))
    alone = text_of(await collect(decode.submit(replace(each, inlets={"in": stream([])}))))
    sent = await prefilled(prefill, each)
    assert text_of(await collect(decode.submit(replace(each, inlets={"in": stream(sent)})))) == alone
    assert ticket_of(sent).is_released


async def test_cache_of_another_image_is_not_read(engines: Pair, caplog: pytest.LogCaptureFixture) -> None:
    prefill, decode = engines
    sent = await prefilled(prefill, task(image(seed=5)))
    await collect(decode.submit(replace(task(image(seed=6)), inlets={"in": stream(sent)})))
    assert "computed another prompt" in caplog.text
