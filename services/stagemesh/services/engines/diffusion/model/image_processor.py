"""Prompts with a picture, as Qwen's vision models take them, without what it takes for films."""

from pathlib import Path
from typing import Any

from transformers import Qwen2Tokenizer, Qwen2VLImageProcessorPil, Qwen2VLProcessor


class ImageProcessor(Qwen2VLProcessor):
    """transformers' own for texts and pictures. Its own beginning asks for a processor of films, and that for
    torchvision, which no stage needs."""

    def __init__(self, image_processor: Any, tokenizer: Any) -> None:  # pyright: ignore[reportMissingSuperCall]
        self.image_processor, self.tokenizer = image_processor, tokenizer
        self.chat_template = None
        self.image_token, self.video_token = "<|image_pad|>", "<|video_pad|>"
        self.image_token_id: int = tokenizer.convert_tokens_to_ids(self.image_token)
        self.video_token_id: int = tokenizer.convert_tokens_to_ids(self.video_token)


def picture_processor(folder: Path) -> ImageProcessor:
    """That of a pipeline's folder, as transformers or diffusers saved it."""
    saved = folder / "processor"
    kind: Any = Qwen2Tokenizer
    tokens = saved if (saved / "tokenizer_config.json").exists() else folder / "tokenizer"
    pictures: Any = Qwen2VLImageProcessorPil
    return ImageProcessor(
        pictures.from_pretrained(saved, local_files_only=True), kind.from_pretrained(tokens, local_files_only=True)
    )
