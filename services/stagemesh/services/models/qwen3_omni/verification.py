"""Compares the stages of Qwen3-Omni with transformers' implementation, for `stagemesh verify`."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from stagemesh.common.tensors import Array
from stagemesh.common.verification import Comparison, VerificationRequest, VerifiedStage
from stagemesh.services.models.qwen3_omni.reference import Conversation, Forced, Reference, Result
from stagemesh.services.models.qwen3_omni.thinker2talker import STATES
from stagemesh.services.models.verification import AUDIO, CODES, PROMPT_IDS, TOKEN_IDS
from stagemesh.services.models.verification.base import (
    Outputs,
    function_precision,
    language_model_precision,
    missing,
    states_precision,
)
from stagemesh.services.models.verification.comparison import (
    Compared,
    ForcedChoice,
    compare_choices,
    compare_exactly,
    compare_numbers,
)
from stagemesh.services.models.verification.forcing import ForcedTokens
from stagemesh.services.models.verification.media import read_media

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
