"""Components of tiny pipelines: a component is made from its class, with random weights."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import diffusers as _diffusers
import torch
import transformers as _transformers

from stagemesh.tiny_models.diffusion.configs import model_config, transformers_config
from stagemesh.tiny_models.diffusion.tokenizers import byt5_tokenizer, clip_tokenizer, qwen_tokenizer, t5_tokenizer

diffusers: Any = _diffusers
transformers: Any = _transformers
"""Untyped, like diffusers, because annotations of constructors are incomplete."""
_TOKENIZERS: Mapping[str, Callable[..., Any]] = {
    "ByT5Tokenizer": byt5_tokenizer,
    "CLIPTokenizer": clip_tokenizer,
    "T5Tokenizer": t5_tokenizer,
}
"""The functions that make tokenizers, by class. Others are made like Qwen's."""


@dataclass(frozen=True)
class Processor:
    """A processor of prompts that contain images. Its own class would need torchvision."""

    kind: str
    tokenizer: Any
    image_processor: Any

    def save_pretrained(self, folder: Path) -> None:
        """Writes the files of both parts."""
        self.tokenizer.save_pretrained(folder)
        self.image_processor.save_pretrained(folder)


def make_component(kind: Any, config: Mapping[str, Any], *, tokenizer: Any, templates: Sequence[str]) -> Any:
    """Makes a component of the class `kind`, whose tokenizer is `tokenizer`.

    `config` has precedence over the config of the class. A tokenizer has a token for each word of `templates`.
    """
    if issubclass(kind, transformers.PreTrainedTokenizerBase):
        return _TOKENIZERS.get(kind.__name__, qwen_tokenizer)(templates)
    if issubclass(kind, transformers.ProcessorMixin):
        parts = {"tokenizer": tokenizer or qwen_tokenizer(templates)}
        parts["image_processor"] = transformers.Qwen2VLImageProcessorPil()
        if "video_processor" in kind.get_attributes():
            return Processor(kind.__name__, **parts)
        return kind(**parts, chat_template=parts["tokenizer"].chat_template)
    if issubclass(kind, transformers.PreTrainedModel):
        settings = _merge(transformers_config(kind.config_class, tokenizer), config)
        return _vary(kind(kind.config_class(**settings)))
    # Of image processors, the other implementation needs torchvision.
    kind = getattr(transformers, f"{kind.__name__}Pil", kind)
    made = kind(**_merge(model_config(kind, tokenizer), config))
    return _vary(made) if isinstance(made, torch.nn.Module) else made


def _merge(config: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    inner = {name: _merge(config[name], value) for name, value in more.items() if isinstance(config.get(name), dict)}
    return {**config, **more, **inner}


def _vary(model: torch.nn.Module) -> torch.nn.Module:
    """Replaces weights that are zero or undefined in a new model, which would hide errors."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if not weight.isfinite().all() or not (weight.any() or name.endswith("bias")):
                torch.nn.init.normal_(weight, std=0.5 if weight.ndim > 1 else 1.0)
    return model.eval()
