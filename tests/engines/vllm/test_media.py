"""Images and audio through the vllm engine on tiny random models, compared with transformers."""

import asyncio
import io
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import pytest_asyncio
import torch
from PIL import Image
from pydantic import JsonValue
from vllm.multimodal.media.audio import load_audio
from vllm.multimodal.media.image import ImageMediaIO
from vllm.multimodal.parse import MultiModalDataParser

from stagemesh.common.errors import InvalidRequestError, StagemeshError, UnsupportedError
from stagemesh.common.media.decoding import DecodedBytes
from stagemesh.common.media.videos import read_video
from stagemesh.services.engines.base import Checkpoint, SamplingOptions, Task
from stagemesh.services.engines.prompts import ChatMessage, Conversation, MediaFile, Medium, Part, RawPrompt, Samples
from stagemesh.services.engines.vllm.engine import VllmEngine
from stagemesh.services.engines.vllm.media import check_audio_tracks, decode_media
from stagemesh.services.engines.vllm.requests import prompt_tokens
from tests.engines.support import collect, sampled_tokens, tokens_of, usage_of
from tests.engines.vllm.emitted_states import ONLY_LAST, TOLERANCE, received, running
from tests.engines.vllm.engines import started, undisturbed
from tests.engines.vllm.media_files import audio_samples, gray_video, image, pixels, tone
from tests.engines.vllm.tiny_media_models import SAMPLE_RATE_HZ, write_idefics3, write_qwen2_audio
from tests.engines.vllm.tiny_model import FLOAT32
from tests.gateway.sounds import wav
from tests.media.samples import PICTURES, animated, channels_file, oriented
from tests.module_fixtures import made_for_module
from tests.rpc.call_errors import raises

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(240)]

OPTIONS: Mapping[str, JsonValue] = {**FLOAT32, "max_model_len": 512, "checkpoint_tokens": 1}
TOKENS = 20
SAMPLED = frozenset({"text", "token_ids"})
AUDIO_PART = "<|audio_bos|><|AUDIO|><|audio_eos|>"
SAMPLED_AT = {"sampling_rate": SAMPLE_RATE_HZ}


image_model = made_for_module(write_idefics3)


audio_model = made_for_module(write_qwen2_audio)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def image_engine(image_model: Path) -> AsyncIterator[VllmEngine]:
    limits: dict[str, JsonValue] = {"limit_mm_per_prompt": {"image": 3}, "max_num_batched_tokens": 64}
    async with running(image_model, **OPTIONS, **limits, media_bytes=1 << 20, hidden_states=ONLY_LAST) as host:
        yield host.engine


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def audio_engine(audio_model: Path) -> AsyncIterator[VllmEngine]:
    async with started(audio_model, **OPTIONS) as engine:
        yield engine


def asked(*parts: Part, request_id: str = "r", **sampling: object) -> Task:
    options = {"max_tokens": TOKENS, "temperature": 0.0, "ignore_eos": True, **sampling}
    messages = [ChatMessage("system", "be brief"), ChatMessage("user", "", parts)]
    chosen = SamplingOptions(**options)  # type: ignore[arg-type]
    return Task(request_id, 3, Conversation(messages), sampling=chosen, wanted=SAMPLED)


def text_of_template(*parts: str) -> str:
    """Returns the text that the tiny models' chat template makes of `asked`."""
    return f"<|system|>be brief<|end|><|user|>{''.join(parts)}<|end|><|assistant|>"


def picture(width: int = 56, height: int = 56, *, seed: int = 0) -> Image.Image:
    return Image.fromarray(pixels(width, height, seed=seed))


class Reference:
    """A model and its processor in transformers, by the name of the model's class."""

    def __init__(self, kind: str, folder: Path) -> None:
        import transformers

        self.model: Any = getattr(transformers, kind).from_pretrained(folder)
        self.model.generation_config.eos_token_id = None
        self.processor: Any = transformers.AutoProcessor.from_pretrained(folder)  # type: ignore[no-untyped-call]

    def inputs(self, text: str, **media: Any) -> Any:
        return self.processor(text=text, return_tensors="pt", **media)

    def tokens(self, text: str, **media: Any) -> list[int]:
        """Returns the greedy tokens that follow a text with media."""
        inputs = self.inputs(text, **media)
        with torch.no_grad():
            made = self.model.generate(**inputs, max_new_tokens=TOKENS, do_sample=False)
        sampled: list[int] = made[0, inputs["input_ids"].shape[1] :].tolist()
        return sampled


@pytest.fixture(scope="module")
def image_reference(image_model: Path) -> Reference:
    return Reference("Idefics3ForConditionalGeneration", image_model)


@pytest.fixture(scope="module")
def audio_reference(audio_model: Path) -> Reference:
    return Reference("Qwen2AudioForConditionalGeneration", audio_model)


# -- images


async def test_image_gives_the_tokens_of_transformers(image_engine: VllmEngine, image_reference: Reference) -> None:
    expected = image_reference.tokens(text_of_template("what is <image>?"), images=[picture()])
    assert await sampled_tokens(image_engine, asked("what is ", image(), "?")) == expected


@pytest.mark.parametrize("data", [PICTURES["P with alphas"], PICTURES["RGBA"], oriented(6), animated("GIF")])
async def test_image_gives_the_tokens_of_vllms_own_loader(
    data: bytes, image_engine: VllmEngine, image_reference: Reference
) -> None:
    loaded = ImageMediaIO().load_bytes(data).media
    expected = image_reference.tokens(text_of_template("what is <image>?"), images=[loaded])
    file = MediaFile("image", data, "application/octet-stream")
    assert await sampled_tokens(image_engine, asked("what is ", file, "?")) == expected


async def test_images_keep_their_order_and_positions(image_engine: VllmEngine, image_reference: Reference) -> None:
    first, second = picture(seed=1), picture(40, 60, seed=2)
    one = await sampled_tokens(image_engine, asked(image(seed=1), "or", image(40, 60, seed=2)))
    other = await sampled_tokens(image_engine, asked(image(40, 60, seed=2), image(seed=1), "or"))
    assert one == image_reference.tokens(text_of_template("<image>or<image>"), images=[first, second])
    assert other == image_reference.tokens(text_of_template("<image><image>or"), images=[second, first])


async def test_requests_with_and_without_images_share_a_batch(image_engine: VllmEngine) -> None:
    images = [[image(seed=number)] if number % 2 else [] for number in range(8)]
    tasks = [asked("what", *each, "?", request_id=str(number)) for number, each in enumerate(images)]
    alone = [await sampled_tokens(image_engine, task) for task in tasks]
    assert await asyncio.gather(*(sampled_tokens(image_engine, task) for task in tasks)) == alone
    assert len({tuple(each) for each in alone[1::2]}) == 4
    assert len({tuple(each) for each in alone[::2]}) == 1


async def test_image_model_answers_a_conversation_of_text(image_engine: VllmEngine, image_reference: Reference) -> None:
    from_parts = await sampled_tokens(image_engine, asked("a", "b"))
    whole = [ChatMessage("system", "be brief"), ChatMessage("user", "ab")]
    assert from_parts == await sampled_tokens(image_engine, replace(asked(), prompt=Conversation(whole)))


async def test_usage_counts_the_tokens_of_images(image_engine: VllmEngine) -> None:
    plain = usage_of(await collect(image_engine.submit(asked("hi"))))
    with_image = usage_of(await collect(image_engine.submit(asked("hi", image()))))
    # Four tokens for the image and three around it.
    assert with_image.prompt_tokens == plain.prompt_tokens + 7


@pytest.mark.parametrize("done", [1, 7, TOKENS - 1])
async def test_request_with_an_image_resumes_from_a_checkpoint(image_engine: VllmEngine, done: int) -> None:
    task = asked("what is ", image(), "?")
    events = await collect(image_engine.submit(task))
    made = next(each for each in events if isinstance(each, Checkpoint))
    checkpoint = Checkpoint(done, tuple(tokens_of(events)[:done]), made.tensors)
    assert tokens_of(events)[done:] == await sampled_tokens(image_engine, replace(task, resume_from=checkpoint))


async def test_checkpoint_of_another_image_is_rejected(image_engine: VllmEngine) -> None:
    events = await collect(image_engine.submit(asked(image(seed=1))))
    checkpoint = next(each for each in events if isinstance(each, Checkpoint))
    with pytest.raises(InvalidRequestError, match="belongs to another prompt"):
        await collect(image_engine.submit(replace(asked(image(seed=2)), resume_from=checkpoint)))


async def test_hidden_states_of_an_image_are_right(image_engine: VllmEngine, image_reference: Reference) -> None:
    got = await received(image_engine, replace(asked("what is ", image(), "?"), wanted=None))
    inputs = image_reference.inputs(text_of_template("what is <image>?"), images=[picture()])
    inputs["input_ids"] = torch.cat([inputs["input_ids"], torch.tensor([got.tokens[:-1]])], dim=1)
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    with torch.no_grad():
        states = image_reference.model(**inputs, output_hidden_states=True).hidden_states[-1][0].numpy()
    assert got.states["hidden_states"].shape == states.shape
    assert np.abs(got.states["hidden_states"] - states).max() < TOLERANCE


# -- audio


async def test_audio_gives_the_tokens_of_transformers(audio_engine: VllmEngine, audio_reference: Reference) -> None:
    expected = audio_reference.tokens(text_of_template(f"say {AUDIO_PART}!"), audio=[tone()], **SAMPLED_AT)
    assert await sampled_tokens(audio_engine, asked("say ", audio_samples(), "!")) == expected


@pytest.mark.parametrize("layout", ["mono", "stereo", "5.1"])
async def test_audio_gives_the_tokens_of_vllms_own_loader(
    layout: str, audio_engine: VllmEngine, audio_reference: Reference
) -> None:
    channels = np.stack([tone() / number for number in range(1, av.AudioLayout(layout).nb_channels + 1)], axis=1)
    file = MediaFile("audio", channels_file(channels, codec="aac", container="mp4", layout=layout), "audio/mp3")
    loaded, _ = load_audio(io.BytesIO(file.data), sr=None, backend="pyav")
    expected = audio_reference.tokens(text_of_template(f"say {AUDIO_PART}!"), audio=[loaded], **SAMPLED_AT)
    assert await sampled_tokens(audio_engine, asked("say ", file, "!")) == expected


async def test_two_audio_parts_of_different_lengths(audio_engine: VllmEngine, audio_reference: Reference) -> None:
    audio = [tone(0.5), tone(1.5, pitch_hz=880)]
    expected = audio_reference.tokens(text_of_template(f"{AUDIO_PART}{AUDIO_PART}or"), audio=audio, **SAMPLED_AT)
    task = asked(audio_samples(0.5), audio_samples(1.5, pitch_hz=880), "or")
    assert await sampled_tokens(audio_engine, task) == expected


async def test_audio_file_equals_its_samples(audio_engine: VllmEngine) -> None:
    steps = (tone() * 32767).astype("<i2")
    file = MediaFile("audio", wav(tone()), "audio/wav")
    as_samples = Samples((steps / 32768).astype(np.float32), SAMPLE_RATE_HZ)
    assert await sampled_tokens(audio_engine, asked(file)) == await sampled_tokens(audio_engine, asked(as_samples))


async def test_audio_is_resampled_to_the_models_rate(audio_engine: VllmEngine) -> None:
    events = await collect(audio_engine.submit(asked(audio_samples(1.0, rate_hz=48_000))))
    expected = await collect(audio_engine.submit(asked(audio_samples(1.0))))
    assert events[-1] == expected[-1]


async def test_samples_of_a_low_rate_count_as_they_are_after_resampling(audio_engine: VllmEngine) -> None:
    hours = Samples(np.zeros(5_000, np.float32), 1)
    with raises(InvalidRequestError, reason="MEDIA_TOO_LARGE"):
        await collect(audio_engine.submit(asked(hours)))


# -- video: video models need torchvision, so these tests end at vLLM's input


async def test_vllm_parses_a_decoded_video() -> None:
    file = io.BytesIO(gray_video([10 * number for number in range(20)]))
    read = read_video(file, DecodedBytes(1 << 20), max_frames=4)
    parsed = MultiModalDataParser(video_needs_metadata=True).parse_mm_data({"video": [read]})
    frames, metadata = parsed["video"].get(0)
    np.testing.assert_allclose(frames.mean(axis=(1, 2, 3)), [0, 60, 130, 190], atol=3)
    assert (metadata["frames_indices"], metadata["total_num_frames"], metadata["duration"]) == ([0, 6, 13, 19], 20, 2.0)
    assert parsed.get_all_counts() == {"video": 1}


@pytest.mark.parametrize(
    ("part", "kind"), [(MediaFile("video", b"x", "video/mp4"), "video"), (audio_samples(), "audio"), (image(), "image")]
)
async def test_chat_template_places_each_kind_of_media(image_engine: VllmEngine, part: Part, kind: str) -> None:
    llm = image_engine.control.llm
    prompt = Conversation([ChatMessage("user", "", ("a", part, "b"))])
    if kind == "image":
        assert llm.get_tokenizer().decode(prompt_tokens(prompt, llm)) == "<|user|>a<image>b<|end|><|assistant|>"
    else:
        with pytest.raises(InvalidRequestError, match=f"At most 0 {kind}"):
            prompt_tokens(prompt, llm)


# -- a video with its audio track: models that accept it need torchvision, so these tests end at vLLM's input, too

VIDEO = MediaFile("video", gray_video([0, 50, 100, 150], sound=tone(1.0)), "video/mp4", use_audio=True)
SILENT = MediaFile("video", gray_video([0, 50]), "video/mp4")


async def test_audio_track_of_a_video_is_decoded_as_audio() -> None:
    data = decode_media([image(), VIDEO], DecodedBytes(1 << 20), max_frames=2, resample=tuple)
    parsed = MultiModalDataParser(target_sr=16_000, video_needs_metadata=True).parse_mm_data(data)
    assert parsed.get_all_counts() == {"image": 1, "video": 1, "audio": 1}
    samples = parsed["audio"].get(0)
    assert len(samples) == pytest.approx(16_000, rel=0.2)
    strongest = np.abs(np.fft.rfft(samples)).argmax() * 16_000 / len(samples)
    assert strongest == pytest.approx(440, abs=10)


async def test_ignored_audio_track_is_not_decoded() -> None:
    data = decode_media([replace(VIDEO, use_audio=False)], DecodedBytes(1 << 20), max_frames=2, resample=tuple)
    assert data.keys() == {"video"}


async def test_video_without_audio_track_is_rejected_if_it_is_requested() -> None:
    with raises(InvalidRequestError, reason="INVALID_MEDIA", match="the video cannot be read: it has no audio track"):
        decode_media([replace(SILENT, use_audio=True)], DecodedBytes(1 << 20), max_frames=2, resample=tuple)


@pytest.mark.parametrize("other", [SILENT, audio_samples()], ids=["video", "audio"])
async def test_audio_tracks_belong_to_all_videos_or_none(other: Medium) -> None:
    check_audio_tracks([VIDEO, image(), VIDEO], stage="s")
    check_audio_tracks([SILENT, other], stage="s")
    with pytest.raises(UnsupportedError, match="set it for all videos or none, and omit the other audio"):
        check_audio_tracks([VIDEO, other], stage="s")


async def test_model_without_video_rejects_a_video_with_audio(audio_engine: VllmEngine) -> None:
    with pytest.raises(UnsupportedError, match="accepts no video; it accepts text, audio"):
        await collect(audio_engine.submit(asked(VIDEO)))


# -- prompts without a template


RAW = "<|user|>what is <image>?<|end|><|assistant|>"


def raw(content: str | Sequence[int], *media: Medium) -> Task:
    return replace(asked(), prompt=RawPrompt(content, media))


async def test_media_accompany_raw_text_and_token_ids(image_engine: VllmEngine, image_reference: Reference) -> None:
    expected = image_reference.tokens(RAW, images=[picture()])
    ids = image_engine.control.llm.get_tokenizer().encode(RAW)
    assert await sampled_tokens(image_engine, raw(RAW, image())) == expected
    assert await sampled_tokens(image_engine, raw(ids, image())) == expected


@pytest.mark.parametrize(
    ("task", "reason", "message"),
    [
        (raw(f"{RAW}<image>", image()), "INVALID_PROMPT", "more placeholders (token 4) than media"),
        (raw("what is?", image()), "INVALID_MEDIA", "rejects the media"),
        (raw([10**6, 4], image()), "UNKNOWN_TOKEN", "token id 1000000 is outside"),
        (raw([], image()), "EMPTY_PROMPT", "the prompt is empty"),
    ],
    ids=["more placeholders", "no placeholder", "unknown token", "no prompt"],
)
async def test_placeholders_match_the_media(image_engine: VllmEngine, task: Task, reason: str, message: str) -> None:
    with raises(InvalidRequestError, reason=reason, match=re.escape(message)):
        await collect(image_engine.submit(task))


# -- invalid media


WRONG: Sequence[tuple[Sequence[Part], str, str]] = [
    ([audio_samples()], "UNSUPPORTED", "accepts no audio; it accepts text, image"),
    ([MediaFile("video", b"x", "video/mp4")], "UNSUPPORTED", "accepts no video; it accepts text, image"),
    ([image()] * 4, "TOO_MANY_MEDIA", "contains 4 of kind image; the model accepts at most 3"),
    ([MediaFile("image", b"nothing", "image/png")], "INVALID_MEDIA", "the image cannot be read"),
    ([image(400, 400)] * 3, "MEDIA_TOO_LARGE", "when decoded"),
    (["x" * 500, image()], "PROMPT_TOO_LONG", "of media) and the output"),
]


@pytest.mark.parametrize(("parts", "reason", "message"), WRONG, ids=lambda value: str(value)[:30])
async def test_invalid_image_fails_its_request_alone(
    image_engine: VllmEngine, parts: Sequence[Part], reason: str, message: str
) -> None:
    kind = UnsupportedError if reason == "UNSUPPORTED" else InvalidRequestError
    async with undisturbed(image_engine, asked("what ", image(seed=5), "?", request_id="other")):
        with raises(kind, reason=reason, match=re.escape(message)):
            await sampled_tokens(image_engine, asked(*parts))


async def test_image_of_a_rejected_request_is_accepted_later(image_engine: VllmEngine) -> None:
    with pytest.raises(InvalidRequestError, match="context length is 512 tokens"):
        await sampled_tokens(image_engine, asked("x" * 500, image(seed=9)))
    assert len(await sampled_tokens(image_engine, asked("x", image(seed=9)))) == TOKENS


@pytest.mark.parametrize(
    ("part", "reason", "message"),
    [
        (Samples(np.zeros(1, np.float32), 16_000), "INVALID_MEDIA", "rejects the media"),
        (MediaFile("audio", b"x" * 100, "audio/wav"), "INVALID_MEDIA", "the audio cannot be read"),
        (image(), "UNSUPPORTED", "accepts no image; it accepts text, audio"),
    ],
    ids=lambda value: str(value)[:30],
)
async def test_invalid_audio_is_rejected(audio_engine: VllmEngine, part: Part, reason: str, message: str) -> None:
    with raises(StagemeshError, reason=reason, match=re.escape(message)):
        await collect(audio_engine.submit(asked(part)))
    assert len(await sampled_tokens(audio_engine, asked(audio_samples()))) == TOKENS
