"""The diffusion engine. Runs diffusers pipelines, and alternates between the denoising steps of concurrent requests."""

from collections.abc import Mapping

from pydantic import JsonValue

from stagemesh.common.plugins.descriptors import Emitted, EngineDescriptor, OptionSpec, Signature
from stagemesh.common.wire.tensors import TensorSpec
from stagemesh.services.engines.diffusion.model.families import model_problem
from stagemesh.services.engines.diffusion.options import DiffusionOptions, stage_options

CONDITIONING, LATENTS, IMAGE, FRAMES, AUDIO, STATE = "conditioning", "latents", "image", "frames", "audio", "state"
TEXT = "text"

_SERIALIZED = TensorSpec("uint8", ("bytes",))
"""Tensor spec of a request's data as serialized by `request_transfer`. The content of the data depends on the
model."""
_RESULTS: Mapping[str, Emitted] = {
    IMAGE: Emitted(TensorSpec("uint8", ("bytes",)), kind="image"),
    FRAMES: Emitted(TensorSpec("float32", ("frames", 3, "height", "width"))),
}
"""The outputs of a stage that decodes: the image or video as a file, and the RGB frames with values in [0, 1]."""
_TEXT_RESULT: Mapping[str, Emitted] = {TEXT: Emitted(TensorSpec("uint8", ("bytes",)), kind="text")}


def signature_of(stage: DiffusionOptions) -> Signature:
    """Returns the signature of a diffusion stage with these options: its inputs, its outputs and its request
    options.
    """
    accepts = {"denoise": {CONDITIONING: _SERIALIZED}, "decode": {LATENTS: _SERIALIZED}}
    emits = {"encode": {CONDITIONING: Emitted(_SERIALIZED)}, "denoise": {LATENTS: Emitted(_SERIALIZED)}}
    reads_prompt = stage.part in {"all", "encode"}
    return Signature(
        accepts=accepts.get(stage.part, {}),
        emits=emits.get(stage.part, _TEXT_RESULT if stage.text else {**_RESULTS, **_audio_result(stage)}),
        options=_request_options(stage),
        negative_prompt=reads_prompt,
        media=reads_prompt,
        adapters=stage.enable_lora,
    )


def _audio_result(stage: DiffusionOptions) -> Mapping[str, Emitted]:
    if not stage.audio_rate_hz:
        return {}
    spec = TensorSpec("float32", ("samples", "channels"))
    return {AUDIO: Emitted(spec, kind="audio", sample_rate_hz=stage.audio_rate_hz)}


def _request_options(stage: DiffusionOptions) -> dict[str, OptionSpec]:
    output_format = {"output_format": OptionSpec("auto", allowed_texts=("auto", "png", "jpeg", "webp"))}
    if stage.part == "decode":
        return output_format
    # An encoder needs the guidance scale because it encodes the negative prompt only if guidance is enabled.
    guidance = {"guidance_scale": OptionSpec(stage.guidance_scale, 0, 100)}
    if stage.part == "encode":
        return guidance
    return {
        "height": OptionSpec(stage.height, 1, stage.max_side),
        "width": OptionSpec(stage.width, 1, stage.max_side),
        "aspect_ratio": OptionSpec("", maximum=11, description="WIDTH:HEIGHT, instead of a size. Empty: the size."),
        "num_frames": OptionSpec(stage.num_frames, 1, stage.max_frames),
        "num_inference_steps": OptionSpec(stage.num_inference_steps, 1, stage.max_inference_steps),
        **guidance,
        **{name: OptionSpec(value) for name, value in stage.arguments.items()},
        **(output_format if stage.part == "all" else {}),
        **({"adapter_scale": OptionSpec(1.0, -10, 10)} if stage.enable_lora else {}),
    }


def _signature(_function: str | None, options: Mapping[str, JsonValue]) -> Signature:
    return signature_of(stage_options(options))


DESCRIPTOR = EngineDescriptor(
    factory="stagemesh.services.engines.diffusion.engine:DiffusionEngine",
    signature=_signature,
    needs_model=True,
    model_problem=model_problem,
)
