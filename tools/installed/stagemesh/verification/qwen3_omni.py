"""The reference of Qwen3-Omni: transformers' implementation, greedy, one request at a time, and its comparison with
the stages.
"""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from stagemesh.common.wire.tensors import Array
from stagemesh.services.models.qwen3_omni.transforms import STATES
from stagemesh.verification.base import (
    ForcedTokens,
    Outputs,
    function_precision,
    language_model_precision,
    load_model,
    missing,
    read_media,
    states_precision,
    to_numpy,
)
from stagemesh.verification.comparison import Compared, ForcedChoice, compare_choices, compare_exactly, compare_numbers
from stagemesh.verification.job import Comparison, VerificationRequest, VerifiedStage
from stagemesh.verification.references import AUDIO, CODES, PROMPT_IDS, TOKEN_IDS


@dataclass(frozen=True)
class Conversation:
    """Messages as the chat template expects them, and the media of their parts in order."""

    messages: Sequence[dict[str, Any]]
    images: Sequence[NDArray[np.uint8]] = ()
    """Each [height, width, 3]."""
    audio: Sequence[NDArray[np.float32]] = ()
    """Each [samples] at 16 kHz. The sound of a video, too, if `use_audio_in_video`."""
    videos: Sequence[NDArray[np.uint8]] = ()
    """Each [frames, height, width, 3]."""
    frame_rate: float = 2.0
    use_audio_in_video: bool = False
    speaker: str = "Ethan"
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    """Further arguments of `generate`, for example talker_repetition_penalty."""


@dataclass(frozen=True)
class Result:
    """The outputs of one conversation."""

    prompt_ids: NDArray[np.int64]
    text_ids: NDArray[np.int64]
    """The tokens of the answer, with the last token of the turn if the text ended by itself."""
    codes: NDArray[np.int64]
    """[frames, groups], without the frame of the end."""
    waveform: NDArray[np.float32]
    """[samples] at 24 kHz."""
    states: NDArray[np.float32]
    """The thinker's states that the talker accepts, [tokens, width]. Without the last token of the answer."""


@dataclass(frozen=True)
class Forced:
    """Recorders of the choices of a pipeline, which the reference repeats."""

    text: ForcedTokens
    first_codes: ForcedTokens
    residual_codes: ForcedTokens
    """Contains the codes of all frames, one frame after another."""


class Reference:
    """transformers' implementation, loaded from the folder of a checkpoint."""

    def __init__(self, folder: Path, *, precision: str = "float32", device: str = "cpu") -> None:
        from transformers import AutoTokenizer, Qwen3OmniMoeForConditionalGeneration

        self._folder = folder
        self.tokenizer: Any = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        dtype = getattr(torch, precision)
        self.model: Any = load_model(Qwen3OmniMoeForConditionalGeneration, folder, dtype=dtype, device=device)
        # Checkpoints lack it, but transformers 5.19 reads it for prompts with audio and vision.
        self.model.talker.config.audio_config = self.model.thinker.config.audio_config
        # The code predictor of a frame is called within the talker's step, and code2wav at the end.
        self._generate_residuals = self.model.talker.code_predictor.generate
        self._chunked_decode, self.model.code2wav.chunked_decode = (
            self.model.code2wav.chunked_decode,
            self._record_codes,
        )
        self._think, self.model.thinker.generate = self.model.thinker.generate, self._record_states
        self.model.code2wav.float()
        self._codes: Any = None
        self._states: Any = None

    def generate(
        self, conversation: Conversation, *, text_tokens: int, codec_tokens: int, forced: Forced | None = None
    ) -> Result:
        """Computes at most `text_tokens` tokens of text and `codec_tokens` codec tokens.

        If `forced` is not None, the choices are those of a pipeline.
        """
        inputs = self._prepare(conversation)
        with warnings.catch_warnings():
            # The talker's prompt consists of states, so its repetition penalty applies only to generated codes.
            warnings.filterwarnings("ignore", "Passing `repetition_penalty` with `inputs_embeds`")
            sequences, waveform = self.model.generate(
                **inputs,
                speaker=conversation.speaker,
                return_audio=True,
                thinker_max_new_tokens=text_tokens,
                thinker_eos_token_id=self.model.config.im_end_token_id,
                thinker_do_sample=False,
                talker_max_new_tokens=codec_tokens,
                talker_do_sample=False,
                use_audio_in_video=conversation.use_audio_in_video,
                # transformers does not pass it on to the talker.
                talker_use_audio_in_video=conversation.use_audio_in_video,
                **conversation.options,
                **self._force(forced),
            )
        prompt = inputs["input_ids"].shape[1]
        sequences = sequences.cpu()
        return Result(
            prompt_ids=sequences[0, :prompt].numpy(),
            text_ids=sequences[0, prompt:].numpy(),
            codes=self._codes[0].T.cpu().numpy(),
            waveform=waveform.flatten().cpu().numpy(),
            states=self._states,
        )

    def prompt_ids(self, conversation: Conversation) -> NDArray[np.int64]:
        """Returns the tokens of the prompt."""
        ids: NDArray[np.int64] = self._prepare(conversation)["input_ids"][0].cpu().numpy()
        return ids

    def decode(self, codes: Array) -> NDArray[np.float32]:
        """Converts frames, int[frames, groups], to samples at 24 kHz."""
        with torch.inference_mode():
            frames = torch.from_numpy(np.ascontiguousarray(codes.T[None])).long()
            return to_numpy(self._chunked_decode(frames.to(self.model.code2wav.device)).flatten())

    # -- internals

    def _force(self, forced: Forced | None) -> dict[str, Any]:
        """Returns the arguments with which the model repeats the choices."""
        from transformers import LogitsProcessorList

        predictor, generate = self.model.talker.code_predictor, self._generate_residuals
        if forced is None:
            predictor.generate = generate
            return {}
        text, first, residual = (
            LogitsProcessorList([each]) for each in (forced.text, forced.first_codes, forced.residual_codes)
        )
        predictor.generate = partial(generate, logits_processor=residual)
        return {"thinker_logits_processor": text, "talker_logits_processor": first}

    def _record_codes(self, codes: Any, **sizes: int) -> Any:
        self._codes = codes
        return self._chunked_decode(codes, **sizes)

    def _record_states(self, **arguments: Any) -> Any:
        result = self._think(**arguments)
        layer = self.model.config.talker_config.accept_hidden_layer
        self._states = to_numpy(torch.cat([states[layer][0] for states in result.hidden_states]))
        return result

    def _prepare(self, conversation: Conversation) -> dict[str, Any]:
        text = self.tokenizer.apply_chat_template(
            list(conversation.messages), add_generation_prompt=True, tokenize=False
        )
        media: dict[str, Any] = {
            "images": list(conversation.images),
            "audio": list(conversation.audio),
            "videos": list(conversation.videos),
        }
        media = {kind: items for kind, items in media.items() if items}
        if not media:
            return dict(self.tokenizer(text, return_tensors="pt").to(self.model.device))
        from transformers import Qwen3OmniMoeProcessor

        if conversation.videos:
            media |= {"fps": conversation.frame_rate, "use_audio_in_video": conversation.use_audio_in_video}
        processor: Any = Qwen3OmniMoeProcessor.from_pretrained(self._folder)
        return dict(processor(text=text, return_tensors="pt", **media).to(self.model.device))


_LEAST_TOKENS = 2
"""The reference cannot speak an answer that ends at once."""
_GREEDY = {"thinker_repetition_penalty": 1.0, "talker_repetition_penalty": 1.0}


class Qwen3OmniReference:
    """A `Reference` that repeats the choices of the thinker and the talker. Talker and code2wav may be absent."""

    def __init__(self, stages: Mapping[str, VerifiedStage], device: str) -> None:
        self._stages = stages
        folder, precision = stages["thinker"].stage.model, language_model_precision(stages["thinker"])
        self._reference = Reference(folder, precision=precision, device=device)
        self._config: Any = self._reference.model.config
        self._codebook_size: int = self._config.code2wav_config.codebook_size

    def compare(self, number: int, request: VerificationRequest, outputs: Outputs) -> Iterator[Comparison]:
        """Yields the comparisons of the thinker's tokens and states, of the codes, and of the waveform."""
        conversation = self._conversation(request)
        choices = _Choices(request, self._get(outputs, "thinker", TOKEN_IDS), self._codes(outputs), self._config)
        result = None
        if not choices.obstacle:
            result = self._reference.generate(
                conversation,
                text_tokens=len(choices.text),
                codec_tokens=len(choices.first_codes),
                forced=choices.forced,
            )
        for role, stage in self._stages.items():
            for output in stage.outputs:
                what = Compared(number, stage.stage.name, output, _precision(stage, output))
                ours = outputs.get(stage, output)
                if ours is None:
                    yield missing(what)
                elif output == PROMPT_IDS:
                    yield compare_exactly(what, ours, self._reference.prompt_ids(conversation))
                elif role == "code2wav":
                    yield self._compare_audio(what, ours, self._codes(outputs))
                elif result is None:
                    yield what.skip(choices.obstacle)
                else:
                    yield _compare(what, ours, choices, result)

    # -- internals

    def _get(self, outputs: Outputs, role: str, output: str) -> Array | None:
        return outputs.get(self._stages[role], output) if role in self._stages else None

    def _codes(self, outputs: Outputs) -> Array | None:
        """Returns the frames of the talker without the one that ends the speech, or None if there is no such output."""
        codes = self._get(outputs, "talker", CODES)
        return None if codes is None else codes[codes[:, 0] != self._config.talker_config.codec_eos_token_id]

    def _compare_audio(self, what: Compared, ours: Array, codes: Array | None) -> Comparison:
        if codes is None:
            return what.skip("the waveform is compared given the talker's codes; add codes to the pipeline's outputs")
        if not len(codes) or codes.min() < 0 or codes.max() >= self._codebook_size:
            return what.skip("the talker gave no frames, or frames with codes outside of the codebook")
        return compare_numbers(what, ours.reshape(-1), self._reference.decode(codes))

    def _conversation(self, request: VerificationRequest) -> Conversation:
        speaker = next(iter(self._config.talker_config.speaker_id))
        media = read_media(request.media)
        parts = [*({"type": kind} for kind in media.kinds), {"type": "text", "text": request.prompt}]
        message = {"role": "user", "content": parts if media.kinds else request.prompt}
        return Conversation([message], media.images, media.audio, speaker=speaker, options=_GREEDY)


class _Choices:
    """The tokens and codes that the pipeline chose for a request, and the reference's rating of each."""

    def __init__(self, request: VerificationRequest, tokens: Array | None, codes: Array | None, config: Any) -> None:
        end: int = config.talker_config.codec_eos_token_id
        self.text: list[int] = [] if tokens is None else tokens.tolist()
        # Without the talker, one frame is computed, because the reference always speaks.
        self._frames: Sequence[Sequence[int]] = [] if codes is None else codes.tolist()
        self.first_codes = [frame[0] for frame in self._frames] or [0]
        self._has_ended = codes is not None and len(codes) < request.max_frames
        # The residual codes of a frame are computed together with the first code of the next frame.
        self.first_codes.append(end)
        residuals = chain.from_iterable(frame[1:] for frame in self._frames)
        self.forced = Forced(ForcedTokens(self.text), ForcedTokens(self.first_codes), ForcedTokens(residuals))
        self.obstacle = self._find_obstacle(tokens, codes, config)

    def rated_codes(self) -> list[ForcedChoice]:
        """Returns the ratings of all codes, frame by frame, and of the end if the talker chose it."""
        first, residual = self.forced.first_codes.choices, iter(self.forced.residual_codes.choices)
        rated = [[first[at], *(next(residual) for _ in frame[1:])] for at, frame in enumerate(self._frames)]
        return [*chain.from_iterable(rated), *(first[len(rated) : len(rated) + 1] if self._has_ended else ())]

    def _find_obstacle(self, tokens: Array | None, codes: Array | None, config: Any) -> str:
        """Returns why the reference cannot repeat the choices, or "" if it can."""
        if tokens is None:
            return "the reference needs the thinker's tokens; add them to the pipeline's outputs"
        if len(self.text) < _LEAST_TOKENS:
            return "the answer is empty; use another prompt"
        groups, size = config.talker_config.num_code_groups, config.code2wav_config.codebook_size
        if codes is not None and (
            codes.shape[1:] != (groups,) or (len(codes) and not 0 <= codes.min() <= codes.max() < size)
        ):
            return f"the codes are not frames of {groups} codes below {size} each"
        return ""


def _compare(what: Compared, ours: Array, choices: _Choices, result: Result) -> Comparison:
    if what.output == TOKEN_IDS:
        return compare_choices(what, choices.forced.text.choices)
    if what.output == CODES:
        return compare_choices(what, choices.rated_codes(), groups=ours.shape[1])
    if what.output == STATES:
        # The state of the last token of the answer is not computed.
        return compare_numbers(what, ours[: len(result.states)], result.states[: len(ours)])
    return what.skip("the reference compares the states of the layer accept")


def _precision(stage: VerifiedStage, output: str) -> str:
    if output == AUDIO:
        return function_precision(stage)
    return states_precision(stage) if output == STATES else language_model_precision(stage)
