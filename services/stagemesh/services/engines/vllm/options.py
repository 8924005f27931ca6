"""The options of a vllm stage that Stagemesh defines in addition to vLLM's engine arguments, and the signature of a
stage with these options. Does not import vLLM.
"""

from collections.abc import Mapping
from dataclasses import fields
from operator import itemgetter
from pathlib import Path
from typing import Annotated, Literal, TypeAlias

from pydantic import ConfigDict, Field, JsonValue
from pydantic.dataclasses import dataclass

from stagemesh.common.errors import InvalidRequestError
from stagemesh.common.plugins.descriptors import CodecModelDescriptor, Emitted, Signature
from stagemesh.common.plugins.entry_points import load_descriptor
from stagemesh.common.wire.tensors import TensorSpec
from stagemesh.services.engines.options import parse_options

Layer: TypeAlias = int | Literal["last", "accept"]
LAST: Literal["last"] = "last"
ACCEPT: Literal["accept"] = "accept"
POSITIONS = "positions"
"""The name of the tensor that contains the positions of tokens for M-RoPE."""
AXES = 3
"""The number of axes of a position: time, height and width."""
_NO_OTHERS = ConfigDict(extra="forbid")


def tensor_name(layer: Layer) -> str:
    """Returns the name of the tensor that contains the hidden states of a layer.

    The name is `hidden_states` for the last layer, and `hidden_states_N` for layer N.
    """
    return "hidden_states" if layer == LAST else f"hidden_states_{layer}"


@dataclass(frozen=True, config=_NO_OTHERS)
class HiddenStatesOptions:
    """The stage option `hidden_states`, which selects the hidden states that the stage emits."""

    layers: tuple[Layer, ...] = (LAST,)
    """The layers whose hidden states are emitted.

    A number N selects the input of decoder layer N. Number 0 therefore selects the embeddings. `last` selects the state
    after the final norm. `accept` selects the layer that the talker of the same checkpoint accepts.
    """
    dtype: Literal["float32", "float16", "bfloat16"] = "bfloat16"
    """The dtype of the emitted tensors, independent of the model's dtype."""
    positions: bool = False
    """Whether the stage also emits the positions of the tokens for M-RoPE, as the tensor `positions`."""
    prompt_only: bool = False
    """Whether the stage emits only the rows of prompt tokens, and none of sampled tokens."""
    share_bytes: int = 0
    """The size of the worker's part of the arena for hidden states, in bytes. 0 means a quarter of the arena."""

    def __post_init__(self) -> None:
        if not self.layers or len(set(self.layers)) < len(self.layers):
            raise ValueError(f"layers is {list(self.layers)}; name each wanted layer once")
        if any(isinstance(layer, int) and layer < 0 for layer in self.layers):
            raise ValueError(f"layers is {list(self.layers)}; layers count from 0, and `last` is the last layer")

    def inner_layers(self, *, accept: int | None) -> dict[str, int]:
        """Returns the numbers of the emitted layers except `last`, by tensor name and in order.

        `accept` is the number of the layer `accept`. If it is None, the layer is omitted.
        """
        numbers = {tensor_name(layer): accept if layer == ACCEPT else layer for layer in self.layers}
        inner = {name: number for name, number in numbers.items() if isinstance(number, int)}
        return dict(sorted(inner.items(), key=itemgetter(1)))

    @property
    def tensors(self) -> dict[str, str]:
        """The dtypes of the tensors that the stage emits, by tensor name."""
        states = {tensor_name(layer): self.dtype for layer in self.layers}
        return states | ({POSITIONS: "int32"} if self.positions else {})


INPUTS_EMBEDS = "inputs_embeds"
"""The name of the tensor that contains the embeddings a stage receives."""
PROMPT_IDS = "prompt_ids"
"""The name of the tensor that contains the tokens of the prompt, with placeholders for media. Emitted once, before
all other tensors, if an edge or the caller requests it.
"""
CODES = "codes"
"""The name of the tensor that contains the audio frames of a codec language model."""
CODEC_SLOTS = "codec_slots"
"""The name of the tensor that contains the index of each input row's code in the codec prefix, or -1."""
ROW_CODES = "row_codes"
"""The name of the tensor that contains the codes of each input row: those of a frame, a first code alone, or -1."""
STATES = "states"
"""The name of the optional tensor that contains upstream states among the input rows of a codec language model."""


@dataclass(frozen=True, config=_NO_OTHERS)
class EmbeddingsOptions:
    """The stage option `embeddings`, with which a stage receives embeddings over an edge instead of a prompt."""

    dtype: Literal["float32", "float16", "bfloat16"] = "bfloat16"
    """The dtype of the accepted tensors, independent of the model's dtype."""


@dataclass(frozen=True, config=_NO_OTHERS)
class CodecOptions:
    """The stage option `codec`, with which a stage runs a codec language model."""

    model: str
    """The name of the codec language model, for example `qwen3_omni.talker`."""
    dtype: Literal["float32", "float16", "bfloat16"] = "bfloat16"
    """The dtype of the accepted states, independent of the model's dtype."""


KV_CACHE = "kv_cache"
"""The name of the ticket for the KV cache of a prompt, which a prefill stage sends to a decode stage."""
KV_CACHE_KIND = "vllm.kv"
"""The kind of this ticket."""


@dataclass(frozen=True, config=_NO_OTHERS)
class KvHandoverOptions:
    """The stage option `kv_handover`, which makes the stage the prefill stage or the decode stage of a pair.

    The key `split` of a stage in a pipeline file sets it.
    """

    role: Literal["prefill", "decode"]
    """A prefill stage computes prompts and hands their KV cache over. A decode stage receives it and samples tokens."""
    min_tokens: Annotated[int, Field(ge=0)] = 128
    """The decode stage computes a shorter prompt itself, because that costs less than a hand-over."""
    wait_s: Annotated[float, Field(gt=0)] = 60.0
    """The time for which the decode stage waits for the KV cache of a prompt. It then computes the prompt itself."""


@dataclass(frozen=True)
class StageOptions:
    """The options of a vllm stage that Stagemesh itself defines. All other options are engine arguments of vLLM."""

    hidden_states: HiddenStatesOptions | None = None
    embeddings: EmbeddingsOptions | None = None
    codec: CodecOptions | None = None
    kv_handover: KvHandoverOptions | None = None
    checkpoint_tokens: Annotated[int, Field(ge=0)] = 64
    """The maximum number of tokens between two checkpoints of a request. 0 disables checkpoints."""
    checkpoint_s: Annotated[float, Field(gt=0)] = 0.5
    """The time in seconds after which the next token of a request has a checkpoint, even after fewer tokens.

    A request whose replica is lost computes again what follows its newest checkpoint.
    """
    profile_dir: str | None = None
    """The absolute path of the folder for profiles, or None if profiles are disabled."""
    media_bytes: Annotated[int, Field(ge=0)] = 256 << 20
    """The maximum decoded size of the images, audio and video of one request, in bytes."""
    tool_parser: str = "auto"
    """The name of vLLM's parser of tool calls, "none", or "auto" to select it by the model's chat template."""
    reasoning_parser: str = "auto"
    """The name of vLLM's parser of reasoning, "none", or "auto" to select it by the model's chat template.

    With a name, the structure of an output begins after the reasoning.
    """

    def __post_init__(self) -> None:
        if self.profile_dir is not None and not Path(self.profile_dir).is_absolute():
            raise ValueError(f"profile_dir is {self.profile_dir!r}; it must be an absolute path")


_OWN = frozenset(field.name for field in fields(StageOptions))
_NEEDS_PROMPT = ("hidden_states", "embeddings", "codec")
"""The options of stages that compute every token of a prompt themselves."""


def own_options(options: Mapping[str, JsonValue], *, stage: str = "") -> StageOptions:
    """Parses the stage options that Stagemesh itself defines. Ignores all other options.

    Raises InvalidRequestError, which names the option, if a value is invalid or excludes another option.
    """
    own = parse_options(StageOptions, {name: options[name] for name in options if name in _OWN}, stage=stage)
    for name in _NEEDS_PROMPT:
        if own.kv_handover is not None and getattr(own, name) is not None:
            raise InvalidRequestError(
                f"option {name} excludes split and kv_handover, because a decode stage does not compute the tokens of "
                f"the prompt; remove {name}, or do not split the stage",
                reason="INVALID_OPTION",
                metadata={"option": name},
            )
    return own


def engine_options(options: Mapping[str, JsonValue]) -> dict[str, JsonValue]:
    """Returns the stage options that Stagemesh does not define. They are passed to vLLM as engine arguments."""
    return {name: value for name, value in options.items() if name not in _OWN}


_SAMPLED = {
    "text": Emitted(TensorSpec("uint8", ("bytes",)), kind="text"),
    "token_ids": Emitted(TensorSpec("int32", ("tokens",)), kind="tokens"),
    PROMPT_IDS: Emitted(TensorSpec("int32", ("tokens",))),
}


def signature_of(_function: str | None, options: Mapping[str, JsonValue]) -> Signature:
    """Returns the signature of a stage with these options: its inputs, its outputs and what it accepts of a request."""
    own = own_options(options)
    adapters = bool(options.get("enable_lora"))
    if own.codec is not None:
        return _codec_signature(own.codec)
    if own.kv_handover is not None:
        return _handover_signature(own.kv_handover, adapters=adapters)
    accepts, emits = dict[str, TensorSpec](), dict(_SAMPLED)
    if own.embeddings is not None:
        accepts[INPUTS_EMBEDS] = TensorSpec(own.embeddings.dtype, ("tokens", "hidden"))
    if own.hidden_states is not None:
        widths = {POSITIONS: AXES}
        for name, dtype in own.hidden_states.tensors.items():
            emits[name] = Emitted(TensorSpec(dtype, ("tokens", widths.get(name, "hidden"))))
    return Signature(accepts, emits, sampling=True, adapters=adapters, media=not accepts)


def _handover_signature(handover: KvHandoverOptions, *, adapters: bool) -> Signature:
    ticket = TensorSpec.ticket(KV_CACHE_KIND)
    if handover.role == "prefill":
        return Signature(emits={KV_CACHE: Emitted(ticket)}, adapters=adapters, media=True, assists=True)
    return Signature({KV_CACHE: ticket}, _SAMPLED, sampling=True, adapters=adapters, media=True)


def _codec_signature(codec: CodecOptions) -> Signature:
    """Returns the signature of a stage that runs a codec language model. It emits the codes of audio frames."""
    descriptor = load_descriptor(CodecModelDescriptor, codec.model)
    accepts = dict(descriptor.accepts)
    if accepts:
        accepts[STATES] = TensorSpec(codec.dtype, ("tokens", "hidden"))
    emits = {CODES: Emitted(TensorSpec("int32", ("frames", "groups")))}
    return Signature(accepts, emits, descriptor.options, sampling=True, optional=frozenset({STATES}) & accepts.keys())
