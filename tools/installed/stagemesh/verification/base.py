"""The interface of a reference implementation, the loading of its models and media, and the generation of given
tokens.
"""

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch

from stagemesh.common.errors import NotReadyError
from stagemesh.common.wire.tensors import Array
from stagemesh.services.models.checkpoint import check_names, load_error, read_config
from stagemesh.verification.comparison import Compared, ForcedChoice
from stagemesh.verification.job import Comparison, VerificationRequest, VerifiedStage

_PRECISIONS = ("float32", "float16", "bfloat16")
_AUTO = "auto"


class Reference(Protocol):
    """A loaded reference implementation."""

    def compare(self, number: int, request: VerificationRequest, outputs: "Outputs") -> Iterable[Comparison]:
        """Yields the comparison of each output of the verified stages for one request.

        `number` is the number of the request. The reference of a stage receives the pipeline's own outputs of the
        stages before, so that an error of one stage does not appear in the stages after it.
        """
        ...


class Outputs:
    """The outputs of a pipeline for one request, by stage and tensor."""

    def __init__(self, number: int, tensors: Mapping[str, Array]) -> None:
        """`tensors` contains the outputs of all requests as in the file of a VerificationJob."""
        self._number, self._tensors = number, tensors

    def get(self, stage: VerifiedStage, output: str) -> Array | None:
        """Returns a tensor, or None if the pipeline has no such output."""
        return self._tensors.get(f"{self._number}/{stage.stage.name}.{output}")


def missing(what: Compared) -> Comparison:
    """Returns the result for a tensor that the pipeline does not output."""
    return what.skip(f"not an output of the pipeline; add `{what.output}: {what.stage}.{what.output}` to its outputs")


def language_model_precision(stage: VerifiedStage) -> str:
    """Returns the data type in which a vllm stage computes.

    Without the option `dtype`, it is that of the checkpoint. vLLM then computes with float32 checkpoints in 16 bits.
    """
    chosen = str(stage.stage.options.get("dtype", _AUTO))
    if chosen == _AUTO:
        config = read_config(stage.stage.model)
        sections: list[Mapping[str, Any]] = [config, *(part for part in config.values() if isinstance(part, dict))]
        named = [str(section.get("dtype") or section.get("torch_dtype")) for section in sections]
        chosen = next((name for name in named if name in _PRECISIONS), "bfloat16")
        return "bfloat16" if chosen == "float32" else chosen
    return chosen if chosen in _PRECISIONS else "bfloat16"


def function_precision(stage: VerifiedStage) -> str:
    """Returns the data type in which a function stage computes. On a GPU, it is bfloat16 by default."""
    dtype = str(stage.stage.options.get("dtype", _AUTO))
    on_gpu = torch.cuda.is_available() and stage.stage.options.get("device", _AUTO) != "cpu"
    return dtype if dtype in _PRECISIONS else "bfloat16" if on_gpu else "float32"


def states_precision(stage: VerifiedStage) -> str:
    """Returns the lower one of the precisions of a vllm stage and of the hidden states that it emits."""
    given = stage.stage.options.get("hidden_states")
    emitted = str(given.get("dtype", "bfloat16")) if isinstance(given, dict) else "bfloat16"
    return max(language_model_precision(stage), emitted, key=_PRECISIONS.index)


def load_model(kind: Any, folder: Path, *, dtype: torch.dtype, device: str) -> Any:
    """Loads a model of transformers. With `device` "auto", it may use several GPUs.

    Raises NotReadyError (LOAD_FAILED) if the folder has no such model or if weights are missing, and NotReadyError
    (UNUSABLE_OPTION) if `device` is "cuda" but there is no GPU.
    """
    placement = {"device_map": device} if choose_gpu(device) else {}
    try:
        model, found = kind.from_pretrained(
            folder, dtype=dtype, local_files_only=True, output_loading_info=True, **placement
        )
    except (OSError, ValueError, KeyError, RuntimeError) as exc:
        raise load_error(folder, f"{exc}; check that the checkpoint is complete and belongs to this model") from exc
    check_names(found["missing_keys"], (), f"the model {folder}")
    return model.eval()


def choose_gpu(device: str) -> bool:
    """Returns whether the reference runs on a GPU. Raises NotReadyError if there is none and `device` is "cuda"."""
    available = torch.cuda.is_available()
    if device == "cuda" and not available:
        raise NotReadyError("--device is cuda, but this machine has no GPU; omit it", reason="UNUSABLE_OPTION")
    return available and device != "cpu"


def to_numpy(tensor: torch.Tensor) -> npt.NDArray[np.float32]:
    """Returns a tensor of any data type as float32 numbers."""
    return np.asarray(tensor.detach().float().cpu().numpy(), np.float32)


class ForcedTokens:
    """A logits processor of transformers that forces one token after another and records how the model rates it.

    After all tokens have been forced, the model generates freely.
    """

    def __init__(self, tokens: Iterable[int]) -> None:
        self._tokens = iter(tokens)
        self.choices: list[ForcedChoice] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:  # noqa: ARG002
        """Returns scores that allow only the next token. `scores` is [1, vocabulary]."""
        chosen = next(self._tokens, None)
        if chosen is None:
            return scores
        logits = scores[0].float()
        best = logits.max()
        scale = logits[logits.isfinite()].abs().max().clamp_min(torch.finfo(torch.float32).tiny)
        self.choices.append(ForcedChoice(chosen, int(logits.argmax()), float((best - logits[chosen]) / scale)))
        forced = torch.full_like(scores, -torch.inf)
        forced[0, chosen] = 0
        return forced


AUDIO_RATE_HZ = 16_000


class RequestMedia(NamedTuple):
    """The media of a request, and the kind of each in order: "image" or "audio"."""

    kinds: tuple[str, ...]
    images: tuple[npt.NDArray[np.uint8], ...]
    """Each [height, width, 3]."""
    audio: tuple[npt.NDArray[np.float32], ...]
    """Each [samples], one channel at 16 kHz."""


def read_media(paths: Sequence[Path]) -> RequestMedia:
    """Reads image and audio files. The suffix of an image is .png, .jpg, .jpeg, .webp, .gif or .bmp."""
    kinds = tuple("image" if path.suffix.lower() in IMAGE_SUFFIXES else "audio" for path in paths)
    files = list(zip(kinds, paths, strict=True))
    return RequestMedia(
        kinds,
        tuple(_read_image(path) for kind, path in files if kind == "image"),
        tuple(_read_audio(path) for kind, path in files if kind == "audio"),
    )


IMAGE_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".gif", ".bmp"})


def _read_image(path: Path) -> npt.NDArray[np.uint8]:
    from PIL import Image

    with Image.open(path) as image:
        return np.array(image.convert("RGB"))


def _read_audio(path: Path) -> npt.NDArray[np.float32]:
    import av

    resampler = av.AudioResampler(format="flt", layout="mono", rate=AUDIO_RATE_HZ)
    with av.open(str(path)) as container:
        frames = [part for frame in container.decode(audio=0) for part in resampler.resample(frame)]
        frames += resampler.resample(None)
        return np.concatenate([frame.to_ndarray()[0] for frame in frames])
