"""The models of vLLM-Omni that Stagemesh can run in several stages, and the transforms between their stages."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from pydantic import JsonValue


class Kind(Enum):
    """The way in which a stage of vLLM-Omni computes, by its name in pipeline definitions of vLLM-Omni."""

    AR = "llm_ar"
    GENERATION = "llm_generation"
    DIFFUSION = "diffusion"


@dataclass(frozen=True)
class Role:
    """A stage of a known model."""

    name: str
    """The name of the stage in the pipeline file."""
    kind: Kind
    inputs: tuple[str, ...] = ()
    """The roles from which the stage receives tensors, by the values of `model_stage`."""
    output: str = ""
    """The output that the stage gives to clients in vLLM-Omni's own definition of the model. Empty if there is none."""
    function: str = ""
    options: Mapping[str, JsonValue] = field(default_factory=dict[str, JsonValue])
    """The options that the stage needs in addition to those of the config."""
    sends_states: Mapping[str, JsonValue] = field(default_factory=dict[str, JsonValue])
    """The options that the stage needs in addition if another stage consumes its hidden states."""
    join: str = ""
    arena_bytes: int = 0
    """The size of the stage's arena if another stage consumes its tensors. 0 for the default."""


@dataclass(frozen=True)
class Handover:
    """The edge between two stages of a known model."""

    transform: str
    chunk: Mapping[str, JsonValue] | None = None
    """The default of the edge's `chunk` if the edge carries codes. None for other edges."""


@dataclass(frozen=True)
class Family:
    """A model whose stages Stagemesh can run."""

    architecture: str
    """The prefix of `model_arch` of its stages."""
    checkpoint: str
    """The name of a checkpoint, as the default of the variable that names the model."""
    roles: Mapping[str, Role]
    """The stages by the value of `model_stage`, in the order of their ids."""
    handovers: Mapping[tuple[str, str], Handover]
    """The edges, by the values of `model_stage` of producer and consumer."""
    prompt_function: str = ""
    """The function of an additional stage that computes the input of the first stage. Empty if there is none."""


def _codec(model: str, **more: JsonValue) -> Mapping[str, JsonValue]:
    return {"codec": {"model": model, **more}}


_STATES_BYTES, _CODES_BYTES = 1 << 30, 256 << 20
"""The sizes of the arenas of stages that send hidden states and codes, for checkpoints of full size."""
_VIDEO_OPTIONS: Mapping[str, JsonValue] = {"mm_processor_kwargs": {"fps": 2.0}}

_QWEN2_5_OMNI = Family(
    architecture="Qwen2_5Omni",
    checkpoint="Qwen2.5-Omni-7B",
    roles={
        "thinker": Role(
            "thinker",
            Kind.AR,
            output="text",
            options=_VIDEO_OPTIONS,
            sends_states={"hidden_states": {"layers": ["last"], "positions": True}},
            arena_bytes=_STATES_BYTES,
        ),
        "talker": Role(
            "talker", Kind.AR, ("thinker",), options=_codec("qwen2_5_omni.talker"), arena_bytes=_CODES_BYTES
        ),
        "code2wav": Role("token2wav", Kind.GENERATION, ("talker",), "audio", "qwen2_5_omni.token2wav"),
    },
    handovers={
        ("thinker", "talker"): Handover("qwen2_5_omni.thinker2talker"),
        ("talker", "code2wav"): Handover(
            "qwen2_5_omni.talker2token2wav", {"frames": 48, "initial_frames": 24, "ramp": "auto"}
        ),
    },
)
_QWEN3_OMNI = Family(
    architecture="Qwen3OmniMoe",
    checkpoint="Qwen3-Omni-30B-A3B-Instruct",
    roles={
        "thinker": Role(
            "thinker",
            Kind.AR,
            output="text",
            options=_VIDEO_OPTIONS,
            sends_states={"hidden_states": {"layers": ["accept"], "positions": True, "prompt_only": True}},
            arena_bytes=_STATES_BYTES,
        ),
        "talker": Role("talker", Kind.AR, ("thinker",), options=_codec("qwen3_omni.talker"), arena_bytes=_CODES_BYTES),
        "code2wav": Role("code2wav", Kind.GENERATION, ("talker",), "audio", "qwen3_omni.code2wav"),
    },
    handovers={
        ("thinker", "talker"): Handover("qwen3_omni.thinker2talker"),
        ("talker", "code2wav"): Handover(
            "qwen3_omni.talker2code2wav", {"frames": 25, "initial_frames": 4, "ramp": "auto"}
        ),
    },
)
_QWEN3_TTS = Family(
    architecture="Qwen3TTS",
    checkpoint="Qwen3-TTS-12Hz-1.7B-CustomVoice",
    roles={
        "qwen3_tts": Role(
            "talker", Kind.AR, options=_codec("qwen3_tts.talker", dtype="float32"), arena_bytes=_CODES_BYTES
        ),
        "code2wav": Role(
            "codec-decoder", Kind.GENERATION, ("qwen3_tts",), "audio", "qwen3_tts.codec_decoder", join="any"
        ),
    },
    handovers={
        ("qwen3_tts", "code2wav"): Handover(
            "qwen3_tts.talker2codec_decoder", {"frames": 25, "initial_frames": 4, "ramp": "auto"}
        )
    },
    prompt_function="qwen3_tts.prompt",
)
FAMILIES = (_QWEN2_5_OMNI, _QWEN3_OMNI, _QWEN3_TTS)

DIFFUSION_TOPOLOGY = "diffusion"
TOPOLOGIES: Mapping[str, tuple[Family, tuple[str, ...]]] = {
    "qwen2_5_omni": (_QWEN2_5_OMNI, ("thinker", "talker", "code2wav")),
    "qwen2_5_omni_thinker_only": (_QWEN2_5_OMNI, ("thinker",)),
    "qwen3_omni_moe": (_QWEN3_OMNI, ("thinker", "talker", "code2wav")),
    "qwen3_omni_moe_thinker_only": (_QWEN3_OMNI, ("thinker",)),
    "qwen3_tts": (_QWEN3_TTS, ("qwen3_tts", "code2wav")),
}
"""The graphs of stages that deploy configs name: a model, and the values of `model_stage` in the order of ids."""

DIFFUSION_CHECKPOINTS: Mapping[str, str] = {
    "FluxPipeline": "FLUX.1-dev",
    "QwenImageEditPipeline": "Qwen-Image-Edit",
    "QwenImagePipeline": "Qwen-Image",
    "StableDiffusion3Pipeline": "stable-diffusion-3.5-medium",
    "WanPipeline": "Wan2.1-T2V-1.3B-Diffusers",
    "ZImagePipeline": "Z-Image-Turbo",
}
"""A usual checkpoint of some classes. The class is `model_class_name` in vLLM-Omni."""
PARTS = ("encode", "denoise", "decode")
"""The values of `model_stage` of diffusion stages that compute one part of the pipeline, which are values of `part`."""

_VARIANTS = ("_async_chunk", "_full_payload", "_token_only")
"""The suffixes of functions that differ only in how vLLM-Omni calls them."""
_TRANSFORMS: Mapping[str, str] = {
    "qwen2_5_omni.thinker2talker": "qwen2_5_omni.thinker2talker",
    "qwen2_5_omni.talker2code2wav": "qwen2_5_omni.talker2token2wav",
    "qwen2_5_omni.talker2codewav": "qwen2_5_omni.talker2token2wav",
    "qwen3_omni.thinker2talker": "qwen3_omni.thinker2talker",
    "qwen3_omni.talker2code2wav": "qwen3_omni.talker2code2wav",
    "qwen3_tts.talker2code2wav": "qwen3_tts.talker2codec_decoder",
    "qwen_image.encode_to_denoise": "",
    "qwen_image.denoise_to_decode": "",
}


def find_family(architecture: str) -> Family | None:
    """Returns the known model to which a `model_arch` belongs, or None if there is none."""
    return next((family for family in FAMILIES if architecture.startswith(family.architecture)), None)


def find_transform(function: str) -> str | None:
    """Returns the transform that does the work of a custom function of vLLM-Omni, which is a dotted path.

    Returns "" if the stages need no transform, and None if the function is unknown.
    """
    name = ".".join(function.split(".")[-2:])
    for suffix in _VARIANTS:
        name = name.removesuffix(suffix)
    return _TRANSFORMS.get(name)
