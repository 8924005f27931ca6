"""The stage of the prompt, which converts a text and a choice of the voice to the talker's input rows."""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt
from pydantic import Field, JsonValue

from stagemesh.common.errors import InvalidRequestError, UnsupportedError, needs_extra
from stagemesh.common.media.decoding import DecodedBytes
from stagemesh.common.wire.tensors import Array, Value
from stagemesh.connectors.packets import Packet
from stagemesh.services.engines.function.base import Call
from stagemesh.services.engines.media_decoding import read_sound, resample
from stagemesh.services.engines.options import parse_options
from stagemesh.services.engines.prompts import Medium
from stagemesh.services.models.checkpoint import load_error, require_folder
from stagemesh.services.models.codec_speech import SAMPLE_RATE_HZ
from stagemesh.services.models.qwen3_tts.description import read_config
from stagemesh.services.models.qwen3_tts.voices import ReferenceEncoders, VoiceChoice, Voices, load_reference_encoders

Codes: TypeAlias = npt.NDArray[np.int32]
Vector: TypeAlias = npt.NDArray[np.float32]
_NO_CODE = -1


@dataclass(frozen=True, eq=False)
class SpokenPrompt:
    """A request as the talker reads it."""

    header: Sequence[int]
    """The text tokens that begin the assistant's message."""
    text: Sequence[int]
    """The text tokens to speak. If `frames` has frames, those of the reference voice precede them."""
    frames: Codes
    """The frames of the reference voice, int32[frames, groups], which the talker continues. There may be none."""
    instruction: Sequence[int] = ()
    """The text tokens of the user's message, which describes the voice."""
    language: int | None = None
    """The code of the language, or None if the talker chooses it."""
    speaker: int | Vector | None = None
    """The code of the speaker, or the x-vector of a reference voice, float32[width]."""
    whole_text: bool = False
    """Whether the prompt contains the whole text. Otherwise, a row for each frame contains a token of it."""


class RowWriter:
    """Writes the rows of requests for one checkpoint. `config` is the checkpoint's config."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        talker = config["talker_config"]
        self._pad, self._begin, self._end = (config[f"tts_{name}_token_id"] for name in ("pad", "bos", "eos"))
        self._groups: int = talker["num_code_groups"]
        self._codes = {name: int(talker[f"codec_{name}_id"]) for name in _SPECIAL}

    def write(self, prompt: SpokenPrompt) -> list[Packet]:
        """Returns one packet with the rows of the prompt, and one with those for the frames, if there are any.

        The rows of later frames are those of the padding, which the talker adds itself.
        """
        think, speaker = self._think(prompt.language), prompt.speaker
        voice = [] if speaker is None else [_NO_CODE if isinstance(speaker, np.ndarray) else speaker]
        first = [*prompt.instruction, *prompt.header]
        codes = [*[_NO_CODE] * len(first), *think, *voice, self._codes["pad"]]
        text_ids = [*first, *[self._pad] * (len(codes) - len(first) - 1), self._begin]
        text = [*prompt.text, self._end]
        if prompt.whole_text:
            text_ids, codes, text = [*text_ids, *text], [*codes, *[self._codes["pad"]] * len(text)], []
        spoken = 1 + len(prompt.frames)
        text_ids += [*text[:spoken], *[self._pad] * (spoken - len(text))]
        row_codes = np.concatenate([self._first_codes([*codes, self._codes["bos"]]), prompt.frames])
        tensors = _tensors(text_ids, row_codes)
        if isinstance(speaker, np.ndarray):
            tensors["states"] = np.zeros((len(text_ids), len(speaker)), np.float32)
            tensors["states"][len(first) + len(think)] = speaker
        packets = [Packet(tensors, {"token_start": 0, "prompt_tokens": len(text_ids)})]
        if later := text[spoken:]:
            rows = _tensors(later, self._first_codes([_NO_CODE] * len(later)))
            packets.append(Packet(rows, {"token_start": len(text_ids)}))
        return packets

    # -- internals

    def _think(self, language: int | None) -> list[int]:
        codes = self._codes
        if language is None:
            return [codes["nothink"], codes["think_bos"], codes["think_eos"]]
        return [codes["think"], codes["think_bos"], language, codes["think_eos"]]

    def _first_codes(self, codes: Sequence[int]) -> Codes:
        """Returns rows that have a first code alone, int32[rows, groups]."""
        rows = np.full((len(codes), self._groups), _NO_CODE, np.int32)
        rows[:, 0] = codes
        return rows


_SPECIAL = ("pad", "bos", "think", "nothink", "think_bos", "think_eos")


def _tensors(text_ids: Sequence[int], row_codes: Codes) -> dict[str, Array]:
    return {"text_ids": np.array(text_ids, np.int32), "row_codes": row_codes}


MIN_VOICE_S, MAX_VOICE_S = 1.0, 60.0
"""The shortest and the longest reference voice, in seconds."""
SILENCE = 1e-3
"""The largest sample of audio that is silent (-60 dB)."""
_HEADER = 3
"""The number of tokens that begin the assistant's message: message start, role and line break."""
_TURN_END, _REFERENCE_END = 5, 2
"""The numbers of tokens after the text to speak, and after the text of the reference voice."""
_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _PromptOptions:
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """The device that computes the x-vector and the frames of a reference voice."""
    media_bytes: Annotated[int, Field(ge=0)] = 64 << 20
    """The maximum decoded size of the reference voice, in bytes."""


class _Tokenizer(Protocol):
    def encode(self, text: str, /) -> Sequence[int]: ...


class PromptWriter:
    """A `Function` that converts the text of a request to the talker's rows, and to the frames of a reference voice.

    The state of a request is its choice of the voice. Each request has one packet of input, the client's prompt.
    """

    def __init__(
        self, config: Mapping[str, Any], tokenizer: _Tokenizer, encoders: ReferenceEncoders | None, *, media_bytes: int
    ) -> None:
        """`encoders` is None if the model clones no voices."""
        self._voices, self._rows = Voices(config), RowWriter(config)
        self._tokenizer, self._encoders, self._media_bytes = tokenizer, encoders, media_bytes
        self._no_frames: Codes = np.empty((0, config["talker_config"]["num_code_groups"]), np.int32)

    def open(self, *, seed: int, options: Mapping[str, Value]) -> VoiceChoice:  # noqa: ARG002
        return self._voices.choose(options)

    def __call__(self, batch: Sequence[Call[VoiceChoice]]) -> Sequence[Sequence[Packet]]:
        return [[] if call.packet is None else self._write(call.packet, call.media, call.state) for call in batch]

    # -- internals

    def _write(self, packet: Packet, media: Sequence[Medium], choice: VoiceChoice) -> list[Packet]:
        text = packet.tensors["text"].tobytes().decode().strip()
        if not text:
            raise InvalidRequestError("the prompt has no text to speak; send a text", reason="EMPTY_PROMPT")
        # Tokenized as a whole, because the tokens of a text can depend on the characters around it.
        turn = self._tokenizer.encode(f"<|im_start|>assistant\n{text}<|im_end|>\n<|im_start|>assistant\n")
        header, spoken = turn[:_HEADER], turn[_HEADER:-_TURN_END]
        instruction: Sequence[int] = ()
        if choice.instruction:
            instruction = self._tokenizer.encode(f"<|im_start|>user\n{choice.instruction}<|im_end|>\n")
        speaker, frames = self._clone(media, choice)
        if choice.reference_text:
            before = self._tokenizer.encode(f"<|im_start|>assistant\n{choice.reference_text}<|im_end|>\n")
            spoken = [*before[_HEADER:-_REFERENCE_END], *spoken]
        prompt = SpokenPrompt(header, spoken, frames, instruction, choice.language, speaker, choice.whole_text)
        # The decoder waits for the frames of the reference, even if there are none.
        return [Packet({"reference_codes": frames}), *self._rows.write(prompt)]

    def _clone(self, media: Sequence[Medium], choice: VoiceChoice) -> tuple[int | Vector | None, Codes]:
        """Returns the speaker of a request, and the frames of the reference voice that the talker continues."""
        if self._encoders is None:
            if media:
                raise InvalidRequestError(
                    f"the model clones no voices; omit the {media[0].kind}, or choose a base model",
                    reason="INVALID_PROMPT",
                )
            return choice.speaker, self._no_frames
        voice = read_voice(media, media_bytes=self._media_bytes)
        frames = self._encoders.codec.encode(voice) if choice.reference_text else self._no_frames
        return self._encoders.speaker.embed(voice), frames


def read_voice(media: Sequence[Medium], *, media_bytes: int) -> npt.NDArray[np.float32]:
    """Returns the reference voice in the media of a prompt, float32[samples] at 24 kHz.

    `media_bytes` is the maximum decoded size. Raises InvalidRequestError if the prompt does not contain exactly one
    audio, or if the audio cannot be decoded, or is too short, too long or silent.
    """
    if not media:
        raise InvalidRequestError(
            "the model speaks with the voice of an audio; add one to the text of the prompt", reason="INVALID_PROMPT"
        )
    if len(media) > 1:
        raise InvalidRequestError(
            f"the prompt has {len(media)} media; send one audio of the reference voice", reason="TOO_MANY_MEDIA"
        )
    if media[0].kind != "audio":
        raise UnsupportedError(
            f"the model reads no {media[0].kind}; send an audio of the reference voice",
            metadata={"ability": media[0].kind},
        )
    audio = read_sound(media[0], DecodedBytes(media_bytes))
    seconds = len(audio.samples) / audio.sample_rate_hz
    if not MIN_VOICE_S <= seconds <= MAX_VOICE_S:
        raise InvalidRequestError(
            f"the reference voice has {seconds:.2f} s; send an audio of {MIN_VOICE_S:g} to {MAX_VOICE_S:g} s",
            reason="INVALID_MEDIA",
        )
    loudest = float(np.abs(audio.samples).max())
    if loudest <= SILENCE:
        raise InvalidRequestError(
            f"the reference voice is silent: its largest sample is {loudest:.2g}, and must be above {SILENCE:g}; send "
            "a louder audio",
            reason="INVALID_MEDIA",
        )
    if audio.sample_rate_hz != SAMPLE_RATE_HZ:
        _logger.info("resampling a reference voice from %d Hz to %d Hz", audio.sample_rate_hz, SAMPLE_RATE_HZ)
    return resample(audio, SAMPLE_RATE_HZ)


def make_prompt_writer(model: Path | None, options: Mapping[str, JsonValue]) -> PromptWriter:
    """Loads the function `qwen3_tts.prompt` from the checkpoint folder `model`.

    Raises InvalidRequestError if `model` is None or an option is invalid, and NotReadyError if the checkpoint is
    incomplete or of another model (LOAD_FAILED) or transformers is not installed (MISSING_MODULE).
    """
    folder = require_folder(model, "function qwen3_tts.prompt")
    parsed = parse_options(_PromptOptions, options, stage="")
    config = read_config(folder)
    with needs_extra("vllm", "vllm-cpu", of="the function qwen3_tts.prompt"):
        tokenizer = _load_tokenizer(folder, config)
        encoders = load_reference_encoders(folder, device=parsed.device) if Voices(config).clones else None
    return PromptWriter(config, tokenizer, encoders, media_bytes=parsed.media_bytes)


def _load_tokenizer(model: Path, config: Mapping[str, Any]) -> _Tokenizer:
    """Raises NotReadyError (LOAD_FAILED) if the folder has no tokenizer, or one that does not fit the config."""
    from transformers import Qwen2Tokenizer

    loader: Any = Qwen2Tokenizer
    try:
        tokenizer: _Tokenizer = loader.from_pretrained(model)
        start = tokenizer.encode("<|im_start|>")
    except (OSError, ValueError) as exc:
        raise load_error(model, f"its tokenizer cannot be read: {exc}") from exc
    # Without files, transformers makes a tokenizer without words.
    if start != [config["im_start_token_id"]]:
        raise load_error(model, f"its tokenizer has no token <|im_start|> with the id {config['im_start_token_id']}")
    return tokenizer
