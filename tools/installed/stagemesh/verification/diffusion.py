"""The reference of diffusion stages: the pipeline of diffusers in the model folder, as a whole."""

import inspect
import io
from collections.abc import Iterator, Mapping
from typing import Any

import diffusers as _diffusers
import numpy as np
import numpy.typing as npt
import torch
from PIL import Image, ImageSequence

from stagemesh.common.wire.tensors import Array
from stagemesh.services.models.checkpoint import load_error
from stagemesh.verification.base import Outputs, choose_gpu, missing, read_media, to_numpy
from stagemesh.verification.comparison import Compared, compare_pixels
from stagemesh.verification.job import Comparison, VerificationRequest, VerifiedStage
from stagemesh.verification.references import IMAGE

diffusers: Any = _diffusers
"""Untyped, because its annotations are incomplete."""
_DEFAULT_PRECISION = "bfloat16"


class DiffusionReference:
    """A `Reference` that generates the image or video of each request with the pipeline's `__call__`."""

    def __init__(self, stages: Mapping[str, VerifiedStage], device: str) -> None:
        self._last = next(stage for stage in stages.values() if stage.outputs)
        folder = self._last.stage.model
        # If each part of the model has its own stage, the one that denoises has the request's options.
        self._options = {name: value for each in stages.values() for name, value in each.stage.request_options.items()}
        self._precision = str(self._last.stage.options.get("dtype", _DEFAULT_PRECISION))
        try:
            self._pipeline = diffusers.DiffusionPipeline.from_pretrained(
                folder, dtype=getattr(torch, self._precision), local_files_only=True
            )
        except (OSError, ValueError, RuntimeError) as exc:
            raise load_error(folder, f"{exc}; check that its files exist and are complete") from exc
        if choose_gpu(device):
            self._pipeline.to("cuda")
        self._pipeline.set_progress_bar_config(disable=True)

    def compare(self, number: int, request: VerificationRequest, outputs: Outputs) -> Iterator[Comparison]:
        """Yields the comparison of the image or video."""
        what = Compared(number, self._last.stage.name, IMAGE, self._precision)
        ours = outputs.get(self._last, IMAGE)
        yield missing(what) if ours is None else compare_pixels(what, _read_frames(ours), self._generate(request))

    def _generate(self, request: VerificationRequest) -> npt.NDArray[np.float32]:
        """Returns the frames, [frames, height, width, 3] with values from 0 to 1."""
        is_flux = type(self._pipeline).__name__.startswith("Flux")
        guidance = "true_cfg_scale" if type(self._pipeline).__name__.startswith("QwenImage") else "guidance_scale"
        options = dict(self._options)
        arguments: dict[str, Any] = {
            "prompt": request.prompt,
            # The input of Flux is the guidance scale. The others compare with the empty prompt.
            **({} if is_flux else {"negative_prompt": ""}),
            guidance: options.pop("guidance_scale"),
            **options,
        }
        if images := read_media(request.media).images:
            arguments["image"] = [Image.fromarray(image) for image in images]
        known = inspect.signature(self._pipeline.__call__).parameters
        result = self._pipeline(
            **{name: value for name, value in arguments.items() if name in known},
            generator=torch.Generator().manual_seed(request.seed),
            output_type="pt",
        )[0]
        # A video is [videos, frames, 3, height, width], images are [images, 3, height, width].
        return to_numpy(result).reshape(-1, *result.shape[-3:]).transpose(0, 2, 3, 1)


def _read_frames(file: Array) -> npt.NDArray[np.uint8]:
    """Returns the frames of an image file or animated image file, [frames, height, width, 3]."""
    with Image.open(io.BytesIO(file.tobytes())) as image:
        return np.stack([np.asarray(frame.convert("RGB")) for frame in ImageSequence.Iterator(image)])
