"""Tiny random models with processors: Idefics3 for images, Qwen2-Audio for audio."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.engines.vllm.tiny_model import SPECIAL, byte_tokenizer, text_config

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerFast

IMAGE_TOKEN = "<image>"  # noqa: S105  # tokens of a vocabulary
AUDIO_TOKEN = "<|AUDIO|>"  # noqa: S105
IMAGE_SIDE = 28
PATCH_SIDE = 7
SAMPLE_RATE_HZ = 16_000
_IMAGE_TOKENS = (IMAGE_TOKEN, "<fake_token_around_image>", "<end_of_utterance>", "<global-img>")
_SPECIAL = (*SPECIAL, *_IMAGE_TOKENS, AUDIO_TOKEN, "<|audio_bos|>", "<|audio_eos|>")
_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>"
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if part.type == 'text' %}{{ part.text }}{% elif part.type == 'image' %}<image>"
    "{% elif part.type == 'audio' %}<|audio_bos|><|AUDIO|><|audio_eos|>{% endif %}{% endfor %}{% endif %}<|end|>"
    "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def write_idefics3(folder: Path) -> Path:
    """Writes an Idefics3 with 4 tokens for an image and a few around them, for both vLLM and transformers."""
    import torch
    import transformers

    tokenizer = _tokenizer()
    vision = transformers.Idefics3VisionConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=IMAGE_SIDE,
        patch_size=PATCH_SIDE,
    )
    config = transformers.Idefics3Config(
        vision_config=vision,
        text_config=transformers.LlamaConfig(**_text_config(len(tokenizer))),
        image_token_id=_SPECIAL.index(IMAGE_TOKEN),
        pad_token_id=0,
        dtype="float32",
    )
    torch.manual_seed(0)
    _save(transformers.Idefics3ForConditionalGeneration(config), folder)  # type: ignore[no-untyped-call]
    side = {"longest_edge": IMAGE_SIDE}
    images = transformers.Idefics3ImageProcessorPil(size=side, max_image_size=side, do_image_splitting=False)
    transformers.Idefics3Processor(
        image_processor=images,
        tokenizer=tokenizer,
        image_seq_len=(IMAGE_SIDE // PATCH_SIDE // config.scale_factor) ** 2,
        chat_template=_TEMPLATE,
    ).save_pretrained(folder)
    return folder


def write_qwen2_audio(folder: Path) -> Path:
    """Writes a Qwen2-Audio with 25 tokens for a second of audio, for both vLLM and transformers."""
    import torch
    import transformers

    tokenizer = _tokenizer()
    audio = transformers.Qwen2AudioEncoderConfig(
        num_mel_bins=16, encoder_layers=2, encoder_attention_heads=2, encoder_ffn_dim=64, d_model=32
    )
    config = transformers.Qwen2AudioConfig(
        audio_config=audio,
        text_config=transformers.Qwen2Config(**_text_config(len(tokenizer))),
        audio_token_index=_SPECIAL.index(AUDIO_TOKEN),
        dtype="float32",
    )
    torch.manual_seed(0)
    _save(transformers.Qwen2AudioForConditionalGeneration(config), folder)
    _rename(folder / "model.safetensors", "language_model.model.model.", "language_model.model.")
    transformers.Qwen2AudioProcessor(  # type: ignore[no-untyped-call]
        feature_extractor=transformers.WhisperFeatureExtractor(feature_size=16, sampling_rate=SAMPLE_RATE_HZ),  # type: ignore[no-untyped-call]
        tokenizer=tokenizer,
        chat_template=_TEMPLATE,
    ).save_pretrained(folder)
    return folder


def _text_config(vocabulary: int) -> dict[str, Any]:
    return {**text_config(vocabulary, 1024), "bos_token_id": None, "pad_token_id": 0, "initializer_range": 0.2}


def _tokenizer() -> "PreTrainedTokenizerFast":
    from transformers import PreTrainedTokenizerFast

    tokenizer = byte_tokenizer(_SPECIAL)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=_SPECIAL[0], pad_token=_SPECIAL[0])  # type: ignore[no-untyped-call]


def _rename(path: Path, name: str, other: str) -> None:
    """Renames weights to the names in published models, which transformers does not use."""
    from safetensors import torch as files

    weights: dict[str, torch.Tensor] = files.load_file(path)
    renamed = {key.replace(name, other): weight for key, weight in weights.items()}
    files.save_file(renamed, path, metadata={"format": "pt"})


def _save(model: Any, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 0, "pad_token_id": 0}))
