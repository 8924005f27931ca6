"""Pictures and sound through the vllm engine, on tiny random models, against transformers."""

import asyncio
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytest_asyncio
import torch
from PIL import Image
from pydantic import JsonValue
from vllm.multimodal.parse import MultiModalDataParser

from stagemesh.common.errors import InvalidRequestError, StagemeshError, UnsupportedError
from stagemesh.services.engines.base import ChatMessage, Checkpoint, EngineEvent, SamplingOptions, Task, Usage
from stagemesh.services.engines.media import MediaFile, Part, Samples
from stagemesh.services.engines.vllm.engine import VllmEngine
from stagemesh.services.engines.vllm.media.decoding import DecodedBytes, read_video
from stagemesh.services.engines.vllm.media.feature import video_data
from stagemesh.services.engines.vllm.prompts import prompt_tokens
from tests.engines.emitted_states import TOLERANCE, Floats, received, running
from tests.engines.media_files import encoded, film, image, pixels, sound, tone, wav
from tests.engines.support import collect, packets, stage_config
from tests.engines.tiny_media_models import SAMPLE_RATE_HZ, write_idefics3, write_qwen2_audio

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(240),
]

OPTIONS: Mapping[str, JsonValue] = {
    "dtype": "float32",
    "kv_cache_memory_bytes": 8 << 20,
    "max_model_len": 512,
    "checkpoint_tokens": 1,
}
TOKENS = 20
VOCABULARY = 267
SAMPLED = frozenset({"text", "token_ids"})


@pytest.fixture(scope="module")
def seeing_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_idefics3(tmp_path_factory.mktemp("idefics3"))


@pytest.fixture(scope="module")
def hearing_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen2_audio(tmp_path_factory.mktemp("qwen2-audio"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def seeing(seeing_model: Path) -> AsyncIterator[VllmEngine]:
    limits: dict[str, JsonValue] = {"limit_mm_per_prompt": {"image": 3}, "max_num_batched_tokens": 64}
    async with running(
        seeing_model, **OPTIONS, **limits, media_bytes=1 << 20, hidden_states={"layers": ["last"], "dtype": "float32"}
    ) as host:
        yield host.engine


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def hearing(hearing_model: Path) -> AsyncIterator[VllmEngine]:
    engine = VllmEngine(stage_config("vllm", model=str(hearing_model), options=OPTIONS))
    await engine.start(lambda _: None)
    yield engine
    await engine.close()


def asked(*parts: Part, request_id: str = "r", **sampling: object) -> Task:
    options = {"max_tokens": TOKENS, "temperature": 0.0, "ignore_eos": True, **sampling}
    messages = [ChatMessage("system", "be brief"), ChatMessage("user", "", parts)]
    chosen = SamplingOptions(**options)  # type: ignore[arg-type]
    return Task(request_id, 3, messages, sampling=chosen, wanted=SAMPLED)


def tokens_of(events: Sequence[EngineEvent]) -> list[int]:
    return [token for packet in packets(events) for token in packet.tensors["token_ids"].tolist()]


async def tokens(engine: VllmEngine, task: Task) -> list[int]:
    return tokens_of(await collect(engine.submit(task)))


def text_of_template(*parts: str) -> str:
    """What the tiny models' template makes of `asked`."""
    return f"<|system|>be brief<|end|><|user|>{''.join(parts)}<|end|><|assistant|>"


def processor_of(folder: Path) -> Any:
    from transformers import AutoProcessor

    return AutoProcessor.from_pretrained(folder)  # type: ignore[no-untyped-call]


def greedy(model: Any, inputs: Mapping[str, torch.Tensor]) -> list[int]:
    model.generation_config.eos_token_id = None
    with torch.no_grad():
        made = model.generate(**inputs, max_new_tokens=TOKENS, do_sample=False)
    return made[0, inputs["input_ids"].shape[1] :].tolist()  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def sees(seeing_model: Path) -> tuple[Any, Any]:
    from transformers import Idefics3ForConditionalGeneration

    return Idefics3ForConditionalGeneration.from_pretrained(seeing_model), processor_of(seeing_model)


def seen(reference: tuple[Any, Any], text: str, *pictures: Image.Image) -> list[int]:
    model, processor = reference
    return greedy(model, processor(text=text, images=list(pictures), return_tensors="pt"))


@pytest.fixture(scope="module")
def hears(hearing_model: Path) -> tuple[Any, Any]:
    from transformers import Qwen2AudioForConditionalGeneration

    return Qwen2AudioForConditionalGeneration.from_pretrained(hearing_model), processor_of(hearing_model)


def heard(reference: tuple[Any, Any], text: str, *sounds: Floats) -> list[int]:
    model, processor = reference
    return greedy(model, processor(text=text, audio=list(sounds), sampling_rate=SAMPLE_RATE_HZ, return_tensors="pt"))


# -- pictures


async def test_a_picture_is_seen_as_transformers_sees_it(seeing: VllmEngine, sees: tuple[Any, Any]) -> None:
    expected = seen(sees, text_of_template("what is <image>?"), Image.fromarray(pixels()))
    assert await tokens(seeing, asked("what is ", image(), "?")) == expected


async def test_pictures_keep_their_order_and_places(seeing: VllmEngine, sees: tuple[Any, Any]) -> None:
    first, second = Image.fromarray(pixels(seed=1)), Image.fromarray(pixels(40, 60, seed=2))
    one = await tokens(seeing, asked(image(seed=1), "or", image(40, 60, seed=2)))
    other = await tokens(seeing, asked(image(40, 60, seed=2), image(seed=1), "or"))
    assert one == seen(sees, text_of_template("<image>or<image>"), first, second)
    assert other == seen(sees, text_of_template("<image><image>or"), second, first)


async def test_requests_with_pictures_and_without_run_together(seeing: VllmEngine) -> None:
    tasks = [
        asked("what", *([image(seed=number)] if number % 2 else []), "?", request_id=str(number)) for number in range(8)
    ]
    alone = [await tokens(seeing, task) for task in tasks]
    assert await asyncio.gather(*(tokens(seeing, task) for task in tasks)) == alone
    assert len({tuple(each) for each in alone[1::2]}) == 4
    assert len({tuple(each) for each in alone[::2]}) == 1


async def test_a_conversation_of_text_reaches_a_model_that_sees(seeing: VllmEngine, sees: tuple[Any, Any]) -> None:
    from_parts = await tokens(seeing, asked("a", "b"))
    whole = [ChatMessage("system", "be brief"), ChatMessage("user", "ab")]
    assert from_parts == await tokens(seeing, replace(asked(), prompt=whole))


async def test_usage_counts_the_tokens_of_pictures(seeing: VllmEngine) -> None:
    plain = (await collect(seeing.submit(asked("hi"))))[-1]
    seen = (await collect(seeing.submit(asked("hi", image()))))[-1]
    assert isinstance(plain, Usage)
    assert isinstance(seen, Usage)
    # Four for what is seen, three around.
    assert seen.prompt_tokens == plain.prompt_tokens + 7


@pytest.mark.parametrize("done", [1, 7, TOKENS - 1])
async def test_a_request_with_a_picture_goes_on_from_a_checkpoint(seeing: VllmEngine, done: int) -> None:
    task = asked("what is ", image(), "?")
    events = await collect(seeing.submit(task))
    made = next(each for each in events if isinstance(each, Checkpoint))
    checkpoint = Checkpoint(done, tuple(tokens_of(events)[:done]), made.tensors)
    assert tokens_of(events)[done:] == await tokens(seeing, replace(task, resume_from=checkpoint))


async def test_a_checkpoint_belongs_to_its_picture(seeing: VllmEngine) -> None:
    events = await collect(seeing.submit(asked(image(seed=1))))
    checkpoint = next(each for each in events if isinstance(each, Checkpoint))
    with pytest.raises(InvalidRequestError, match="belongs to another prompt"):
        await collect(seeing.submit(replace(asked(image(seed=2)), resume_from=checkpoint)))


async def test_hidden_states_of_a_picture_equal_those_of_transformers(
    seeing: VllmEngine, sees: tuple[Any, Any]
) -> None:
    got = await received(seeing, replace(asked("what is ", image(), "?"), wanted=None))
    model, processor = sees
    inputs = processor(
        text=text_of_template("what is <image>?"), images=[Image.fromarray(pixels())], return_tensors="pt"
    )
    made = torch.tensor([got.tokens[:-1]])
    inputs["input_ids"] = torch.cat([inputs["input_ids"], made], dim=1)
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    with torch.no_grad():
        states = model(**inputs, output_hidden_states=True).hidden_states[-1][0].numpy()
    assert got.states["hidden_states"].shape == states.shape
    assert np.abs(got.states["hidden_states"] - states).max() < TOLERANCE


# -- sound


async def test_sound_is_heard_as_transformers_hears_it(hearing: VllmEngine, hears: tuple[Any, Any]) -> None:
    expected = heard(hears, text_of_template("say <|audio_bos|><|AUDIO|><|audio_eos|>!"), tone())
    assert await tokens(hearing, asked("say ", sound(), "!")) == expected


async def test_two_sounds_of_other_lengths_are_heard(hearing: VllmEngine, hears: tuple[Any, Any]) -> None:
    place = "<|audio_bos|><|AUDIO|><|audio_eos|>"
    expected = heard(hears, text_of_template(f"{place}{place}or"), tone(0.5), tone(1.5, pitch_hz=880))
    assert await tokens(hearing, asked(sound(0.5), sound(1.5, pitch_hz=880), "or")) == expected


async def test_a_file_is_heard_like_its_samples(hearing: VllmEngine) -> None:
    steps = (tone() * 32767).astype("<i2")
    file = MediaFile("audio", wav(tone()), "audio/wav")
    as_samples = Samples((steps / 32768).astype(np.float32), SAMPLE_RATE_HZ)
    assert await tokens(hearing, asked(file)) == await tokens(hearing, asked(as_samples))


async def test_another_rate_is_brought_to_the_models(hearing: VllmEngine) -> None:
    events = await collect(hearing.submit(asked(sound(1.0, rate_hz=48_000))))
    expected = await collect(hearing.submit(asked(sound(1.0))))
    assert events[-1] == expected[-1]


async def test_channels_are_averaged(hearing: VllmEngine) -> None:
    both = np.stack([tone(), tone()], axis=1)
    assert await tokens(hearing, asked(Samples(both, SAMPLE_RATE_HZ))) == await tokens(hearing, asked(sound()))


# -- films: no model that takes them can be loaded without torchvision, so they are followed to vLLM's border


async def test_a_film_is_what_vllm_takes_for_one() -> None:
    file = MediaFile("video", film([10 * number for number in range(20)]), "video/mp4")
    read = read_video(file, DecodedBytes(1 << 20), max_frames=4)
    parsed = MultiModalDataParser(video_needs_metadata=True).parse_mm_data({"video": [video_data(read)]})
    frames, metadata = parsed["video"].get(0)
    np.testing.assert_allclose(frames.mean(axis=(1, 2, 3)), [0, 60, 130, 190], atol=3)
    assert (metadata["frames_indices"], metadata["total_num_frames"], metadata["duration"]) == ([0, 6, 13, 19], 20, 2.0)
    assert parsed.get_all_counts() == {"video": 1}


@pytest.mark.parametrize(
    ("part", "kind"), [(MediaFile("video", b"x", "video/mp4"), "video"), (sound(), "audio"), (image(), "image")]
)
async def test_vllm_knows_each_kind_in_its_place(seeing: VllmEngine, part: Part, kind: str) -> None:
    llm = seeing._llm
    assert llm is not None
    prompt = [ChatMessage("user", "", ("a", part, "b"))]
    if kind == "image":
        ids = prompt_tokens(prompt, llm.renderer, vocabulary=VOCABULARY)
        assert llm.get_tokenizer().decode(ids) == "<|user|>a<image>b<|end|><|assistant|>"
    else:
        with pytest.raises(InvalidRequestError, match=f"At most 0 {kind}"):
            prompt_tokens(prompt, llm.renderer, vocabulary=VOCABULARY)


# -- what cannot be


def picture(width: int, height: int) -> MediaFile:
    return MediaFile("image", encoded(np.zeros((height, width, 3), np.uint8)), "image/png")


WRONG: Sequence[tuple[Sequence[Part], type[StagemeshError], str, str]] = [
    ([sound()], UnsupportedError, "UNSUPPORTED", "takes no audio; it takes text, image"),
    ([MediaFile("video", b"x", "video/mp4")], UnsupportedError, "UNSUPPORTED", "takes no video; it takes text, image"),
    ([image()] * 4, InvalidRequestError, "TOO_MANY_MEDIA", "holds 4 of kind image; the model takes 3 at most"),
    ([MediaFile("image", b"nothing", "image/png")], InvalidRequestError, "INVALID_MEDIA", "the image cannot be read"),
    ([MediaFile("image", image().data[:200], "image/png")], InvalidRequestError, "INVALID_MEDIA", "cannot be read"),
    ([MediaFile("image", image().data, "image/jpeg")], InvalidRequestError, "INVALID_MEDIA", "true media type"),
    ([picture(1_000, 1_000)], InvalidRequestError, "MEDIA_TOO_LARGE", "3000000 bytes once decoded, of 1048576"),
    ([picture(400, 400)] * 3, InvalidRequestError, "MEDIA_TOO_LARGE", "once decoded"),
    ([picture(201, 1)], InvalidRequestError, "INVALID_MEDIA", "201 by 1 pixels; one side may be at most 200 times"),
    (["x" * 500, image()], InvalidRequestError, "PROMPT_TOO_LONG", "takes 512 in all"),
]


@pytest.mark.parametrize(("parts", "kind", "reason", "message"), WRONG, ids=lambda value: str(value)[:30])
async def test_what_cannot_be_shown_harms_nobody_else(
    seeing: VllmEngine, parts: Sequence[Part], kind: type[StagemeshError], reason: str, message: str
) -> None:
    other = asked("what ", image(seed=5), "?", request_id="other")
    alone = await tokens(seeing, other)
    async with aclosing(seeing.submit(other)) as events:
        first = await anext(events)
        with pytest.raises(kind, match=re.escape(message)) as caught:
            await collect(seeing.submit(asked(*parts)))
        assert caught.value.reason == reason
        assert tokens_of([first, *await collect(events)]) == alone


async def test_a_picture_that_was_refused_once_is_seen_later(seeing: VllmEngine) -> None:
    for text in ("x" * 500, "x"):
        task = asked(text, image(seed=9))
        if len(text) > 1:
            with pytest.raises(InvalidRequestError, match="512 in all"):
                await tokens(seeing, task)
        else:
            assert len(await tokens(seeing, task)) == TOKENS


@pytest.mark.parametrize(
    ("part", "reason", "message"),
    [
        (Samples(np.array([0.0, np.nan] * 800, np.float32), 16_000), "INVALID_MEDIA", "sample 1 of the audio is nan"),
        (Samples(np.zeros(1, np.float32), 16_000), "INVALID_MEDIA", "rejects the media"),
        (MediaFile("audio", b"x" * 100, "audio/wav"), "INVALID_MEDIA", "the audio cannot be read"),
        (MediaFile("audio", wav(tone(0.0)), "audio/wav"), "INVALID_MEDIA", "it has no samples"),
        (image(), "UNSUPPORTED", "takes no image; it takes text, audio"),
    ],
    ids=lambda value: str(value)[:30],
)
async def test_what_cannot_be_heard_is_refused(hearing: VllmEngine, part: Part, reason: str, message: str) -> None:
    with pytest.raises(StagemeshError, match=re.escape(message)) as caught:
        await collect(hearing.submit(asked(part)))
    assert caught.value.reason == reason
    assert len(await tokens(hearing, asked(sound()))) == TOKENS
