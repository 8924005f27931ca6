"""The interface of a reference implementation, and the loading of its models."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

from stagemesh.common.errors import NotReadyError
from stagemesh.common.tensors import Array
from stagemesh.common.verification import Comparison, VerificationRequest, VerifiedStage
from stagemesh.services.models.checkpoint import check_names, load_error, read_config
from stagemesh.services.models.verification.comparison import Compared

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
