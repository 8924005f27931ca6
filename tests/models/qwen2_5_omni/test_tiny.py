from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from stagemesh.services.models.qwen2_5_omni.description import load_speakers
from stagemesh.tiny_models import qwen2_5_omni


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
