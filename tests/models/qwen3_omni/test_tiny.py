from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.models.qwen3_omni.reference import SOUND_HZ, Conversation, Reference, Result, run

CODEC_TOKENS = 24


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
    from stagemesh.tiny_models.qwen3_omni import CODE_GROUPS, CODEBOOK

    assert answer.codes.shape == (CODEC_TOKENS - 1, CODE_GROUPS)
    assert all(len(set(group)) >= 8 for group in answer.codes.T.tolist())
    assert answer.codes.max() < CODEBOOK


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
    import torch

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
    # The smallest video has 2 x 12 x 12 tokens; each kind has a token at its begin and its end.
    text = len(media_answers[0].prompt_ids)
    image, sound, video = 2 * 3 + 2, 26 + 2, 2 * 12 * 12 + 2
    sizes = [len(answer.prompt_ids) - text for answer in media_answers]
    assert sizes == [0, image, sound, video, image + sound + video, sound + video]


def test_text_and_speech_depend_on_each_kind_of_media(media_answers: list[Result]) -> None:
    assert len({tuple(answer.text_ids) for answer in media_answers}) == len(media_answers)
    assert len({answer.codes.tobytes() for answer in media_answers}) == len(media_answers)
