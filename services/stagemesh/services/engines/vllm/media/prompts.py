"""Prompts with pictures, sound and films: decoded here, given their places and made into tensors by vLLM."""

import asyncio
import hashlib
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Literal, TypeAlias, cast

import numpy as np
import numpy.typing as npt
from vllm import TokensPrompt
from vllm.exceptions import VLLMValidationError
from vllm.multimodal.audio import AudioResampler

from stagemesh.common.errors import InvalidRequestError, UnsupportedError
from stagemesh.services.engines.base import Prompt, media_of
from stagemesh.services.engines.media import MediaFile, Medium
from stagemesh.services.engines.vllm.media.decoding import (
    DecodedAudio,
    DecodedBytes,
    DecodedVideo,
    read_film,
    read_image,
    read_samples,
    read_sound,
)
from stagemesh.services.engines.vllm.requests import check_tokens, prompt_tokens

if TYPE_CHECKING:
    from vllm.inputs import MultiModalInput
    from vllm.multimodal.processing import BaseMultiModalProcessor, BaseProcessingInfo
    from vllm.v1.engine.async_llm import AsyncLLM

_FRAMES = 32
_DIGEST_BYTES = 16
# Whatever a model's processor may throw at media that it cannot take.
_REFUSALS = (
    *(ArithmeticError, AssertionError, LookupError, OSError, RuntimeError, TypeError, ValueError),
    VLLMValidationError,
)
_Resampler: TypeAlias = Literal["pyav", "scipy", "soxr", "torchaudio"]
_RESAMPLERS: Mapping[_Resampler, str] = {"torchaudio": "torchaudio", "pyav": "av", "scipy": "scipy", "soxr": "soxr"}
"""vLLM's methods, with the modules that they need."""


@dataclass(frozen=True, eq=False)
class MediaPrompt:
    """A prompt as the model sees it, with the tensors of its media."""

    ids: list[int]
    """With as many tokens for each medium as the model gives it."""
    digest: bytes
    """Of the media, for their tokens do not tell them apart."""
    features: "MultiModalInput"

    def followed_by(self, tokens: Sequence[int]) -> "MultiModalInput":
        """What vLLM is to go on from, after these tokens."""
        return cast("MultiModalInput", {**self.features, "prompt_token_ids": [*self.ids, *tokens]})


class MediaPrompts:
    """Makes prompts with media for one running AsyncLLM.

    Files are decoded on a thread of its own, so that a long film holds up nobody who sends text; `owner` runs what uses
    the tokenizer, and vLLM's own thread the model's processor.
    """

    def __init__(self, llm: "AsyncLLM", *, stage: str, owner: Executor, media_bytes: int) -> None:
        self._llm, self._stage, self._owner = llm, stage, owner
        self._media_bytes = media_bytes
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="vllm-media")

    async def made(self, prompt: Prompt) -> MediaPrompt:
        """The prompt; raises InvalidRequestError for media that cannot be read, UnsupportedError for those that the
        model does not take.
        """
        media = media_of(prompt)
        model = self._check_kinds(media)
        loop, renderer = asyncio.get_running_loop(), self._llm.renderer
        vocabulary = self._llm.model_config.get_vocab_size()
        ids = await loop.run_in_executor(self._owner, lambda: prompt_tokens(prompt, renderer, vocabulary=vocabulary))
        data = await loop.run_in_executor(self._reader, self._decoded, media, model)
        tokens = TokensPrompt(prompt_token_ids=ids, multi_modal_data=data)
        try:
            # vLLM's cache between the processes would take what is made here for sent, also where it is refused later.
            features = await renderer.process_for_engine_async(tokens, time.time(), skip_mm_cache=True)
        except _REFUSALS as exc:
            raise InvalidRequestError(
                f"stage {self._stage}: the model's processor refuses the media: {exc or type(exc).__name__}",
                reason="INVALID_MEDIA",
            ) from exc
        if features["type"] != "multimodal":
            raise UnsupportedError(
                f"stage {self._stage}: the model {self._llm.model_config.model} reads media apart from its prompt, "
                "which this engine does not serve; choose one that takes them within messages"
            )
        made = MediaPrompt(list(features["prompt_token_ids"]), _digest(media), features)
        check_tokens(_without_places(made), vocabulary=vocabulary)
        return made

    def close(self) -> None:
        """Ends the thread. Closing twice is harmless."""
        self._reader.shutdown(wait=False, cancel_futures=True)

    # -- inner workings

    def _check_kinds(self, media: Sequence[Medium]) -> "BaseProcessingInfo":
        model = _model(self._llm)
        limits: Mapping[str, int] = model.allowed_mm_limits if model is not None else {}
        taken = [kind for kind, limit in limits.items() if limit]
        for kind, count in Counter(medium.kind for medium in media).items():
            if kind not in taken:
                raise UnsupportedError(
                    f"stage {self._stage}: the model {self._llm.model_config.model} takes no {kind}; it takes "
                    f"{', '.join(['text', *taken])}",
                    metadata={"stage": self._stage, "ability": kind},
                )
            if count > limits[kind]:
                raise InvalidRequestError(
                    f"stage {self._stage}: the request holds {count} of kind {kind}; the model takes {limits[kind]} at "
                    "most, or as many as the stage's option limit_mm_per_prompt says",
                    reason="TOO_MANY_MEDIA",
                )
        assert model is not None, "a prompt with media holds some"
        return model

    def _decoded(self, media: Sequence[Medium], model: "BaseProcessingInfo") -> dict[str, list[object]]:
        counted, data = DecodedBytes(self._media_bytes), dict[str, list[object]]()
        for medium in media:
            data.setdefault(medium.kind, []).append(self._one(medium, counted, model))
        return data

    def _one(self, medium: Medium, counted: DecodedBytes, model: "BaseProcessingInfo") -> object:
        if not isinstance(medium, MediaFile):
            return _heard(read_samples(medium, counted), model)
        match medium.kind:
            case "image":
                return read_image(medium, counted)
            case "audio":
                return _heard(read_sound(medium, counted), model)
            case "video":
                config = self._llm.model_config.get_multimodal_config()
                frames = int(config.media_io_kwargs.get("video", {}).get("num_frames", _FRAMES))
                return film_data(read_film(medium, counted, max_frames=frames))


def _model(llm: "AsyncLLM") -> "BaseProcessingInfo | None":
    """What vLLM knows of the media that its model takes; None where it takes text alone."""
    processor = cast("BaseMultiModalProcessor[BaseProcessingInfo] | None", llm.renderer.mm_processor)
    return processor.info if processor is not None else None


def _heard(sound: DecodedAudio, model: "BaseProcessingInfo") -> object:
    """A sound at the model's rate: vLLM would want torchaudio to get it there."""
    wanted = model.data_parser.audio_resampler
    if wanted.target_sr is None:
        return sound.samples
    resampler = wanted
    # vLLM's own default is torchaudio, where that is not installed too.
    for method in sorted(_RESAMPLERS, key=lambda each: each != wanted.method):
        if find_spec(_RESAMPLERS[method]) is not None:
            resampler = AudioResampler(wanted.target_sr, method)
            break
    try:
        samples = resampler.resample(sound.samples, orig_sr=sound.sample_rate_hz)
    except ImportError as exc:
        raise UnsupportedError(
            f"this stage cannot bring audio from {sound.sample_rate_hz} Hz to the model's {wanted.target_sr:g} Hz; "
            "install PyAV or SciPy, or send it at that rate",
            reason="MISSING_MODULE",
        ) from exc
    return samples, wanted.target_sr


def film_data(film: DecodedVideo) -> tuple[npt.NDArray[np.uint8], dict[str, object]]:
    """A film in vLLM's terms: pictures, and what is known of where they stood."""
    return film.frames, {
        "total_num_frames": film.frames_in_all,
        "fps": film.frame_rate_hz,
        "duration": film.duration_s,
        "video_backend": "pyav",
        "frames_indices": list(film.numbers),
        # They are a sample already, unless these are all.
        "do_sample_frames": len(film.numbers) == film.frames_in_all,
    }


def _without_places(prompt: MediaPrompt) -> list[int]:
    """The tokens that are looked up in the vocabulary."""
    ids = list(prompt.ids)
    for places in prompt.features["mm_placeholders"].values():
        for place in places:
            ids[place.offset : place.offset + place.length] = [0] * place.length
    return ids


def _digest(media: Sequence[Medium]) -> bytes:
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    for medium in media:
        if isinstance(medium, MediaFile):
            form, data = medium.media_type, medium.data
        else:
            form, data = f"{medium.samples.shape} {medium.sample_rate_hz}", medium.samples.tobytes()
        digest.update(f"{medium.kind} {form} {len(data)} ".encode())
        digest.update(data)
    return digest.digest()
