"""The inputs, the outputs and the limits of a model, as its blocks and components declare them."""

import copy
import io
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import diffusers as _diffusers
import numpy as np
import torch
from safetensors import safe_open

from stagemesh.common.media.decoding import DecodedBytes
from stagemesh.common.media.images import read_image
from stagemesh.services.engines.diffusion.model.definition import Definition
from stagemesh.services.engines.diffusion.model.families import Family
from stagemesh.services.engines.diffusion.state import DiffusionInputs, Outputs

diffusers: Any = _diffusers

_MAX_IMAGE_BYTES = 256 << 20
_SPATIAL = ("vae_scale_factor", "vae_scale_factor_spatial", "vae_spatial_compression_ratio")
_TEMPORAL = ("vae_scale_factor_temporal", "vae_temporal_compression_ratio")
"""Names under which pipelines declare the number of pixels, or of frames, for each side of a latent."""
_FRAMES = ("images", "videos")
_AUDIO = ("audio", "audios", "sound")
_RATES = ("output_sampling_rate", "sampling_rate", "sample_rate", "audio_sampling_rate")
_SEVERAL = 16
"""Maximum number of input images of a model that accepts a list of images. The model itself may accept fewer."""


def request_inputs(inputs: DiffusionInputs, names: Collection[str]) -> dict[str, object]:
    """Returns the values of a request by the name of the pipeline input. The value is None if the request has none.

    `names` contains the names of the pipeline's inputs, which determine the meaning of several images.
    """
    images = [read_image(io.BytesIO(each), DecodedBytes(_MAX_IMAGE_BYTES)) for each in inputs.images]
    last = images.pop() if "last_image" in names and len(images) > 1 else None
    return {
        "prompt": inputs.prompt,
        "negative_prompt": inputs.negative_prompt,
        "image": images if len(images) > 1 else images[0] if images else None,
        "reference_images": images or None,
        "last_image": last,
        "height": inputs.height or None,
        "width": inputs.width or None,
        "num_frames": inputs.num_frames,
        "num_inference_steps": inputs.num_inference_steps or None,
        "guidance_scale": inputs.guidance_scale,
        "generator": torch.Generator().manual_seed(inputs.seed),
        "output_type": "pt",
    }


REQUEST_INPUTS = frozenset(request_inputs(DiffusionInputs(seed=0), ()))
"""The names of the pipeline inputs whose values are specified by a request."""


def outputs_of(values: Any, components: Any) -> Outputs:
    """Returns the images, the video and the audio among the values that a pipeline has computed."""
    frames = next((value for name in _FRAMES if (value := values.get(name)) is not None), None)
    audio = next((value for name in _AUDIO if (value := values.get(name)) is not None), None)
    return Outputs(
        _tensor(frames) if frames is not None else None,
        _clips(_tensor(audio)) if audio is not None else None,
        _sample_rate_hz(values, components) if audio is not None else 0,
    )


def outlined(folder: Path, definition: Definition, components: Any, dtype: torch.dtype) -> Any:
    """Returns a copy of a pipeline in which models that the stage does not load have their configuration and the
    statistics of their latents, but no weights.
    """
    view = copy.copy(components)
    for name in {spec.name for spec in definition.blocks.expected_components}:
        if getattr(view, name, None) is None:
            vars(view)[name] = _outline(folder, definition, name, dtype)
    return view


def changed_properties(view: Any, components: Any) -> dict[str, object]:
    """Returns the properties of the pipeline `view` that have other values in `components`, by name.

    Without a model, diffusers assumes the values of the published model, such as the factor of its VAE.
    """
    kinds = type(components).__mro__
    own = {name: each for kind in kinds[: kinds.index(diffusers.ModularPipeline)] for name, each in vars(kind).items()}
    names = [name for name, each in own.items() if isinstance(each, property)]
    values = {name: getattr(view, name, None) for name in names}
    return {name: value for name, value in values.items() if _differs(value, getattr(components, name, None))}


def _differs(value: object, other: object) -> bool:
    if isinstance(value, torch.Tensor) and isinstance(other, torch.Tensor):
        return not (value.is_meta or torch.equal(value, other.to(value.dtype)))
    return isinstance(value, int | float | tuple) and value != other


def family_of(folder: Path, definition: Definition, view: Any) -> Family:
    """Returns the limits of a model for a stage. `view` is the stage's pipeline from `outlined`."""
    blocks = view.blocks
    spatial = int(next((getattr(view, name) for name in _SPATIAL if hasattr(view, name)), 8))
    temporal = int(next((getattr(view, name) for name in _TEMPORAL if hasattr(view, name)), 4))
    names = set(blocks.input_names)
    return Family(
        size_multiple=spatial * _patch(folder, getattr(view, "vae", None), spatial),
        frames_multiple=temporal if "num_frames" in definition.blocks.input_names else 0,
        min_steps=definition.hints.min_steps,
        min_images=int("image" in names and definition.needs_image),
        max_images=_max_images(names, definition),
    )


def _max_images(names: Collection[str], definition: Definition) -> int:
    if "reference_images" in names or (definition.hints.several_images and "image" in names):
        return _SEVERAL
    return len({"image", "last_image"} & set(names))


def _outline(folder: Path, definition: Definition, name: str, dtype: torch.dtype) -> Any:
    """Returns a component of the folder without weights, or None if the folder does not have the component."""
    _, class_name, *_ = definition.index.get(name) or (None, None)
    kind = getattr(diffusers, class_name or "", None)
    if kind is None or not (folder / name / "config.json").exists():
        return None
    with torch.device("meta"):
        model = kind.from_config(kind.load_config(folder / name, local_files_only=True))
    weights = folder / name / "diffusion_pytorch_model.safetensors"
    if "vae" in name and weights.exists():
        reader: Any = safe_open
        with reader(weights, "pt") as file:
            for each in {"latents_mean", "latents_std"} & set(file.keys()):
                setattr(model, each, file.get_tensor(each).to(dtype))
    return model


def _patch(folder: Path, vae: Any, spatial: int) -> int:
    """Returns the number of latents at each side of a transformer's token. 1 if the pipeline's factor `spatial` already
    contains this number.
    """
    if vae and spatial > 2 ** (len(vae.config.get("block_out_channels", range(99))) - 1):
        return 1
    path = folder / "transformer" / "config.json"
    config: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    declared: Any = config.get("patch_size") or config.get("all_patch_size") or 1
    patch = np.ravel(declared)[-1]
    channels = next((vae.config[name] for name in ("latent_channels", "z_dim") if vae and name in vae.config), None)
    # Some pipelines pack 2 x 2 latents into the channels of a token before the transformer.
    return max(int(patch), 2 if channels and config.get("in_channels") == 4 * channels else 1)


def _tensor(value: Any) -> torch.Tensor:
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value)
    return torch.stack([_tensor(each) for each in value])


def _clips(audio: torch.Tensor) -> torch.Tensor:
    """Returns audio of up to 3 dimensions as [clips, channels, samples]."""
    return audio.reshape(*(1,) * (3 - audio.dim()), *audio.shape)


def _sample_rate_hz(values: Any, components: Any) -> int:
    models = [getattr(components, name) for name in ("vocoder", "audio_vae", "vae") if getattr(components, name, None)]
    known = [values.get(name) for name in _RATES]
    # The pipeline's own rate may be that of the VAE, whose output a vocoder converts to another rate.
    known += [model.config.get(name) for model in models for name in _RATES]
    known += [getattr(components, name, 0) for name in _RATES]
    return next((int(rate) for rate in known if rate), 0)
