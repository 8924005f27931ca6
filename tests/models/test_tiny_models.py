"""The tiny models: small, the same for the same seed, and like the real ones in what they depend on."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file
from transformers import AutoTokenizer

from stagemesh.services.models.checkpoint import load_weights, read_config, read_section, weight_names
from stagemesh.services.models.codec_speech.streaming import BatchState, StreamState
from stagemesh.services.models.codec_speech.weights import Weights
from stagemesh.services.models.qwen2_5_omni.description import load_speakers
from stagemesh.services.models.qwen3_tts.codec_decoder import CodecDecoder, CodecDecoderConfig
from stagemesh.tiny_models import qwen2_5_omni, qwen3_omni, qwen3_tts
from tests.models.qwen3_omni.reference import SOUND_HZ, Conversation, Reference, Result, run
from tests.models.qwen3_tts.golden import arrays, requests

CODEC_TOKENS = 24
MB = 1 << 20
MODELS: dict[str, tuple[Callable[..., object], int]] = {
    "tiny_qwen2_5_omni": (qwen2_5_omni.write, 10 * MB),
    "tiny_qwen3_omni": (qwen3_omni.write, 10 * MB),
    "tiny_qwen3_tts": (qwen3_tts.write_custom_voice, 5 * MB),
    "tiny_qwen3_tts_base": (qwen3_tts.write_base, 5 * MB),
}
"""The function that writes a model, and the model's maximum size in bytes, by the name of its fixture."""


@pytest.mark.parametrize("name", MODELS)
def test_a_seed_determines_the_weights(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    kept: Path = request.getfixturevalue(name)
    for seed in (0, 1):
        MODELS[name][0](tmp_path / str(seed), seed=seed)
    folders = (tmp_path / "0", tmp_path / "1", kept)
    for file in kept.rglob("*.safetensors"):
        first, second, third = (load_file(folder / file.relative_to(kept)) for folder in folders)
        assert all(np.array_equal(first[weight], third[weight]) for weight in third)
        drawn = [weight for weight in third if not weight.endswith("initialized")]
        assert not any(np.array_equal(first[weight], second[weight]) for weight in drawn)


@pytest.mark.parametrize("name", MODELS)
def test_a_checkpoint_is_small(name: str, request: pytest.FixtureRequest) -> None:
    folder: Path = request.getfixturevalue(name)
    assert sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) < MODELS[name][1]


# -- Qwen2.5-Omni


def test_speakers_have_begin_tokens_of_their_own(tiny_qwen2_5_omni: Path) -> None:
    speakers = load_speakers(tiny_qwen2_5_omni)
    assert list(speakers) == list(qwen2_5_omni.SPEAKERS)
    assert len({speaker.begin_token for speaker in speakers.values()}) == len(speakers)


def test_the_chat_template_has_the_tokens_of_media(tiny_qwen2_5_omni: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_qwen2_5_omni)
    message: dict[str, Any] = {"role": "user", "content": [{"type": kind} for kind in ("image", "audio", "video")]}
    text = tokenizer.apply_chat_template([message], tokenize=False)
    assert text == (
        "<|im_start|>user\n<|vision_bos|><|IMAGE|><|vision_eos|><|audio_bos|><|AUDIO|><|audio_eos|>"
        "<|vision_bos|><|VIDEO|><|vision_eos|><|im_end|>\n"
    )


# -- Qwen3-Omni


def say(text: str, *, speaker: str = "Ethan") -> Conversation:
    return Conversation([{"role": "user", "content": text}], speaker=speaker)


def ask(*kinds: str, **media: Any) -> Conversation:
    parts = [{"type": "text", "text": "What is it?"}, *({"type": kind} for kind in kinds)]
    return Conversation([{"role": "user", "content": parts}], **media)


@pytest.fixture(scope="module")
def reference(tiny_qwen3_omni: Path) -> Reference:
    return Reference(tiny_qwen3_omni)


@pytest.fixture(scope="module")
def answer(reference: Reference) -> Result:
    return reference.generate(say("Hello"), text_tokens=24, codec_tokens=CODEC_TOKENS)


def test_greedy_text_varies(answer: Result) -> None:
    assert len(set(answer.text_ids.tolist())) >= 12


def test_text_is_printable(reference: Reference, answer: Result) -> None:
    text: str = reference.tokenizer.decode(answer.text_ids)
    assert text.isascii()
    assert text.isprintable()


def test_codes_vary_in_each_group(answer: Result) -> None:
    assert answer.codes.shape == (CODEC_TOKENS - 1, qwen3_omni.CODE_GROUPS)
    assert all(len(set(group)) >= 8 for group in answer.codes.T.tolist())
    assert answer.codes.max() < qwen3_omni.CODEBOOK


def test_the_waveform_is_as_loud_as_speech(answer: Result) -> None:
    assert 0.05 < answer.waveform.std() < 0.5
    assert np.abs(answer.waveform).max() < 1


def test_text_and_speech_depend_on_the_prompt(reference: Reference, answer: Result) -> None:
    other = reference.generate(say("What is this?"), text_tokens=24, codec_tokens=CODEC_TOKENS)
    assert other.text_ids.tolist() != answer.text_ids.tolist()
    assert other.codes.tolist() != answer.codes.tolist()


def test_speech_depends_on_the_speaker(reference: Reference, answer: Result) -> None:
    other = reference.generate(say("Hello", speaker="Chelsie"), text_tokens=24, codec_tokens=CODEC_TOKENS)
    assert other.text_ids.tolist() == answer.text_ids.tolist()
    assert other.codes.tolist() != answer.codes.tolist()


def test_each_module_of_the_vocoder_changes_the_waveform(reference: Reference, answer: Result) -> None:
    code2wav = reference.model.code2wav
    codes = torch.from_numpy(answer.codes.T[None])
    for name, weight in code2wav.named_parameters():
        before = weight.detach().clone()
        with torch.no_grad():
            weight.mul_(0.5).add_(0.1)
            changed = code2wav(codes).flatten().numpy()
            weight.copy_(before)
        assert np.abs(changed - answer.waveform).max() > 1e-3, name


@pytest.fixture(scope="module")
def media_answers(tiny_qwen3_omni: Path) -> list[Result]:
    """The answers to the same text with no media, an image, audio, a video, all of them, and a video with sound."""
    noise = np.random.default_rng(0)
    image = noise.integers(0, 256, (64, 96, 3), dtype=np.uint8)
    sound = noise.normal(0, 0.1, 2 * SOUND_HZ).astype(np.float32)
    video = noise.integers(0, 256, (4, 64, 64, 3), dtype=np.uint8)
    conversations = [
        ask(),
        ask("image", images=[image]),
        ask("audio", audio=[sound]),
        ask("video", videos=[video]),
        ask("image", "audio", "video", images=[image], audio=[sound], videos=[video]),
        ask("video", audio=[sound], videos=[video], use_audio_in_video=True),
    ]
    return run(tiny_qwen3_omni, conversations, text_tokens=8, codec_tokens=8)


def test_each_kind_of_media_has_its_tokens(media_answers: list[Result]) -> None:
    # The smallest video has 2 x 12 x 12 tokens; each kind has a token at its start and its end.
    text = len(media_answers[0].prompt_ids)
    image, sound, video = 2 * 3 + 2, 26 + 2, 2 * 12 * 12 + 2
    sizes = [len(answer.prompt_ids) - text for answer in media_answers]
    assert sizes == [0, image, sound, video, image + sound + video, sound + video]


def test_text_and_speech_depend_on_each_kind_of_media(media_answers: list[Result]) -> None:
    assert len({tuple(answer.text_ids) for answer in media_answers}) == len(media_answers)
    assert len({answer.codes.tobytes() for answer in media_answers}) == len(media_answers)


# -- Qwen3-TTS


def test_the_kinds_differ_in_projection_and_speaker_encoder(tiny_qwen3_tts: Path, tiny_qwen3_tts_base: Path) -> None:
    named, cloning = (weight_names(folder, "") for folder in (tiny_qwen3_tts, tiny_qwen3_tts_base))
    projection = {f"talker.code_predictor.small_to_mtp_projection.{kind}" for kind in ("weight", "bias")}
    assert named - cloning == projection
    assert {name.partition(".")[0] for name in cloning - named} == {"speaker_encoder"}


def test_golden_codes_vary_in_each_group_and_few_requests_end_early() -> None:
    frames = [arrays()[f"{name}/codes"] for name in requests()]
    lengths = [len(each) for each in frames]
    assert 1 <= sum(length < max(lengths) for length in lengths) <= 4
    for each in frames:
        assert each.max() < qwen3_tts.CODEBOOK
        assert all(len(set(group)) >= 5 for group in each.T.tolist())


def test_each_weight_of_the_codec_decoder_changes_the_waveform(tiny_qwen3_tts: Path) -> None:
    folder = tiny_qwen3_tts / "speech_tokenizer"
    config = read_section(folder, read_config(folder), name="decoder_config", kind=CodecDecoderConfig)
    weights = load_weights(folder, "decoder.")

    def waveform(**changes: torch.Tensor) -> torch.Tensor:
        device = torch.device("cpu")
        taken = Weights({**weights, **changes}, device=device, dtype=torch.float32, prefix="decoder.")
        codes = torch.from_numpy(arrays()["codes"][:16].astype(np.int32))[None]
        return CodecDecoder(taken, config, device=device)(codes, BatchState([StreamState()]))

    with torch.inference_mode():
        before = waveform()
        for name, weight in weights.items():
            change = (waveform(**{name: 0.5 * weight + 0.1}) - before).abs().max()
            assert change > 1e-3 or name.endswith("input_proj.weight"), name
