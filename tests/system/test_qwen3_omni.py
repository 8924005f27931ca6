"""A deployed tiny Qwen3-Omni, compared with transformers: the same text, the same codes and the same waveform."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from stagemesh.client import (
    AudioChunk,
    AudioSamples,
    Client,
    Content,
    ImageFile,
    Message,
    Result,
    StageArguments,
    VideoFile,
)
from tests.deployment import Deployment, deployed, eventually
from tests.engines.vllm.media_files import encoded
from tests.models.qwen3_omni import reference
from tests.models.qwen3_omni.deployment import PIPELINE, with_torchvision
from tests.models.qwen3_omni.reference import SOUND_HZ, Conversation
from tests.system.lossless_video import video_of

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


def _kind(part: ImageFile | AudioSamples | VideoFile) -> str:
    return {ImageFile: "image", AudioSamples: "audio", VideoFile: "video"}[type(part)]


def cases() -> list[Case]:
    noise = np.random.default_rng(0)
    pixels = noise.integers(0, 256, (64, 96, 3), dtype=np.uint8)
    sound = noise.normal(0, 0.1, 2 * SOUND_HZ).astype(np.float32)
    frames = noise.integers(0, 256, (4, 64, 64, 3), dtype=np.uint8)
    image, audio, video = (
        ImageFile(encoded(pixels), "image/png"),
        AudioSamples(sound, SOUND_HZ),
        video_of(frames, rate_hz=2),
    )
    return [
        case("text", "Hello there"),
        case("longer text", "What is the sea? Tell me everything about it, from the shore to the deepest trench."),
        case("another speaker", "Good morning", speaker="Chelsie"),
        case("image", "What is it?", image, images=[pixels]),
        case("audio", "What is it?", audio, audio=[sound]),
        case("video", "What is it?", video, videos=[frames]),
        case("mixed", "What is it?", image, audio, video, images=[pixels], audio=[sound], videos=[frames]),
    ]


@pytest.fixture(scope="module")
def expected(tiny_qwen3_omni: Path) -> Sequence[reference.Result]:
    conversations = [each.expected for each in cases()]
    return reference.run(tiny_qwen3_omni, conversations, text_tokens=TEXT_TOKENS, codec_tokens=CODEC_TOKENS)


@pytest.fixture(scope="module")
def omni(tiny_qwen3_omni: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    file = tmp_path_factory.mktemp("omni") / "omni.yaml"
    file.write_text(PIPELINE.format(model=tiny_qwen3_omni))
    with with_torchvision(), deployed(file) as deployment:
        yield deployment


def generate(client: Client, each: Case) -> Result:
    thinker: StageArguments = {"temperature": 0.0, "max_tokens": TEXT_TOKENS}
    speaker = {"speaker": each.expected.speaker}
    talker: StageArguments = {"temperature": 0.0, "max_tokens": CODEC_TOKENS, "options": speaker}
    messages = [Message("user", each.content)]
    return client.generate(messages=messages, seed=1, stages={"thinker": thinker, "talker": talker}).result()


def check(result: Result, expected: reference.Result) -> None:
    assert list(result.tokens["tokens"]) == expected.text_ids.tolist()
    codes = np.concatenate([part.tensor for part in result.tensors["codes"]])
    # transformers computes no residual codes for the last token at the limit.
    assert codes[: len(expected.codes)].tolist() == expected.codes.tolist()
    samples = result.audio
    assert samples is not None
    assert len(samples) >= len(expected.waveform)
    assert np.abs(samples[: len(expected.waveform)] - expected.waveform).max() < 1e-4


@pytest.mark.parametrize("number", range(len(cases())), ids=[each.name for each in cases()])
def test_a_request_equals_transformers(omni: Deployment, expected: Sequence[reference.Result], number: int) -> None:
    with omni.client() as client:
        check(generate(client, cases()[number]), expected[number])


def test_eight_requests_at_once_equal_transformers(omni: Deployment, expected: Sequence[reference.Result]) -> None:
    numbers = [*range(len(expected)), 0][:8]
    with omni.client() as client, ThreadPoolExecutor(len(numbers)) as pool:
        results = list(pool.map(lambda number: generate(client, cases()[number]), numbers))
    for number, result in zip(numbers, results, strict=True):
        check(result, expected[number])
    eventually(omni.idle, timeout_s=10)


def test_a_request_for_text_alone_needs_neither_talker_nor_vocoder(
    omni: Deployment, expected: Sequence[reference.Result]
) -> None:
    with omni.client() as client:
        thinker: StageArguments = {"temperature": 0.0, "max_tokens": TEXT_TOKENS}
        messages = [Message("user", cases()[0].content)]
        result = client.generate(messages=messages, outputs=["tokens"], stages={"thinker": thinker}).result()
    assert list(result.tokens["tokens"]) == expected[0].text_ids.tolist()
    assert set(result.finished.stages) == {"thinker"}


def test_the_audio_does_not_depend_on_a_killed_vocoder(omni: Deployment) -> None:
    """`make soak` kills the other stages, too. Here vLLM would take half a minute to start again."""
    with omni.client() as client:
        undisturbed = _speak(client)
        process_id = omni.process_id("code2wav-0")
        disturbed = _speak(client, on_audio=lambda: omni.kill("code2wav-0"))
        assert not omni.runs("code2wav-0", process_id)
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
