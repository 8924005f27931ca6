"""Conversion of a task to the inputs of a diffusion pipeline, and of frames to image and video files."""

import io
import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from stagemesh.common.errors import InvalidRequestError, StagemeshError, UnsupportedError
from stagemesh.common.wire.tensors import Array, Value
from stagemesh.services.engines.base import Task
from stagemesh.services.engines.diffusion.model.families import Family
from stagemesh.services.engines.diffusion.options import DiffusionOptions
from stagemesh.services.engines.diffusion.state import DiffusionInputs
from stagemesh.services.engines.prompts import Conversation, MediaFile, Prompt, media_of, text_beside_media

_MAX_SEED = (1 << 63) - 1
_MAX_IMAGE_BYTES = 64 << 20
_AUTO = "auto"


def build_inputs(
    task: Task, options: Mapping[str, Value], *, stage: DiffusionOptions, family: Family
) -> DiffusionInputs:
    """Returns the pipeline inputs for a task. `options` contains the values of the request's options, including
    defaults.

    Raises InvalidRequestError or UnsupportedError if the task is invalid. The error names the invalid value and the
    allowed values.
    """
    if not 0 <= task.seed <= _MAX_SEED:
        raise InvalidRequestError(f"seed is {task.seed}; it must be from 0 to {_MAX_SEED}", reason="INVALID_OPTION")
    prompt, images = _prompt_and_images(task.prompt or "", family) if _needs_prompt(task, stage) else ("", ())
    for label, text in (("prompt", prompt), ("negative prompt", task.negative_prompt or "")):
        if len(text) > stage.max_prompt_characters:
            raise InvalidRequestError(
                f"the {label} has {len(text)} characters; this stage allows {stage.max_prompt_characters}",
                reason="PROMPT_TOO_LONG",
            )
    numbers = {name: int(options[name]) for name in _INTEGERS if name in options}
    _check_counts(numbers, family)
    check_format(options, family)
    size = _size(task.options, options, stage=stage, multiple=family.size_multiple)
    return DiffusionInputs(
        seed=task.seed,
        prompt=prompt,
        negative_prompt=task.negative_prompt,
        images=images,
        guidance_scale=float(options.get("guidance_scale", stage.guidance_scale)),
        adapter=task.adapter,
        adapter_scale=float(options.get("adapter_scale", 1.0)),
        arguments={name: options[name] for name in stage.arguments},
        requested=frozenset(task.options),
        **numbers,
        **size,
    )


def _needs_prompt(task: Task, stage: DiffusionOptions) -> bool:
    """Returns whether the stage must read the task's prompt. A task that resumes from a checkpoint may omit its
    prompt.
    """
    return stage.part in {"all", "encode"} and (task.resume_from is None or task.prompt is not None)


_INTEGERS = ("num_frames", "num_inference_steps")
_RATIO = re.compile(r"([1-9][0-9]{0,4}):([1-9][0-9]{0,4})")


def _size(
    given: Mapping[str, Value], options: Mapping[str, Value], *, stage: DiffusionOptions, multiple: int
) -> dict[str, int]:
    """Returns the height and the width in pixels that the model takes. Empty for stages without these options.

    A size that is not a multiple of `multiple` is rounded down, as diffusers does, unless the stage is strict. An
    aspect ratio selects a size with about as many pixels as the stage's default size.
    """
    if "height" not in options:
        return {}
    asked = {name: int(options[name]) for name in ("height", "width")}
    if ratio := str(options["aspect_ratio"]):
        found = _RATIO.fullmatch(ratio)
        if found is None:
            raise _invalid_option("aspect_ratio", repr(ratio), "it must have the form WIDTH:HEIGHT, such as 16:9")
        if given.keys() & asked.keys():
            raise _invalid_option("aspect_ratio", repr(ratio), "omit it, or omit height and width")
        slope = math.sqrt(int(found[1]) / int(found[2]))
        side = math.sqrt(stage.height * stage.width) / multiple
        size = {"height": multiple * round(side / slope), "width": multiple * round(side * slope)}
        if not all(multiple <= each <= stage.max_side for each in size.values()):
            problem = f"the size would be {size['width']}x{size['height']}; each side must be at most {stage.max_side}"
            raise _invalid_option("aspect_ratio", repr(ratio), problem)
        return size
    for name, value in asked.items():
        lower = value - value % multiple
        if value < multiple or (lower != value and stage.sizes == "strict"):
            near = f"{lower} or {lower + multiple}" if lower else str(multiple)
            raise _invalid_option(name, value, f"it must be a multiple of {multiple}, such as {near}")
    return {name: value - value % multiple for name, value in asked.items()}


def size_warnings(options: Mapping[str, Value], inputs: DiffusionInputs, family: Family) -> tuple[StagemeshError, ...]:
    """Returns a warning if the size of a request was rounded. `options` contains the request's options."""
    asked = f"{options.get('width', inputs.width)}x{options.get('height', inputs.height)}"
    made = f"{inputs.width}x{inputs.height}"
    if options.get("aspect_ratio") or asked == made:
        return ()
    problem = f"the size {asked} was rounded to {made}, because the model takes multiples of {family.size_multiple}"
    return (InvalidRequestError(problem, reason="SIZE_ROUNDED"),)


def check_format(options: Mapping[str, Value], family: Family) -> None:
    """Raises InvalidRequestError if `options` request a file format that the stage cannot make."""
    wanted = options.get("output_format", _AUTO)
    is_video = family.frames_multiple > 0 and options.get("num_frames") != 1
    if is_video and wanted not in {_AUTO, "webp"}:
        raise _invalid_option("output_format", repr(wanted), "a video is made as webp; omit it")


def _check_counts(numbers: Mapping[str, int], family: Family) -> None:
    steps = numbers.get("num_inference_steps", family.min_steps)
    if steps < family.min_steps:
        raise _invalid_option("num_inference_steps", steps, f"this model's schedule needs {family.min_steps}")
    frames = numbers.get("num_frames", 1)
    if family.frames_multiple == 0 and frames != 1:
        raise _invalid_option("num_frames", frames, "this model generates images, which have 1 frame")
    if family.frames_multiple and (frames - 1) % family.frames_multiple:
        raise _invalid_option("num_frames", frames, f"it must be one more than a multiple of {family.frames_multiple}")


def _invalid_option(name: str, value: object, problem: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"option {name!r} is {value}; {problem}", reason="INVALID_OPTION", metadata={"option": name}
    )


def _text(prompt: Prompt) -> str:
    if (text := text_beside_media(prompt)) is not None:
        return text
    if not isinstance(prompt, Conversation):
        raise UnsupportedError("a diffusion stage accepts text, but not token ids", metadata={"ability": "token_ids"})
    if prompt.tools or prompt.template_arguments:
        raise UnsupportedError(
            "a diffusion stage accepts no tools and no template arguments; omit them", metadata={"ability": "tools"}
        )
    raise InvalidRequestError(
        f"the conversation has {len(prompt.messages)} messages; a diffusion stage accepts one", reason="INVALID_PROMPT"
    )


def _prompt_and_images(prompt: Prompt, family: Family) -> tuple[str, tuple[bytes, ...]]:
    text, media = _text(prompt), media_of(prompt)
    images = [medium for medium in media if isinstance(medium, MediaFile) and medium.kind == "image"]
    if len(images) != len(media):
        raise UnsupportedError("a diffusion stage accepts images, but not audio or video")
    if not family.min_images <= len(images) <= family.max_images:
        most = "one image" if family.max_images == 1 else f"at most {family.max_images} images"
        wanted = f"{'needs' if family.min_images else 'accepts'} {most}" if family.max_images else "accepts only text"
        raise InvalidRequestError(f"the prompt has {len(images)} images; this model {wanted}", reason="INVALID_MEDIA")
    if not text.strip():
        raise InvalidRequestError("the prompt is empty; describe the image", reason="EMPTY_PROMPT")
    return text, tuple(map(_read, images))


def _read(image: MediaFile) -> bytes:
    if image.size_bytes > _MAX_IMAGE_BYTES:
        raise InvalidRequestError(
            f"the image file has {image.size_bytes} bytes, but a diffusion stage accepts {_MAX_IMAGE_BYTES}; send a "
            "smaller file",
            reason="MEDIA_TOO_LARGE",
        )
    with image.open() as content:
        return content.read()


def on_white(frames: npt.NDArray[Any]) -> Array:
    """Returns images without transparency, [images, 3, height, width]. Shows transparent images on white."""
    return np.asarray(frames if frames.shape[1] <= 3 else frames[:, :3] * frames[:, 3:] + 1 - frames[:, 3:])


FRAMES_PER_SECOND = 16
_JPEG_QUALITY = 95


def encode_file(frames: npt.NDArray[Any], output_format: str = _AUTO) -> Array:
    """Encodes one frame as a file, or several frames as a lossless animated WebP file.

    `frames` is float32[frames, 3, height, width] with values in [0, 1]. NaN becomes black. `output_format` is "auto",
    which is PNG for one frame, or "png", "jpeg" or "webp". Returns the file's contents as uint8[bytes].
    """
    pixels = (
        (np.nan_to_num(frames, posinf=1.0, neginf=0.0).transpose(0, 2, 3, 1) * 255)
        .round()
        .clip(0, 255)
        .astype(np.uint8)
    )
    first, *others = [Image.fromarray(each) for each in pixels]
    file = io.BytesIO()
    if others:
        duration_ms = round(1000 / FRAMES_PER_SECOND)
        first.save(file, "WEBP", save_all=True, append_images=others, duration=duration_ms, loop=0, lossless=True)
    else:
        kind = "png" if output_format == _AUTO else output_format
        first.save(file, kind.upper(), quality=_JPEG_QUALITY, lossless=True)
    return np.frombuffer(file.getvalue(), np.uint8)
