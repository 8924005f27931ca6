"""The mixins of the media feature for vLLM's model runners. They fix the prefill of a video with its audio track."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import wraps
from typing import Any

_QWEN2_5 = "vllm.model_executor.models.qwen2_5_omni_thinker"
_MODULES = (_QWEN2_5, "vllm.model_executor.models.qwen3_omni_moe_thinker")
_CHECK = "check_interleaved_audio_video"
_QWEN2_5_MODEL, _POSITIONS = "Qwen2_5OmniThinkerForConditionalGeneration", "get_mrope_input_positions"


def has_audio_and_video(is_video: object, is_audio: object, num_video: int, num_audio: int) -> bool:  # noqa: ARG001
    """Returns whether a step has tokens of video and of audio, so that their embeddings must be merged by kind.

    vLLM's own function returns whether the tokens alternate within the step. If the prefill of a video with its sound
    is split, a step may have a single change from one kind to the other. vLLM would then assign the embeddings in the
    order of the media, and so swap audio and video.
    """
    return num_video > 0 and num_audio > 0


def with_shared_positions(compute: Callable[..., tuple[Any, int]]) -> Callable[..., tuple[Any, int]]:
    """Returns a function that computes the M-RoPE positions of Qwen2.5-Omni for videos with their audio tracks, too.

    `compute` is vLLM's method. It takes the token before such a video, which begins its audio, for the video's first
    token. In the model, this token has the position of the token before it, and so has the second one of the two tokens
    after the video.
    """

    @wraps(compute)
    def positions(model: object, input_tokens: list[int], mm_features: Sequence[Any]) -> tuple[Any, int]:
        ranges = [each.mm_position for each in mm_features if _is_video_with_audio(each)]
        moved = [
            replace(each, mm_position=replace(each.mm_position, offset=each.mm_position.offset + 1))
            if _is_video_with_audio(each)
            else each
            for each in mm_features
        ]
        computed, delta = compute(model, input_tokens, moved)
        for each in ranges:
            for shared in (each.offset, each.offset + each.length):
                computed[:, shared:] -= 1
        return computed, delta - 2 * len(ranges)

    return positions


def _is_video_with_audio(feature: Any) -> bool:
    given = feature.data and feature.data.get("use_audio_in_video")
    return feature.modality == "video" and given is not None and bool(given.data)


class _FixesVideosWithAudio:
    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Loads the model, and replaces functions in the module of the model."""
        super().load_model(*args, **kwargs)  # type: ignore[misc]
        for module in filter(None, map(sys.modules.get, _MODULES)):
            assert hasattr(module, _CHECK), f"{module.__name__} has no {_CHECK}, which Stagemesh replaces"
            setattr(module, _CHECK, has_audio_and_video)
        if _QWEN2_5 in sys.modules:
            model = getattr(sys.modules[_QWEN2_5], _QWEN2_5_MODEL)
            setattr(model, _POSITIONS, with_shared_positions(getattr(model, _POSITIONS)))


class RunnerV1(_FixesVideosWithAudio):
    """The mixin for vLLM's V1 model runner."""


class RunnerV2(_FixesVideosWithAudio):
    """The mixin for vLLM's V2 model runner."""
