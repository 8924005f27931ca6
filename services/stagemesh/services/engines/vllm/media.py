"""The media feature: prompts may contain images, audio and video.

The feature decodes the media. vLLM then inserts placeholder tokens into the prompt and creates the model's input
tensors. The mixins for vLLM's model runners fix the prefill of a video with its audio track.
"""

import asyncio
import hashlib
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import AsyncExitStack, closing
from dataclasses import replace
from functools import wraps
from importlib.util import find_spec
from itertools import chain
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypeGuard, cast

import numpy as np
from vllm import TokensPrompt
from vllm.exceptions import VLLMValidationError
from vllm.multimodal.audio import AudioResampler

from stagemesh.common.errors import InvalidRequestError, UnsupportedError
from stagemesh.common.media.decoding import DecodedAudio, DecodedBytes, read_audio
from stagemesh.common.media.images import read_image
from stagemesh.common.media.videos import read_video
from stagemesh.services.engines.base import Task
from stagemesh.services.engines.media_decoding import read_samples
from stagemesh.services.engines.prompts import MediaFile, Medium, RawPrompt, media_of
from stagemesh.services.engines.vllm.features import RequestFeature, RequestPrompt
from stagemesh.services.engines.vllm.requests import check_tokens, prompt_tokens

if TYPE_CHECKING:
    from vllm.inputs import MultiModalInput
    from vllm.multimodal.processing import BaseMultiModalProcessor, BaseProcessingInfo


_FRAMES = 32
_DIGEST_BYTES = 16
_MAX_CAUSE = 200
# The errors that models' processors raise for media that they cannot process.
_PROCESSOR_ERRORS = (
    *(ArithmeticError, AssertionError, LookupError, OSError, RuntimeError, TypeError, ValueError),
    VLLMValidationError,
)
_Resampler: TypeAlias = Literal["pyav", "scipy", "soxr", "torchaudio"]
_RESAMPLERS: Mapping[_Resampler, str] = {"torchaudio": "torchaudio", "pyav": "av", "scipy": "scipy", "soxr": "soxr"}
"""The Python module that each of vLLM's resampling methods imports, by method."""


class Media(RequestFeature):
    """The request feature for prompts with media.

    A separate thread decodes files, so that a long video does not delay text prompts. The tokenizer runs on
    `tokenizer_thread`. vLLM runs the model's processor on another thread.
    """

    runner_module = __name__

    def __init__(self, *, stage: str, media_bytes: int, tokenizer_thread: Executor) -> None:
        """Creates the feature. `media_bytes` is the maximum decoded size of the media of one request, in bytes."""
        self._stage, self._media_bytes = stage, media_bytes
        self._tokenizer_thread = tokenizer_thread
        self._decoding_thread = ThreadPoolExecutor(1, thread_name_prefix="vllm-media")

    async def read_prompt(self, task: Task, name: str, held: AsyncExitStack) -> RequestPrompt | None:  # noqa: ARG002
        """Returns the prompt of a task with media, or None if the task has no media.

        Raises InvalidRequestError if a medium cannot be decoded, and UnsupportedError if the model does not accept a
        medium of this kind, such as video.
        """
        media = media_of(task.prompt)
        if not media:
            return None
        info = self._checked_info(media)
        loop = asyncio.get_running_loop()
        ids = await loop.run_in_executor(self._tokenizer_thread, prompt_tokens, task.prompt, self.llm)
        # If the task is cancelled, decoding ends.
        with closing(DecodedBytes(self._media_bytes)) as decoded:
            data = await loop.run_in_executor(self._decoding_thread, self._decode, media, info, decoded)
        given = TokensPrompt(prompt_token_ids=ids, multi_modal_data=data)
        if any(map(_has_audio_track, media)):
            given["mm_processor_kwargs"] = {"use_audio_in_video": True}
        features = await self._process(given)
        if isinstance(task.prompt, RawPrompt):
            check_placeholders(features)
        digest = await loop.run_in_executor(self._decoding_thread, _digest, media)
        prompt = RequestPrompt(list(features["prompt_token_ids"]), features, digest)
        check_tokens(_without_placeholders(features), vocabulary=self.llm.model_config.get_vocab_size())
        return prompt

    def close(self) -> None:
        self._decoding_thread.shutdown(wait=False, cancel_futures=True)

    # -- internals

    async def _process(self, prompt: TokensPrompt) -> "MultiModalInput":
        """Runs the model's processor on a prompt of tokens and decoded media. Returns the model's inputs.

        Raises InvalidRequestError if the processor rejects the media, and UnsupportedError if vLLM cannot combine the
        model's media with a prompt.
        """
        try:
            # Skips vLLM's cache, which would count the media as sent even if the request is rejected later.
            features = await self.llm.renderer.process_for_engine_async(prompt, time.time(), skip_mm_cache=True)
        except _PROCESSOR_ERRORS as exc:
            # The message of vLLM's own error contains the samples or the pixels.
            cause = exc.__cause__ or exc
            raise InvalidRequestError(
                f"stage {self._stage}: the model's processor rejects the media: "
                f"{str(cause)[:_MAX_CAUSE] or type(cause).__name__}; send other media, for example longer audio",
                reason="INVALID_MEDIA",
            ) from exc
        if features["type"] != "multimodal":
            raise UnsupportedError(
                f"stage {self._stage}: the model {self.llm.model_config.model} reads media separately from its "
                "prompt, which this engine does not serve; choose a model that accepts media within messages"
            )
        return features

    def _checked_info(self, media: Sequence[Medium]) -> "BaseProcessingInfo":
        """Checks that the model accepts these media. Returns vLLM's description of the media that the model accepts.

        Raises UnsupportedError if the model does not accept one of the kinds, and InvalidRequestError if there are too
        many media of one kind.
        """
        processor = cast("BaseMultiModalProcessor[BaseProcessingInfo] | None", self.llm.renderer.mm_processor)
        limits: Mapping[str, int] = processor.info.allowed_mm_limits if processor is not None else {}
        accepted = [kind for kind, limit in limits.items() if limit]
        check_audio_tracks(media, stage=self._stage)
        counts = Counter(medium.kind for medium in media)
        counts["audio"] += sum(map(_has_audio_track, media))
        for kind, count in (+counts).items():
            if kind not in accepted:
                raise UnsupportedError(
                    f"stage {self._stage}: the model {self.llm.model_config.model} accepts no {kind}; it accepts "
                    f"{', '.join(['text', *accepted])}",
                    metadata={"stage": self._stage, "ability": kind},
                )
            if count > limits[kind]:
                raise InvalidRequestError(
                    f"stage {self._stage}: the request contains {count} of kind {kind}; the model accepts at most "
                    f"{limits[kind]}, or the number that the stage's option limit_mm_per_prompt sets",
                    reason="TOO_MANY_MEDIA",
                )
        assert processor is not None, "a model without a processor accepts no media"
        return processor.info

    def _decode(
        self, media: Sequence[Medium], info: "BaseProcessingInfo", decoded: DecodedBytes
    ) -> dict[str, list[object]]:
        config = self.llm.model_config.get_multimodal_config()
        frames = int(config.media_io_kwargs.get("video", {}).get("num_frames", _FRAMES))
        return decode_media(media, decoded, max_frames=frames, resample=lambda audio: _resample(audio, info, decoded))


def decode_media(
    media: Sequence[Medium], decoded: DecodedBytes, *, max_frames: int, resample: Callable[[DecodedAudio], object]
) -> dict[str, list[object]]:
    """Returns decoded media in the form that vLLM accepts, by kind. The audio track of a video is also audio.

    Adds the decoded size to `decoded`. `max_frames` limits the frames of each video. `resample` converts audio to the
    model's sample rate. Raises InvalidRequestError if a medium cannot be decoded.
    """
    data = dict[str, list[object]]()
    for medium in media:
        data.setdefault(medium.kind, []).append(_decode_medium(medium, decoded, max_frames, resample))
        if _has_audio_track(medium):
            with medium.open() as content:
                data.setdefault("audio", []).append(resample(read_audio(content, "video", decoded)))
    return data


def _decode_medium(
    medium: Medium, decoded: DecodedBytes, max_frames: int, resample: Callable[[DecodedAudio], object]
) -> object:
    if not isinstance(medium, MediaFile):
        return resample(read_samples(medium, decoded))
    with medium.open() as content:
        match medium.kind:
            case "image":
                return read_image(content, decoded)
            case "video":
                return read_video(content, decoded, max_frames=max_frames)
            case "audio":
                return resample(read_audio(content, "audio", decoded))


def _has_audio_track(medium: Medium) -> TypeGuard[MediaFile]:
    return isinstance(medium, MediaFile) and medium.use_audio


def check_audio_tracks(media: Sequence[Medium], *, stage: str) -> None:
    """Raises UnsupportedError if some, but not all, of the videos and audio in `media` are videos with audio tracks.

    vLLM pairs the first audio with the first video, and so on. It pairs all of them or none.
    """
    moving = [medium for medium in media if medium.kind != "image"]
    if any(map(_has_audio_track, media)) and not all(map(_has_audio_track, moving)):
        raise UnsupportedError(
            f"stage {stage}: with use_audio_in_video, a request can have no other audio, and no video without it; set "
            "it for all videos or none, and omit the other audio",
            metadata={"stage": stage, "ability": "audio"},
        )


def check_placeholders(features: "MultiModalInput") -> None:
    """Raises InvalidRequestError (INVALID_PROMPT) if a prompt has a placeholder that is not replaced by a medium."""
    ids = np.array(features["prompt_token_ids"])
    replaced = np.zeros(len(ids), bool)
    placeholders = set[int]()
    for each in chain.from_iterable(features["mm_placeholders"].values()):
        part = slice(each.offset, each.offset + each.length)
        replaced[part] = True
        embedded = ids[part] if each.is_embed is None else ids[part][each.is_embed.numpy()]
        placeholders.update(embedded.tolist())
    left = placeholders.intersection(ids[~replaced].tolist())
    if left:
        raise InvalidRequestError(
            f"the prompt has more placeholders (token {min(left)}) than media; send one medium for each placeholder",
            reason="INVALID_PROMPT",
        )


def _resample(audio: DecodedAudio, info: "BaseProcessingInfo", decoded: DecodedBytes) -> object:
    """Resamples audio to the model's sample rate, if the model has one.

    Returns the audio in the form that vLLM accepts. Uses any resampling library that is installed. vLLM itself would
    use only torchaudio.
    """
    wanted = info.data_parser.audio_resampler
    if wanted.target_sr is None:
        return audio.samples
    # Resampling from a low rate multiplies the samples.
    decoded.add(int(audio.samples.nbytes * max(0.0, wanted.target_sr / audio.sample_rate_hz - 1)), "audio")
    resampler = wanted
    # vLLM's default is torchaudio even if torchaudio is not installed.
    for method in sorted(_RESAMPLERS, key=lambda each: each != wanted.method):
        if find_spec(_RESAMPLERS[method]) is not None:
            resampler = AudioResampler(wanted.target_sr, method)
            break
    try:
        samples = resampler.resample(audio.samples, orig_sr=audio.sample_rate_hz)
    except ImportError as exc:
        raise UnsupportedError(
            f"this stage cannot resample audio from {audio.sample_rate_hz} Hz to the model's {wanted.target_sr:g} Hz; "
            "install PyAV or SciPy, or send the audio at that rate"
        ) from exc
    return samples, wanted.target_sr


def _without_placeholders(features: "MultiModalInput") -> list[int]:
    """Returns the prompt's token ids, with 0 instead of the ids of placeholder tokens.

    Placeholder tokens are not in the model's vocabulary and would not pass the check of the ids.
    """
    ids = list(features["prompt_token_ids"])
    for ranges in features["mm_placeholders"].values():
        for placeholder in ranges:
            ids[placeholder.offset : placeholder.offset + placeholder.length] = [0] * placeholder.length
    return ids


def _digest(media: Sequence[Medium]) -> bytes:
    """Returns a digest of the media, which distinguishes prompts that have the same tokens but different media."""
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for medium in media:
        if isinstance(medium, MediaFile):
            digest.update(f"{medium.kind} {medium.use_audio} {medium.size_bytes} ".encode())
            with medium.open() as content:
                digest.update(hashlib.file_digest(content, "blake2b").digest())
        else:
            digest.update(f"audio {medium.samples.shape} {medium.sample_rate_hz} ".encode())
            digest.update(medium.samples.tobytes())
    return digest.digest()


_QWEN2_5 = "vllm.model_executor.models.qwen2_5_omni_thinker"
_MODELS_WITH_AUDIO_TRACKS = (_QWEN2_5, "vllm.model_executor.models.qwen3_omni_moe_thinker")
_CHECK = "check_interleaved_audio_video"
_QWEN2_5_MODEL, _POSITIONS = "Qwen2_5OmniThinkerForConditionalGeneration", "get_mrope_input_positions"


def has_audio_and_video(is_video: object, is_audio: object, num_video: int, num_audio: int) -> bool:  # noqa: ARG001
    """Returns whether a step has tokens of video and of audio, so that their embeddings must be merged by kind.

    vLLM's own function returns whether the tokens alternate within the step. If the prefill of a video with its sound
    is split, a step may have a single change from one kind to the other. vLLM would then assign the embeddings in the
    order of the media, and thereby swap audio and video.
    """
    return num_video > 0 and num_audio > 0


def with_shared_positions(compute: Callable[..., tuple[Any, int]]) -> Callable[..., tuple[Any, int]]:
    """Returns a function that computes M-RoPE positions of Qwen2.5-Omni, which are also right for videos with audio.

    `compute` is vLLM's method. It mistakes the token before such a video, which marks the start of the audio, for the
    video's first token. In the model, this token has the same position as the token before it. The second of the two
    tokens after the video also has the same position as the token before it.
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


class RunnerV1:
    """A mixin for both of vLLM's model runners. Corrects functions of models that handle videos with audio tracks."""

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Loads the model, and replaces functions in the module of the model."""
        super().load_model(*args, **kwargs)  # type: ignore[misc]
        for module in filter(None, map(sys.modules.get, _MODELS_WITH_AUDIO_TRACKS)):
            assert hasattr(module, _CHECK), f"{module.__name__} has no {_CHECK}, which Stagemesh replaces"
            setattr(module, _CHECK, has_audio_and_video)
        if _QWEN2_5 in sys.modules:
            model = getattr(sys.modules[_QWEN2_5], _QWEN2_5_MODEL)
            setattr(model, _POSITIONS, with_shared_positions(getattr(model, _POSITIONS)))


RunnerV2 = RunnerV1
