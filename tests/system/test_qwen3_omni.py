"""A deployed tiny Qwen3-Omni, compared with transformers: the same text, the same codes and the same waveform."""

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from stagemesh.client import AudioSamples, Client, Content, ImageFile, Message, Result, StageArguments, VideoFile
from tests.deployment import Deployment, deployed, eventually
from tests.engines.vllm.media_files import encoded
from tests.models.qwen3_omni import reference
from tests.models.qwen3_omni.reference import SOUND_HZ, TORCHVISION, Conversation
from tests.system.lossless_video import video_of

pytestmark = pytest.mark.timeout(400)

TEXT_TOKENS, CODEC_TOKENS = 12, 24
PIPELINE = """\
pipeline: omni
main_stage: thinker
stages:
  thinker:
    engine: vllm
    model: {model}
    options:
      dtype: float32
      max_model_len: 2048
      max_num_batched_tokens: 64
      kv_cache_memory_bytes: 16777216
      mm_processor_kwargs: {{fps: 2.0}}
      hidden_states: {{layers: [accept], positions: true, dtype: float32}}
  talker:
    engine: vllm
    model: {model}
    options:
      dtype: float32
      max_model_len: 2048
      max_num_batched_tokens: 64
      kv_cache_memory_bytes: 16777216
      codec: {{model: qwen3_omni.talker, dtype: float32}}
  code2wav:
    engine: function
    function: qwen3_omni.code2wav
    model: {model}
edges:
  - {{from: thinker, to: talker, transform: qwen3_omni.thinker2talker}}
  - {{from: talker, to: code2wav, transform: qwen3_omni.talker2code2wav, chunk: {{frames: 8, initial_frames: 3}}}}
outputs: {{text: thinker, tokens: thinker.token_ids, codes: talker.codes, audio: code2wav}}
"""


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
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(TORCHVISION), os.environ.get("PYTHONPATH")])))
        with deployed(file) as deployment:
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
