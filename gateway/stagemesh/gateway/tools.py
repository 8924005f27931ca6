"""The functions that a model may call, and the calls that it must make."""

from collections.abc import Sequence
from typing import Literal, TypeAlias

from stagemesh.client import GenerateArguments, Tool, ToolChoice
from stagemesh.gateway.body import Body, Object
from stagemesh.gateway.errors import ParameterError

Calls: TypeAlias = Literal["auto", "none", "required"]
"""Whether the model may, must not or must call a function."""


class Function(Body):
    """A function that the model may call."""

    name: str
    description: str = ""
    parameters: Object | None = None
    strict: bool = False


class FunctionName(Body):
    """The name of a function."""

    name: str


def tool_arguments(
    tools: Sequence[Function], choice: Calls | FunctionName | None, *, parallel: bool | None, within: str = ""
) -> GenerateArguments:
    """Returns the arguments of the client for functions. Empty if the model may call none.

    - `choice` is the function that the model must call, or whether it calls any.
    - `parallel` is False if the answer has at most one call.
    - `within` precedes the names of the parameters in errors.

    Raises ParameterError if the model must call a function that does not exist.
    """
    name = choice.name if isinstance(choice, FunctionName) else ""
    required = choice == "required" or isinstance(choice, FunctionName)
    if name and all(tool.name != name for tool in tools):
        raise ParameterError(f"{within}tool_choice", f"no tool has the name {name[:100]!r}; use one of `tools`")
    if required and not tools:
        raise ParameterError(f"{within}tools", 'tool_choice "required" needs tools')
    if not tools or choice == "none":
        return {}
    found = [Tool(tool.name, tool.description, tool.parameters or "", strict=tool.strict) for tool in tools]
    return {"tools": found, "tool_choice": ToolChoice(required=required, name=name, single=parallel is False)}
