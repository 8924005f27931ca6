"""The settings of a realtime conversation, which are updated part by part, and of single responses in it."""

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, Literal, TypeAlias, TypeVar, cast

from fastapi.exceptions import RequestValidationError
from pydantic import AfterValidator, BeforeValidator, Field, ValidationError, model_validator

from stagemesh.client import GenerateArguments, TurnDetection
from stagemesh.common.errors import InvalidRequestError
from stagemesh.gateway import parameters
from stagemesh.gateway.audio import PCM_RATE_HZ
from stagemesh.gateway.body import Items, Object, StageBody, VoiceId, option_values, voice_id
from stagemesh.gateway.catalog import OPENAI_VOICES, Model
from stagemesh.gateway.errors import validation_error
from stagemesh.gateway.realtime.g711 import G711_RATE_HZ, AudioFormatName
from stagemesh.gateway.realtime.items import ItemBody, ItemReference, RealtimeBody
from stagemesh.gateway.tools import Calls, Function, FunctionName, tool_arguments

_TURNS = "turn_detection"
"""The setting that null switches off. For any other setting, null stands for the default."""
_OBJECTS = frozenset({"audio", "audio.input", "audio.input.turn_detection", "audio.output"})
"""The settings whose parts are checked one by one. An update of `turn_detection` or of another setting replaces it."""
_DB_OF_THRESHOLD = 20.0
"""The level of speech above the noise at a threshold of 1, in dB. OpenAI's default of 0.5 is that of `audio.turns`."""

Modality: TypeAlias = Literal["text", "audio"]


@dataclass(frozen=True)
class Condition:
    """When the value of a setting has an effect, and why another value has none."""

    reason: str
    holds: Callable[[Any, Model], object]
    """Whether a model honors a value."""
    is_ignored: Callable[[Any], object] = lambda _: True
    """Whether another value is ignored with a warning. Otherwise, it is rejected."""


def _has_voice(voice: object, model: Model) -> bool:
    name = str(voice_id(voice))
    known = not model.voices or model.voice_aliases.get(name, name) in model.voices
    return model.option("voice") is not None and known


_CONDITIONS: Mapping[str, Condition] = {
    "model": Condition(
        "the model of a session cannot change; connect again for another one",
        lambda name, model: name == model.id,
        lambda name: str(name).startswith("gpt-"),
    ),
    "output_modalities": Condition(
        "the model has no audio output; use text",
        lambda given, model: model.output("audio") is not None or "audio" not in str(given),
        lambda _: False,
    ),
    "temperature": Condition("no stage of the model chooses tokens", lambda _, model: model.chooses_tokens),
    "truncation": Condition("no item is forgotten; delete old ones", lambda value, _: value == "disabled"),
    "audio.input.turn_detection": Condition(
        "no stage of the model detects turns; send input_audio_buffer.commit and response.create",
        lambda _, model: model.description.detects_turns,
    ),
    "audio.input.turn_detection.type": Condition(
        "turns are detected by silence, as by server_vad", lambda value, _: value == "server_vad"
    ),
    "audio.output.voice": Condition(
        "the model lacks this voice; use null for its default",
        _has_voice,
        lambda voice: str(voice_id(voice)) in OPENAI_VOICES,
    ),
    "audio.output.speed": Condition(
        "no stage has this option", lambda speed, model: speed == 1 or model.option("speed")
    ),
}
"""The conditions by the names of settings."""

B = TypeVar("B", bound=RealtimeBody)


class Update:
    """An update of settings, part by part, and the parts that have no effect."""

    def __init__(self, model: Model, under: str) -> None:
        """`model` must honor the settings. `under` is the name of the changes in errors and warnings."""
        self.model = model
        self._under = under
        self._warnings: Mapping[str, str] = {}
        self._problems = list[Any]()
        """The errors of the parts that are rejected, as pydantic has them."""

    @property
    def error(self) -> InvalidRequestError | None:
        """The error for the parts that are rejected, or None if there are none."""
        rejection = RequestValidationError(self._problems)
        return validation_error(rejection, under=self._under) if self._problems else None

    @property
    def warnings(self) -> dict[str, Any]:
        """The field of an event that names the parts that are ignored. Empty if there are none."""
        found = [{"param": f"{self._under}.{part}", "message": text} for part, text in self._warnings.items()]
        return {"warnings": found} if found else {}

    def apply(self, changes: Object, old: "Settings", *, defaults: "Settings") -> "Settings":
        """Returns the settings after the changes that can take effect. Null stands for the value of `defaults`."""
        with parameters.collected_warnings() as self._warnings:
            return self._apply(changes, old, defaults)

    def _apply(self, changes: Object, old: B, defaults: B, *, within: str = "") -> B:
        """Returns an object of the settings after changes. `within` is its name with a dot at the end."""
        made, fields = old.model_copy(), type(old).model_fields.keys()
        others = {name: value for name, value in changes.items() if name not in fields and value is not None}
        with self._rejecting(within):
            parameters.apply_policy(others, fields, old.decisions, within=within)
        for name in (name for name in changes if name in fields):
            value, part = changes[name], within + name
            # The object that is checked loses its fields that are null.
            check = partial(old.__pydantic_validator__.validate_assignment, old.model_copy(), name, value)
            with self._rejecting(within):
                if value is None and name != _TURNS:
                    setattr(made, name, getattr(defaults, name))
                elif value is not None and not self._has_effect(part, value, check):
                    continue
                elif part in _OBJECTS and isinstance(value, dict):
                    base = (ServerVad(),) * 2 if name == _TURNS else (getattr(old, name), getattr(defaults, name))
                    setattr(made, name, self._apply(cast("Object", value), *base, within=f"{part}."))
                else:
                    setattr(made, name, getattr(check(), name))
        return made

    def _has_effect(self, part: str, value: object, check: Callable[[], object]) -> bool:
        """Returns whether the model honors the value of a setting. Otherwise, warns of the setting or rejects it.

        Raises the ValidationError of `check` if the value is malformed, and not a word that the gateway lacks.
        """
        condition = _CONDITIONS.get(part)
        if condition is None or condition.holds(value, self.model):
            return True
        is_ignored = condition.is_ignored(value)
        if is_ignored:
            try:
                with parameters.collected_warnings():
                    check()
            except ValidationError as exc:
                errors = exc.errors(include_url=False)
                if not all(
                    each["type"] == "literal_error" and isinstance(each["input"], str | dict) for each in errors
                ):
                    raise
        problem = parameters.ignore(part, f"was ignored: {condition.reason}") if is_ignored else condition.reason
        if problem:
            self._problems.append({"loc": tuple(part.split(".")), "msg": problem, "type": "condition"})
        return False

    @contextmanager
    def _rejecting(self, within: str) -> Generator[None]:
        """Rejects the part of an object in which pydantic finds an error within the block."""
        try:
            yield
        except ValidationError as exc:
            errors, path = exc.errors(include_url=False, include_input=False), within.split(".")[:-1]
            self._problems += [{**error, "loc": (*path, *error["loc"])} for error in errors]


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

    rules = parameters.RULES["turn_detection"]

    type: Literal["server_vad"] = "server_vad"
    threshold: Annotated[float | None, Field(ge=0, le=1)] = None
    prefix_padding_ms: Annotated[int | None, Field(ge=0)] = None
    silence_duration_ms: Annotated[int | None, Field(ge=0)] = None
    create_response: bool = True
    interrupt_response: bool = True

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

    rules = parameters.RULES["realtime_input"]

    format: AudioFormat = AudioFormat()
    turn_detection: ServerVad | None = None


class OutputAudio(RealtimeBody):
    """The audio of the model. `speed` and `voice` are options of the pipeline's stages."""

    format: AudioFormat = AudioFormat()
    voice: VoiceId = None
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

    rules = parameters.RULES["realtime"]

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
