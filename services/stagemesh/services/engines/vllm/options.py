"""What a vllm stage's `options` hold beside vLLM's own engine arguments. Imports nothing of vLLM."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import ClassVar, Literal, TypeAlias

from pydantic import ConfigDict, JsonValue

from stagemesh.services.engines.options import parse_options

Layer: TypeAlias = int | Literal["last"]
LAST: Literal["last"] = "last"
_NO_OTHERS = ConfigDict(extra="forbid")


def tensor_name(layer: Layer) -> str:
    """The emitted tensor that holds a layer's states: `hidden_states`, or `hidden_states_8`."""
    return "hidden_states" if layer == LAST else f"hidden_states_{layer}"


@dataclass(frozen=True)
class HiddenStatesOptions:
    """Which hidden states a stage can emit."""

    __pydantic_config__: ClassVar = _NO_OTHERS
    layers: tuple[Layer, ...] = (LAST,)
    """The state that enters decoder layer N, from 0 (the embeddings), or the last one, after the final norm."""
    dtype: Literal["float32", "float16", "bfloat16"] = "bfloat16"
    """That of the emitted tensors, whatever the model computes in."""
    share_bytes: int = 0
    """The part of the arena that the worker writes into; 0 is a quarter of it."""

    def __post_init__(self) -> None:
        if not self.layers or len(set(self.layers)) < len(self.layers):
            raise ValueError(f"layers is {list(self.layers)}; name each wanted layer once")
        if any(isinstance(layer, int) and layer < 0 for layer in self.layers):
            raise ValueError(f"layers is {list(self.layers)}; layers count from 0, and the last is `last`")

    @property
    def inner_layers(self) -> list[int]:
        """Those before the last, in order."""
        return sorted(layer for layer in self.layers if isinstance(layer, int))

    @property
    def tensors(self) -> list[str]:
        """The names of the emitted tensors."""
        return [tensor_name(layer) for layer in self.layers]


INPUTS_EMBEDS = "inputs_embeds"
"""The tensor that a stage with embeddings accepts."""


@dataclass(frozen=True)
class EmbeddingsOptions:
    """Embeddings that a stage takes from an edge, in the place of a prompt."""

    __pydantic_config__: ClassVar = _NO_OTHERS
    dtype: Literal["float32", "float16", "bfloat16"] = "bfloat16"
    """That of the accepted tensors, whatever the model computes in."""


@dataclass(frozen=True)
class StageOptions:
    """The project's own options of a vllm stage."""

    hidden_states: HiddenStatesOptions | None = None
    embeddings: EmbeddingsOptions | None = None
    checkpoint_tokens: int = 64
    """Tokens of a request between two of its checkpoints; 0 for none."""
    profile_dir: str | None = None
    """The folder within which profiles may be put, absolute; None for no profiles."""
    media_bytes: int = 256 << 20
    """What the pictures, sounds and films of one request may take once they are decoded."""

    def __post_init__(self) -> None:
        if self.checkpoint_tokens < 0:
            raise ValueError(f"checkpoint_tokens is {self.checkpoint_tokens}; it must be 0 or more")
        if self.media_bytes < 0:
            raise ValueError(f"media_bytes is {self.media_bytes}; it must be 0 or more")
        if self.profile_dir is not None and not Path(self.profile_dir).is_absolute():
            raise ValueError(f"profile_dir is {self.profile_dir!r}; it must be an absolute path")


_OWN = frozenset(field.name for field in fields(StageOptions))


def own_options(options: Mapping[str, JsonValue], *, stage: str = "") -> StageOptions:
    """The project's part of a stage's options; raises InvalidRequestError naming the option at fault."""
    return parse_options(StageOptions, {name: options[name] for name in options if name in _OWN}, stage=stage)


def engine_options(options: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    """The part of a stage's options that is vLLM's."""
    return {name: value for name, value in options.items() if name not in _OWN}
