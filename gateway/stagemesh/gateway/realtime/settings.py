"""The settings of a realtime conversation, which are updated part by part, and of single responses in it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeAlias, cast

from fastapi.exceptions import RequestValidationError
from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, model_validator

from stagemesh.client import GenerateArguments, TurnDetection
from stagemesh.common.errors import InvalidRequestError
from stagemesh.gateway.audio import PCM_RATE_HZ
from stagemesh.gateway.body import Items, Object, StageBody, option_values
from stagemesh.gateway.catalog import OPENAI_VOICES, Model
from stagemesh.gateway.errors import validation_error
from stagemesh.gateway.realtime.g711 import G711_RATE_HZ, AudioFormatName
from stagemesh.gateway.realtime.items import ItemBody, ItemReference, RealtimeBody
from stagemesh.gateway.tools import Calls, Function, FunctionName, tool_arguments

_ECHOED = frozenset({"id", "object", "expires_at"})
"""The fields of a session that clients send back, and that are not settings."""
_MERGED = frozenset({"audio", "input", "output"})
"""The settings whose parts are updated one by one. An update of any other setting replaces it."""
_CHECKED = frozenset({"audio", "audio.input", "audio.input.turn_detection", "audio.output"})
"""The objects whose parts have rules."""
_TURNS = "turn_detection"
"""The setting that null switches off. For any other setting, null stands for the default."""
_DB_OF_THRESHOLD = 20.0
"""The level of speech above the noise at a threshold of 1, in dB. OpenAI's default of 0.5 is that of `audio.turns`."""

Modality: TypeAlias = Literal["text", "audio"]


@dataclass(frozen=True)
class Rule:
    """When the value of a setting has no effect, and why."""

    reason: str
    honors: Callable[[Any, Model], object] = lambda _, __: False
    """Whether a model honors a value. By default, no model honors any."""
    is_ignored: Callable[[Any], object] = lambda _: True
    """Whether another value is ignored with a warning. Otherwise, it is rejected."""


def _has_voice(voice: Any, model: Model) -> bool:
    return model.option("voice") is not None and (not model.voices or voice in model.voices)


_SILENCE = Rule("turns are detected by silence, as by server_vad", lambda value, _: value == "server_vad")
_NO_TURNS = "no stage of the model detects turns; send input_audio_buffer.commit and response.create"
_NO_TRANSCRIPTS = "no stage transcribes the user's audio"
_RULES: Mapping[str, Rule] = {
    "model": Rule(
        "the model of a session cannot change; connect again for another one",
        lambda name, model: name == model.id,
        lambda name: str(name).startswith("gpt-"),
    ),
    "output_modalities": Rule(
        "the model has no audio output; use text",
        lambda given, model: model.output("audio") is not None or "audio" not in str(given),
        lambda _: False,
    ),
    "temperature": Rule("no stage of the model chooses tokens", lambda _, model: model.chooses_tokens),
    "truncation": Rule("no item is forgotten; delete old ones", lambda value, _: value == "disabled"),
    "include": Rule(_NO_TRANSCRIPTS),
    "tracing": Rule("the conversation has no trace"),
    "reasoning": Rule("the model chooses its effort"),
    "audio.input.transcription": Rule(_NO_TRANSCRIPTS),
    "audio.input.noise_reduction": Rule("no stage reduces the noise of the user's audio"),
    "audio.input.turn_detection": Rule(_NO_TURNS, lambda _, model: model.description.detects_turns),
    "audio.input.turn_detection.type": _SILENCE,
    "audio.input.turn_detection.eagerness": _SILENCE,
    "audio.input.turn_detection.idle_timeout_ms": Rule("silence starts no response"),
    "audio.output.voice": Rule(
        "the model lacks this voice; use null for its default", _has_voice, lambda name: name in OPENAI_VOICES
    ),
    "audio.output.speed": Rule("no stage has this option", lambda speed, model: speed == 1 or model.option("speed")),
}
"""The rules by the names of settings."""


@dataclass
class Update:
    """An update of settings: the model that must honor them, and the parts that have no effect."""

    model: Model
    strict: bool = False
    """Whether parts that would be ignored are rejected."""
    warnings: dict[str, str] = field(default_factory=dict[str, str])
    """The reasons for which parts are ignored, by their names."""
    problems: list[Any] = field(default_factory=list[Any])
    """The errors of the parts that are rejected, as pydantic has them."""

    def error(self, under: str) -> InvalidRequestError:
        """Returns the error for the parts that are rejected. `under` is the name of their object."""
        return validation_error(RequestValidationError(self.problems), under=under)

    def apply_rules(self, given: Object, *, within: str = "") -> dict[str, Any]:
        """Returns the parts of `given`, an object within the settings, that the model honors. Adds the others."""
        kept = dict[str, Any]()
        for name, value in given.items():
            part, rule = within + name, _RULES.get(within + name)
            if rule is None or value is None or rule.honors(value, self.model):
                is_checked = part in _CHECKED and isinstance(value, dict)
                kept[name] = self.apply_rules(cast("Object", value), within=f"{part}.") if is_checked else value
            elif rule.is_ignored(value) and not self.strict:
                self.warnings[part] = rule.reason
            else:
                self.problems.append({"loc": tuple(part.split(".")), "msg": rule.reason, "type": "rule"})
        return kept


class AudioFormat(RealtimeBody):
    """The format of audio with one channel: signed 16-bit samples, little-endian, or G.711 of telephones."""

    type: AudioFormatName = "audio/pcm"
    rate: int = 0

    @model_validator(mode="after")
    def _check_rate(self) -> "AudioFormat":
        rate_hz = PCM_RATE_HZ if self.type == "audio/pcm" else G711_RATE_HZ
        if self.rate not in {0, rate_hz}:
            raise ValueError(f"the rate of {self.type} is {rate_hz:,}")
        self.rate = rate_hz
        return self


class ServerVad(RealtimeBody):
    """The detection of turns by a stage of the pipeline."""

    type: Literal["server_vad"] = "server_vad"
    threshold: Annotated[float | None, Field(ge=0, le=1)] = None
    prefix_padding_ms: Annotated[int | None, Field(ge=0)] = None
    silence_duration_ms: Annotated[int | None, Field(ge=0)] = None
    create_response: bool = True
    interrupt_response: bool = True
    eagerness: None = None
    idle_timeout_ms: None = None

    def to_detection(self) -> TurnDetection:
        """Returns the options of a session that detects turns."""
        options = {
            "threshold_db": None if self.threshold is None else max(3.0, _DB_OF_THRESHOLD * self.threshold),
            "padding_ms": self.prefix_padding_ms,
            "silence_ms": self.silence_duration_ms,
        }
        return {"detects_only": True, "options": {name: value for name, value in options.items() if value is not None}}


class InputAudio(RealtimeBody):
    """The audio of the user."""

    format: AudioFormat = AudioFormat()
    turn_detection: ServerVad | None = None
    transcription: None = None
    noise_reduction: None = None


class OutputAudio(RealtimeBody):
    """The audio of the model. `speed` and `voice` are options of the pipeline's stages."""

    format: AudioFormat = AudioFormat()
    voice: str | None = None
    speed: float | None = None


class Audio(RealtimeBody):
    """The audio of both sides."""

    input: InputAudio = InputAudio()
    output: OutputAudio = OutputAudio()


class FunctionTool(RealtimeBody, Function):
    """A function that the model may call."""

    type: Literal["function"] = "function"


class NamedFunction(RealtimeBody, FunctionName):
    """The function that the model must call."""

    type: Literal["function"]


def _unnested(given: object) -> object:
    """Returns a function of a chat, which is an object with a `function`, as the realtime API has it."""
    if not isinstance(given, dict):
        return given
    fields = cast("dict[str, object]", given)
    function = fields.get("function")
    return {"type": fields.get("type"), **cast("Object", function)} if isinstance(function, dict) else fields


_ToolChoice: TypeAlias = Calls | Annotated[NamedFunction, BeforeValidator(_unnested)]


class Settings(RealtimeBody, StageBody):
    """The settings of a conversation, or of a response."""

    type: Literal["realtime"] = "realtime"
    output_modalities: Annotated[
        list[Modality],
        Field(min_length=1, max_length=2),
        # The text of a spoken response is its transcript.
        AfterValidator(lambda given: ["audio"] if "audio" in given else given),
    ]
    instructions: str | None = None
    tools: Items[Annotated[FunctionTool, BeforeValidator(_unnested)]] | None = None
    tool_choice: _ToolChoice | None = "auto"
    parallel_tool_calls: bool | None = None
    """False if a response has at most one tool call."""
    max_output_tokens: Annotated[int, Field(ge=1)] | Literal["inf"] | None = "inf"
    temperature: Annotated[float | None, Field(ge=0)] = None
    audio: Audio = Audio()
    truncation: Literal["disabled"] | None = "disabled"
    include: None = None
    tracing: None = None
    reasoning: None = None
    prompt: None = None

    @property
    def speaks(self) -> bool:
        """Whether responses are spoken."""
        return self.output_modalities == ["audio"]

    @classmethod
    def initial(cls, model: Model) -> "Settings":
        """Returns the settings with which a conversation begins: spoken, and with detected turns, if possible."""
        vad = ServerVad() if model.description.detects_turns else None
        modality: Modality = "text" if model.output("audio") is None else "audio"
        return cls(model=model.id, output_modalities=[modality], audio=Audio(input=InputAudio(turn_detection=vad)))

    def updated(self, changes: Object, update: Update, *, defaults: "Settings", under: str) -> "Settings":
        """Returns the settings after the parts of `changes` that can take effect. Adds the other parts to `update`.

        `defaults` are the settings for which null stands. `under` is the name of the changes in errors. Raises
        InvalidRequestError if the changes have too many parts.
        """
        given = update.apply_rules({name: value for name, value in changes.items() if name not in _ECHOED})
        old, nulls = self.model_dump(), defaults.model_dump()
        try:
            return Settings.model_validate(_merge(old, given, nulls))
        except ValidationError as exc:
            errors = exc.errors(include_url=False, include_input=False)
        update.problems += errors
        for error in errors:
            _remove(given, error["loc"])
        try:
            return Settings.model_validate(_merge(old, given, nulls))
        except ValidationError:
            raise update.error(under) from None

    def arguments(self, model: Model) -> GenerateArguments:
        """Returns the arguments of the client for a response, without its messages.

        Raises ParameterError if a call is forced and no tool can be called.
        """
        arguments = self.stage_arguments(model)
        arguments["outputs"] = [model.require_output("text", param="session.output_modalities")]
        if self.speaks:
            audio = model.require_output("audio", param="session.output_modalities")
            arguments["outputs"] = [*arguments["outputs"], audio]
            names = (name for name in ("voice", "speed") if model.option(name) is not None)
            own = option_values(model, self.audio.output, *names, within="session.audio.output.")
            arguments["options"] = {**self.options, **own}
        parallel = self.parallel_tool_calls
        arguments |= tool_arguments(self.tools or (), self.tool_choice, parallel=parallel, within="session.")
        arguments["parsed"] = True
        if isinstance(self.max_output_tokens, int):
            arguments["max_tokens"] = self.max_output_tokens
        if self.temperature is not None and model.chooses_tokens:
            arguments["temperature"] = self.temperature
        return arguments


class ResponseBody(RealtimeBody):
    """The parameters of a response in addition to its settings, which replace the settings of the conversation."""

    conversation: Literal["auto", "none"] = "auto"
    input: Items[ItemBody | ItemReference] | None = None
    metadata: dict[str, str] | None = None


def _merge(old: Mapping[str, Any], new: Mapping[str, Any], nulls: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the old values, replaced by the new ones. `nulls` are the values for which null stands."""
    merged = dict(old)
    for name, value in new.items():
        if value is None and name != _TURNS:
            merged |= {name: nulls[name]} if name in nulls else {}
        elif name in _MERGED and isinstance(value, dict) and isinstance(old.get(name), dict):
            merged[name] = _merge(old[name], cast("Object", value), nulls[name])
        else:
            merged[name] = value
    return merged


def _remove(changes: dict[str, Any], location: Sequence[int | str]) -> None:
    """Removes the part that contains a location, at which pydantic has found an error."""
    for depth, name in enumerate(map(str, location), start=1):
        value = changes.get(name)
        if name not in _MERGED or not isinstance(value, dict) or depth == len(location):
            changes.pop(name, None)
            return
        changes = cast("dict[str, Any]", value)
