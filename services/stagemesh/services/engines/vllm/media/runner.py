"""The mixins of the media feature for vLLM's model runners. They fix the prefill of a video with its audio track."""

import sys
from typing import Any

_MODULES = (
    "vllm.model_executor.models.qwen2_5_omni_thinker",
    "vllm.model_executor.models.qwen3_omni_moe_thinker",
)
_CHECK = "check_interleaved_audio_video"


def has_audio_and_video(is_video: object, is_audio: object, num_video: int, num_audio: int) -> bool:  # noqa: ARG001
    """Returns whether a step has tokens of video and of audio, so that their embeddings must be merged by kind.

    vLLM's own function returns whether the tokens alternate within the step. If the prefill of a video with its sound
    is split, a step may have a single change from one kind to the other. vLLM would then assign the embeddings in the
    order of the media, and so swap audio and video.
    """
    return num_video > 0 and num_audio > 0


class _MergesByKind:
    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Loads the model, and replaces the function in the module of the model."""
        super().load_model(*args, **kwargs)  # type: ignore[misc]
        for module in filter(None, map(sys.modules.get, _MODULES)):
            assert hasattr(module, _CHECK), f"{module.__name__} has no {_CHECK}, which Stagemesh replaces"
            setattr(module, _CHECK, has_audio_and_video)


class RunnerV1(_MergesByKind):
    """The mixin for vLLM's V1 model runner."""


class RunnerV2(_MergesByKind):
    """The mixin for vLLM's V2 model runner."""
