"""The voices and languages of a Qwen3-TTS checkpoint, a request's choice among them, and the analysis of a voice to
clone. Importing this module does not import transformers.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from stagemesh.common.errors import InvalidRequestError
from stagemesh.common.wire.tensors import Value
from stagemesh.services.models.codec_speech.description import choose_speaker

if TYPE_CHECKING:
    from stagemesh.services.models.qwen3_tts.voice_encoders import CodecEncoder, SpeakerEncoder

AUTO = "auto"
_CLONING, _NAMED = "base", "custom_voice"
_SMALL = "0b6"
"""The size of the models that, if they have voices by name, do not follow instructions."""


@dataclass(frozen=True)
class VoiceChoice:
    """The options of a request, by which its voice is chosen."""

    speaker: int | None
    """The code of a voice by name, or None if the model has none."""
    language: int | None
    """The code of the language or dialect, or None if the talker chooses the language."""
    instruction: str
    reference_text: str
    whole_text: bool


class Voices:
    """The voices of a checkpoint. `config` is the checkpoint's config."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        talker = config["talker_config"]
        self.clones: bool = config.get("tts_model_type") == _CLONING
        """Whether the model speaks with the voice of a reference audio."""
        self._is_named = config.get("tts_model_type") == _NAMED
        self._follows_instructions = not self.clones and not (self._is_named and config.get("tts_model_size") == _SMALL)
        self._speakers: Mapping[str, int] = talker.get("spk_id") or {}
        dialects: Mapping[str, str | bool] = talker.get("spk_is_dialect") or {}
        self._dialects = {self._speakers[name]: dialect for name, dialect in dialects.items() if name in self._speakers}
        self._languages: Mapping[str, int] = talker.get("codec_language_id") or {}

    def choose(self, options: Mapping[str, Value]) -> VoiceChoice:
        """Returns the choice of a request with these options.

        Raises InvalidRequestError (INVALID_OPTION) if the model does not have the speaker or the language, follows no
        instructions, or clones no voice.
        """
        instruction, reference_text = (str(options[name]).strip() for name in ("instruction", "reference_text"))
        if instruction and not self._follows_instructions:
            raise _invalid("instruction", "the model follows no instructions; omit the option, or choose another model")
        if reference_text and not self.clones:
            raise _invalid("reference_text", "the model clones no voices; omit the option, or choose a base model")
        speaker = self._choose_speaker(str(options["speaker"]))
        language = self._choose_language(str(options["language"]), speaker)
        return VoiceChoice(speaker, language, instruction, reference_text, bool(options["whole_text"]))

    # -- internals

    def _choose_speaker(self, name: str) -> int | None:
        if self._is_named:
            return choose_speaker(self._speakers, name)
        if name:
            instead = "send an audio of the voice" if self.clones else "describe the voice by the option instruction"
            raise _invalid("speaker", f"the model has no voices by name; omit the speaker {name!r}, and {instead}")
        return None

    def _choose_language(self, name: str, speaker: int | None) -> int | None:
        """Returns the code of a language. A speaker of a dialect speaks it instead of Chinese."""
        language = name.lower() or AUTO
        known = [AUTO, *(each for each in self._languages if "dialect" not in each)]
        if language not in known:
            raise _invalid("language", f"the model has no language {name!r}; choose one of: {', '.join(sorted(known))}")
        dialect = self._dialects.get(speaker) if speaker is not None else None
        if isinstance(dialect, str) and language in {AUTO, "chinese"}:
            language = dialect
        return None if language == AUTO else self._languages[language]


def _invalid(option: str, problem: str) -> InvalidRequestError:
    return InvalidRequestError(problem, reason="INVALID_OPTION", metadata={"option": option})


class ReferenceEncoders(NamedTuple):
    """The encoders that convert a reference voice to the inputs of the talker."""

    speaker: "SpeakerEncoder"
    codec: "CodecEncoder"


def load_reference_encoders(model: Path, *, device: str) -> ReferenceEncoders:
    """Loads the speaker encoder and the codec's encoder of the checkpoint folder `model`. Sets torch up for the device.

    Raises NotReadyError (LOAD_FAILED) if the checkpoint is of another model, lacks a speaker encoder, or is incomplete.
    """
    # A model that clones no voices needs no torch.
    from stagemesh.services.engines.torch_setup import choose_device, declare_operators, set_up_torch

    chosen = choose_device(device)
    set_up_torch(chosen)
    # transformers imports torchvision if it is installed.
    declare_operators()
    from stagemesh.services.models.qwen3_tts.voice_encoders import load_codec_encoder, load_speaker_encoder

    return ReferenceEncoders(load_speaker_encoder(model, device=chosen), load_codec_encoder(model, device=chosen))
