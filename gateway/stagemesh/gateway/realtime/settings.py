"""The settings of a realtime conversation, and of single responses in it."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeAlias, cast

from pydantic import Field

from stagemesh.client import GenerateArguments, TurnDetection
from stagemesh.gateway.body import Body, Function, Items, Object, StageBody, option_values
from stagemesh.gateway.catalog import Model
from stagemesh.gateway.errors import ParameterError
from stagemesh.gateway.realtime.items import ItemBody, ItemReference
from stagemesh.gateway.tool_calls import call_schema

_MERGED = frozenset({"audio", "input", "output"})
"""The settings whose parts are updated one by one. An update of any other setting replaces it."""
_DB_OF_THRESHOLD = 20.0
"""The level of speech above the noise at a threshold of 1, in dB. OpenAI's default of 0.5 is that of `audio.turns`."""

Modality: TypeAlias = Literal["text", "audio"]
MaxTokens: TypeAlias = Annotated[int, Field(ge=1)] | Literal["inf"]


class PcmFormat(Body):
    """Signed 16-bit samples of one channel, little-endian."""

    type: Literal["audio/pcm"] = "audio/pcm"
    rate: Literal[24_000] = 24_000


class ServerVad(Body):
    """The detection of turns by a stage of the pipeline."""

    type: Literal["server_vad"]
    threshold: Annotated[float | None, Field(ge=0, le=1)] = None
    prefix_padding_ms: Annotated[int | None, Field(ge=0)] = None
    silence_duration_ms: Annotated[int | None, Field(ge=0)] = None
    create_response: bool = True
    interrupt_response: bool = True
    idle_timeout_ms: None = None

    def to_detection(self) -> TurnDetection:
        """Returns the options of a session that detects turns."""
        options = {
            "threshold_db": None if self.threshold is None else max(3.0, _DB_OF_THRESHOLD * self.threshold),
            "padding_ms": self.prefix_padding_ms,
            "silence_ms": self.silence_duration_ms,
        }
        return {"detects_only": True, "options": {name: value for name, value in options.items() if value is not None}}


class InputAudio(Body):
    """The audio of the user."""

    format: PcmFormat = PcmFormat()
    turn_detection: ServerVad | None = None
    transcription: None = None
    noise_reduction: None = None


class ResponseOutputAudio(Body):
    """The audio of one response."""

    format: PcmFormat = PcmFormat()
    voice: str | None = None


class OutputAudio(ResponseOutputAudio):
    """The audio of the model. `speed` and `voice` are options of the pipeline's stages."""

    speed: float | None = None


class Audio(Body):
    """The audio of both sides."""

    input: InputAudio = InputAudio()
    output: OutputAudio = OutputAudio()


class FunctionTool(Function):
    """A function that the model may call."""

    type: Literal["function"]


class NamedFunction(Body):
    """The function that the model must call."""

    type: Literal["function"]
    name: str


ToolChoice: TypeAlias = Literal["auto", "none", "required"] | NamedFunction


class CommonSettings(Body):
    """The settings that conversations and single responses have in common."""

    instructions: str | None = None
    tools: Items[FunctionTool] | None = None
    parallel_tool_calls: Literal[True] | None = None
    prompt: None = None
    reasoning: None = None


class Settings(CommonSettings, StageBody):
    """The settings of a conversation. A setting that can only be null has no effect here."""

    type: Literal["realtime"] = "realtime"
    output_modalities: Annotated[list[Modality], Field(min_length=1, max_length=1)]
    max_output_tokens: MaxTokens | None = "inf"
    tool_choice: ToolChoice | None = "auto"
    audio: Audio = Audio()
    truncation: Literal["disabled"] | None = "disabled"
    include: None = None
    tracing: None = None

    @property
    def speaks(self) -> bool:
        """Whether responses are spoken."""
        return self.output_modalities == ["audio"]

    @property
    def callable_tools(self) -> Sequence[FunctionTool]:
        """The tools that the model may call."""
        return () if self.tools is None or self.tool_choice == "none" else self.tools

    @property
    def forced_tools(self) -> Sequence[FunctionTool]:
        """The tools from which the model must choose one to call. Empty if it may answer without a call.

        Raises ParameterError if a call is forced and no tool can be called.
        """
        if not isinstance(self.tool_choice, NamedFunction) and self.tool_choice != "required":
            return ()
        wanted = None if self.tool_choice == "required" else self.tool_choice.name
        found = [each for each in self.tools or () if wanted in {None, each.name}]
        if not found:
            missing = "it needs tools" if wanted is None else f"no tool has the name {wanted!r}"
            raise ParameterError("session.tool_choice", missing)
        return found

    def updated(self, changes: Mapping[str, Any]) -> "Settings":
        """Returns the settings with some of them changed. Raises ValidationError, or ParameterError for the model."""
        changed = Settings.model_validate(_merge(self.model_dump(), changes))
        if changed.model != self.model:
            raise ParameterError("session.model", f"it is {self.model!r}; connect again for another model")
        return changed

    def arguments(self, model: Model) -> GenerateArguments:
        """Returns the arguments of the client for a response, without its messages.

        Raises ParameterError if the model lacks an output or an option.
        """
        arguments = self.stage_arguments(model)
        arguments["outputs"] = [model.require_output("text", param="session.output_modalities")]
        if self.speaks:
            audio = model.require_output("audio", param="session.output_modalities")
            arguments["outputs"] = [*arguments["outputs"], audio]
            own = option_values(model, self.audio.output, "voice", "speed", within="session.audio.output.")
            arguments["options"] = {**self.options, **own}
        if self.callable_tools:
            arguments["tools"] = [each.to_tool() for each in self.callable_tools]
        if forced := self.forced_tools:
            arguments["json_schema"] = call_schema({each.name: each.parameters for each in forced})
        if isinstance(self.max_output_tokens, int):
            arguments["max_tokens"] = self.max_output_tokens
        return arguments


class ResponseAudio(Body):
    """The audio of one response."""

    output: ResponseOutputAudio = ResponseOutputAudio()


class ResponseBody(CommonSettings):
    """The settings of one response, which replace those of the conversation."""

    output_modalities: Annotated[list[Modality] | None, Field(min_length=1, max_length=1)] = None
    max_output_tokens: MaxTokens | None = None
    tool_choice: ToolChoice | None = None
    audio: ResponseAudio | None = None
    conversation: Literal["auto", "none"] = "auto"
    input: Items[ItemBody | ItemReference] | None = None
    metadata: dict[str, str] | None = None

    def settings(self, of_conversation: Settings) -> Settings:
        """Returns the settings of the response."""
        names = ("instructions", "output_modalities", "max_output_tokens", "tools", "tool_choice")
        given = {name: value for name in names if (value := getattr(self, name)) is not None}
        if self.audio is not None and self.audio.output.voice is not None:
            output = of_conversation.audio.output.model_copy(update={"voice": self.audio.output.voice})
            given["audio"] = of_conversation.audio.model_copy(update={"output": output})
        return of_conversation.model_copy(update=given)


def _merge(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(old)
    for name, value in new.items():
        is_merged = name in _MERGED and isinstance(value, dict) and isinstance(old.get(name), dict)
        merged[name] = _merge(old[name], cast("Object", value)) if is_merged else value
    return merged
