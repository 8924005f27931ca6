"""The configurations of tiny components, from `configs.toml` and the defaults of each class."""

import inspect
import tomllib
from collections.abc import Mapping, Sequence
from functools import cache
from importlib.resources import files
from typing import Any, cast

TABLES: Mapping[str, Any] = tomllib.loads(
    files("stagemesh.tiny_models.diffusion").joinpath("configs.toml").read_text(encoding="utf-8")
)
_TOKENS = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}
_VOCABULARIES = ("vocab_size", "target_vocab_size")


def pipeline_table(kind: str) -> dict[str, Any]:
    """Returns the settings and the components of a pipeline. `kind` is the name of the pipeline's class."""
    # "Flux2" fits Flux2KleinPipeline, but "Anima" does not fit AnimateDiffPipeline.
    begins = (name for name in TABLES["pipelines"] if kind.startswith(name))
    fitting = sorted((name for name in begins if not kind[len(name) :][:1].islower()), key=len)
    merged: dict[str, Any] = {}
    for name in fitting:
        for key, value in TABLES["pipelines"][name].items():
            is_added = isinstance(value, dict) and "class" not in value
            merged[key] = {**merged.get(key, {}), **value} if is_added else value
    return merged


def model_config(kind: Any, tokenizer: Any = None) -> dict[str, Any]:
    """Returns the config of a model of diffusers, or of any class whose parameters are its config."""
    return _fit(_defaults(kind), kind.__name__, tokenizer)


def transformers_config(kind: Any, tokenizer: Any = None) -> dict[str, Any]:
    """Returns the parameters of a config class of transformers. Configs of inner models are included."""
    default = kind()
    parts = {name: getattr(default, name, None) for name in kind.sub_configs}
    inner = {name: transformers_config(type(part), tokenizer) for name, part in parts.items() if part is not None}
    return inner | _fit(default.to_dict(), kind.__name__, tokenizer)


@cache
def _defaults(kind: Any) -> dict[str, Any]:
    return {name: parameter.default for name, parameter in inspect.signature(kind.__init__).parameters.items()}


def _fit(defaults: Mapping[str, Any], kind: str, tokenizer: Any) -> dict[str, Any]:
    known = {name: value for name, value in TABLES["sizes"].items() if defaults.get(name) is not None}
    sizes = {name: _extend(value, defaults[name]) for name, value in known.items()}
    config: dict[str, Any] = sizes | _token_ids(defaults, tokenizer) | TABLES["classes"].get(kind, {})
    return config


def _token_ids(defaults: Mapping[str, Any], tokenizer: Any) -> dict[str, int]:
    if tokenizer is None:
        return {}
    ids = {name: len(tokenizer) for name in _VOCABULARIES}
    ids |= {name: getattr(tokenizer, name, None) or 0 for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    ids |= {name: tokenizer.convert_tokens_to_ids(token) or 0 for name, token in _TOKENS.items()}
    return {name: number for name, number in ids.items() if name in defaults}


def _extend(value: Any, default: Any) -> Any:
    """Fits a value to a default that is a list: repeats a number, and extends a shorter list by its last number."""
    if not isinstance(default, list | tuple):
        return value
    length = len(cast("Sequence[Any]", default))
    values: list[Any] = [*value] if isinstance(value, list) else [value]
    return (values + values[-1:] * length)[: max(length, 1)]
