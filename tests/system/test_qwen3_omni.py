"""A deployed tiny Qwen3-Omni, compared with transformers: the same text, the same codes and the same waveform."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from stagemesh.client import (
    AudioChunk,
    AudioFile,
    AudioSamples,
    Client,
    Content,
    GenerateArguments,
    ImageFile,
    Message,
    Result,
    StageArguments,
    VideoFile,
)
from stagemesh.common.errors import StagemeshError
from tests.deployment import Deployment, eventually
from tests.engines.vllm.media_files import encoded, gray_video, pixels, tone, video_file
from tests.gateway.sounds import wav
from tests.models.qwen3_omni import reference
from tests.models.qwen3_omni.reference import SOUND_HZ, Conversation

pytestmark = pytest.mark.timeout(400)

TEXT_TOKENS, CODEC_TOKENS = 12, 24


@dataclass(frozen=True)
class Case:
    """A conversation for transformers, and the same one for a client."""

    name: str
    expected: Conversation
    content: Content


def case(name: str, text: str, *parts: ImageFile | AudioSamples | VideoFile, **media: object) -> Case:
    kinds = [{"type": "text", "text": text}, *({"type": _kind(part)} for part in parts)]
    conversation = Conversation([{"role": "user", "content": kinds}], **media)  # type: ignore[arg-type]
    return Case(name, conversation, [text, *parts])


def _ask(part: ImageFile | AudioFile | AudioSamples | VideoFile) -> GenerateArguments:
    return {"messages": [("user", [part, "What is it?"])]}


def _kind(part: ImageFile | AudioSamples | VideoFile) -> str:
    return {ImageFile: "image", AudioSamples: "audio", VideoFile: "video"}[type(part)]


def cases() -> list[Case]:
    noise = np.random.default_rng(0)
    picture = noise.integers(0, 256, (64, 96, 3), dtype=np.uint8)
    sound = noise.normal(0, 0.1, 2 * SOUND_HZ).astype(np.float32)
    frames = noise.integers(0, 256, (4, 64, 64, 3), dtype=np.uint8)
    image, audio = ImageFile(encoded(picture), "image/png"), AudioSamples(sound, SOUND_HZ)
    lossless = partial(video_file, frames, codec="ffv1", container="matroska", pixel_format="bgr0", rate_hz=2)
    video = VideoFile(lossless(), "video/x-matroska")
    heard = lossless(sound=sound, sound_codec="pcm_f32le", sound_hz=SOUND_HZ)
    return [
        case("text", "Hello there"),
        case("longer text", "What is the sea? Tell me everything about it, from the shore to the deepest trench."),
        case("another speaker", "Good morning", speaker="Chelsie"),
        case("image", "What is it?", image, images=[picture]),
        case("audio", "What is it?", audio, audio=[sound]),
        case("video", "What is it?", video, videos=[frames]),
        case("mixed", "What is it?", image, audio, video, images=[picture], audio=[sound], videos=[frames]),
        case(
            "video with its sound",
            "What is it?",
            VideoFile(heard, "video/x-matroska", use_audio_in_video=True),
            videos=[frames],
            audio=[sound],
            use_audio_in_video=True,
        ),
    ]


@pytest.fixture(scope="module")
def expected(tiny_qwen3_omni: Path) -> Sequence[reference.Result]:
    conversations = [each.expected for each in cases()]
    return reference.run(tiny_qwen3_omni, conversations, text_tokens=TEXT_TOKENS, codec_tokens=CODEC_TOKENS)


def generate(client: Client, each: Case) -> Result:
    thinker: StageArguments = {"temperature": 0.0, "max_tokens": TEXT_TOKENS}
    speaker = {"speaker": each.expected.speaker}
    talker: StageArguments = {"temperature": 0.0, "max_tokens": CODEC_TOKENS, "options": speaker}
    messages = [Message("user", each.content)]
    return client.generate(messages=messages, seed=1, stages={"thinker": thinker, "talker": talker}).result()


def check_begin(result: Result, expected: reference.Result) -> None:
    """Compares a result with the reference, whose codes and audio may end earlier."""
    assert list(result.tokens["tokens"]) == expected.text_ids.tolist()
    codes = np.concatenate([part.tensor for part in result.tensors["codes"]])
    # transformers computes no residual codes for the last token at the limit.
    assert codes[: len(expected.codes)].tolist() == expected.codes.tolist()
    samples = result.audio
    assert samples is not None
    assert len(samples) >= len(expected.waveform)
    assert np.abs(samples[: len(expected.waveform)] - expected.waveform).max() < 1e-4


@pytest.mark.parametrize("number", range(len(cases())), ids=[each.name for each in cases()])
def test_a_request_equals_transformers(omni_up: Deployment, expected: Sequence[reference.Result], number: int) -> None:
    with omni_up.client() as client:
        check_begin(generate(client, cases()[number]), expected[number])


def test_eight_requests_at_once_equal_transformers(omni_up: Deployment, expected: Sequence[reference.Result]) -> None:
    numbers = range(8)
    with omni_up.client() as client, ThreadPoolExecutor(len(numbers)) as pool:
        results = list(pool.map(lambda number: generate(client, cases()[number]), numbers))
    for number, result in zip(numbers, results, strict=True):
        check_begin(result, expected[number])
    eventually(omni_up.idle, timeout_s=10)


def test_text_alone_needs_neither_talker_nor_vocoder(omni_up: Deployment, expected: Sequence[reference.Result]) -> None:
    with omni_up.client() as client:
        thinker: StageArguments = {"temperature": 0.0, "max_tokens": TEXT_TOKENS}
        messages = [Message("user", cases()[0].content)]
        result = client.generate(messages=messages, outputs=["tokens"], stages={"thinker": thinker}).result()
    assert list(result.tokens["tokens"]) == expected[0].text_ids.tolist()
    assert set(result.finished.stages) == {"thinker"}


def _letters(count: int) -> GenerateArguments:
    return {"messages": [("user", "a" * count)]}


SILENT_VIDEO = VideoFile(gray_video([0, 9]), "video/mp4", use_audio_in_video=True)
BAD_REQUESTS: Mapping[str, tuple[GenerateArguments, str, str]] = {
    "unknown speaker": ({"options": {"speaker": "nobody"}}, "INVALID_OPTION", "choose one of: aiden, chelsie, ethan"),
    "speaker of another stage": ({"stages": {"thinker": {"options": {"speaker": "ethan"}}}}, "UNKNOWN_OPTION", "none"),
    "damaged image": (_ask(ImageFile(encoded(pixels())[:99], "image/png")), "INVALID_MEDIA", "file is truncated"),
    "damaged audio": (
        _ask(AudioFile(wav(tone())[:999], "audio/wav")),
        "INVALID_MEDIA",
        "it ends after 999 of 32044 bytes",
    ),
    "empty audio": (_ask(AudioFile(b"", "audio/wav")), "INVALID_MEDIA", "audio has no data"),
    "short audio": (_ask(AudioSamples(tone(0.001), SOUND_HZ)), "INVALID_MEDIA", "send other media, for example longer"),
    "damaged video": (_ask(VideoFile(gray_video([0, 9])[:99], "video/mp4")), "INVALID_MEDIA", "video cannot be read"),
    "silent video": (_ask(SILENT_VIDEO), "INVALID_MEDIA", "it has no audio track"),
    "too large image": (_ask(ImageFile(encoded(pixels(1600, 1600)), "image/png")), "PROMPT_TOO_LONG", "of media"),
    "too long for the thinker": (_letters(3000), "PROMPT_TOO_LONG", "maximum context length is 2048 tokens"),
    "too long for the talker": (_letters(1600), "PROMPT_TOO_LONG", "maximum context length is 1536 tokens"),
    "no turn of the assistant": ({"raw_text": "Hello"}, "INVALID_PROMPT", "the assistant's turn"),
    "empty prompt": ({"messages": [("user", " ")]}, "EMPTY_PROMPT", "provide some text"),
    "unknown output": ({"outputs": ["speech"]}, "UNKNOWN_OUTPUT", "has audio, codes, text, tokens"),
}


def test_bad_requests_name_their_cause(omni_up: Deployment, expected: Sequence[reference.Result]) -> None:
    with omni_up.client() as client, ThreadPoolExecutor(8) as pool:
        good = [pool.submit(generate, client, cases()[number]) for number in (0, 6, 7)]
        bad = {name: pool.submit(_error_of, client, arguments) for name, (arguments, *_) in BAD_REQUESTS.items()}
        errors = {name: each.result() for name, each in bad.items()}
        for number, each in zip((0, 6, 7), good, strict=True):
            check_begin(each.result(), expected[number])
    reasons = {name: reason for name, (_, reason, _) in BAD_REQUESTS.items()}
    assert {name: error.reason for name, error in errors.items()} == reasons
    for name, (_, _, message) in BAD_REQUESTS.items():
        assert message in errors[name].message
        assert len(errors[name].message) < 500
    eventually(omni_up.idle, timeout_s=10)


def _error_of(client: Client, arguments: GenerateArguments) -> StagemeshError:
    prompt = None if {"messages", "raw_text"} & arguments.keys() else "Hello"
    with pytest.raises(StagemeshError) as caught:
        client.generate(prompt, timeout_s=60, **arguments).result()
    return caught.value


@pytest.mark.parametrize(("characters", "max_tokens", "reason"), [(20, 40, "length"), (1490, None, "limit")])
def test_endless_talkers_are_limited(omni_up: Deployment, characters: int, max_tokens: int | None, reason: str) -> None:
    talker: StageArguments = {"temperature": 0.9, "ignore_eos": True, "max_tokens": max_tokens}
    with omni_up.client() as client:
        thinker: StageArguments = {"max_tokens": 8}
        result = client.generate("a" * characters, seed=3, stages={"thinker": thinker, "talker": talker}).result()
    codes = np.concatenate([part.tensor for part in result.tensors["codes"]])
    talked, vocoded = (result.finished.stages[stage] for stage in ("talker", "code2wav"))
    assert len(codes) == (max_tokens or 1536 - talked.usage.prompt_tokens)
    # The vocoder decodes all frames, so that its output is complete.
    assert (talked.finish_reason, vocoded.finish_reason) == (reason, "end")
    assert len(result.audio) > 40 * len(codes)


@pytest.mark.parametrize("rate_hz", [8_000, 44_100])
def test_audio_of_any_sample_rate_is_resampled(omni_up: Deployment, rate_hz: int) -> None:
    """The model receives as many tokens for a second of audio as at its own rate."""
    thinker: StageArguments = {"max_tokens": 2}
    with omni_up.client() as client:
        for hz in (rate_hz, SOUND_HZ):
            audio = AudioSamples(tone(1.0, rate_hz=hz), hz)
            result = client.generate([audio, "Hi"], outputs=["text"], stages={"thinker": thinker}).result()
            assert result.finished.stages["thinker"].usage.media_tokens == 13


def test_the_audio_does_not_depend_on_a_killed_vocoder(omni_up: Deployment) -> None:
    """`make soak` kills the other stages, too. Here vLLM would take half a minute to start again."""
    with omni_up.client() as client:
        undisturbed = _speak(client)
        process_id = omni_up.process_id("code2wav-0")
        disturbed = _speak(client, on_audio=lambda: omni_up.kill("code2wav-0"))
        assert not omni_up.runs("code2wav-0", process_id)
    # The vocoder restarts with other chunks, whose rounding differs.
    assert disturbed.shape == undisturbed.shape
    assert np.abs(disturbed - undisturbed).max() < 1e-4


def _speak(client: Client, on_audio: Callable[[], None] | None = None) -> npt.NDArray[np.float32]:
    """Returns the audio of a request with random tokens. Calls `on_audio` once, when the first audio has arrived."""
    talker: StageArguments = {"max_tokens": 160, "min_tokens": 160}
    thinker: StageArguments = {"temperature": 0.9, "max_tokens": 40, "min_tokens": 40}
    parts = list[npt.NDArray[np.float32]]()
    for event in client.generate("Speak", seed=3, stages={"thinker": thinker, "talker": talker}):
        if isinstance(event, AudioChunk):
            if not parts and on_audio is not None:
                on_audio()
            parts.append(event.samples)
    return np.concatenate(parts)
