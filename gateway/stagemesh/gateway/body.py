"""The parameters that several endpoints accept in the bodies of their requests, and the rejection of all others."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, TypeAlias, cast

from pydantic import BaseModel, ConfigDict, Field

from stagemesh.client import GenerateArguments, OptionValue, StageArguments
from stagemesh.gateway.catalog import Model
from stagemesh.gateway.errors import ParameterError

_SAMPLING = (
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    *("stop", "stop_token_ids", "min_tokens", "ignore_eos", "bad_words"),
)
"""The parameters that have the same name and meaning in the client."""
MAX_SEED = (1 << 63) - 1

Object: TypeAlias = Mapping[str, Any]


class Body(BaseModel):
    """The body of a request. A parameter that it does not name is an error, because it would have no effect."""

    model_config = ConfigDict(extra="forbid")


class StreamOptions(Body):
    """The options of a stream."""

    include_usage: bool = False
    include_obfuscation: Literal[False] = False


class StageBody(Body):
    """The parameters of every endpoint that generates: those of OpenAI's API, and those of Stagemesh."""

    model: str
    user: str | None = None
    seed: Annotated[int | None, Field(ge=0, le=MAX_SEED)] = None
    options: dict[str, OptionValue] = {}
    """The values of options that the stages declare, by name."""
    stages: dict[str, dict[str, Any]] = {}
    """The parameters of single stages, by name."""
    priority: Annotated[int, Field(ge=-10, le=10)] = 0

    def stage_arguments(self, model: Model) -> GenerateArguments:
        """Returns the arguments of the client for these parameters."""
        arguments: GenerateArguments = {
            "pipeline": model.description.pipeline,
            "adapter": model.adapter,
            "seed": self.seed,
            "options": dict(self.options),
            # The client checks their names and types.
            "stages": cast("Mapping[str, StageArguments]", self.stages),
            "priority": self.priority,
        }
        if self.user:
            arguments["caller"] = self.user
        return arguments


class SamplingBody(StageBody):
    """The parameters by which language models choose tokens: OpenAI's, and those that vLLM has in addition."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] = []
    min_tokens: int | None = None
    ignore_eos: bool = False
    bad_words: list[str] = []
    n: Annotated[int | None, Field(ge=1)] = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @property
    def includes_usage(self) -> bool:
        """Whether a stream ends with the usage."""
        return self.stream_options is not None and self.stream_options.include_usage

    def sampling_arguments(self, model: Model, *, max_tokens: int | None) -> GenerateArguments:
        """Returns the arguments of the client for these parameters.

        Omits those that are not given, because a pipeline without a language model accepts none.
        """
        if self.stream_options is not None and not self.stream:
            raise ParameterError("stream_options", "it needs stream: true")
        arguments = self.stage_arguments(model)
        given = {name: getattr(self, name) for name in _SAMPLING if name in self.model_fields_set}
        if max_tokens is not None:
            given["max_tokens"] = max_tokens
        if isinstance(self.stop, str):
            given["stop"] = [self.stop]
        arguments |= cast("GenerateArguments", {name: value for name, value in given.items() if value is not None})
        if self.n is not None:
            arguments["choices"] = self.n
        return arguments
