"""The models that stock clients call: three pipelines, and a script that does what it is asked."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

from anyio.from_thread import start_blocking_portal

from stagemesh.tiny_models import qwen3_omni
from stagemesh.v1.orchestrator_pb2 import GenerateRequest, GenerateResponse
from stagemesh.v1.request_pb2 import ROLE_TOOL, ROLE_USER, Message, ToolCallDelta
from stagemesh.v1.signature_pb2 import Signature
from tests.client.scripted import Script, ScriptedOrchestrator, admitted, ended, finished, message, served, text
from tests.deployment import deployed
from tests.gateway.making import describe
from tests.models.qwen3_omni.deployment import with_torchvision
from tests.repository.commands import ROOT


class Obedient(ScriptedOrchestrator):
    """A model that calls the tools it is offered, fills the schema it is given, and otherwise says hello.

    A user's text may contain REASON, for reasoning before the answer, and ARGS with the arguments of the call as JSON.
    """

    def script_of(self, request: GenerateRequest) -> Script:
        return [admitted(), *_parts(request), ended(), finished()]


def _parts(request: GenerateRequest) -> Iterator[GenerateResponse]:
    conversation, schema = request.input.conversation, request.parameters.sampling.json_schema
    last = conversation.messages[-1] if conversation.messages else Message(role=ROLE_USER)
    said = last.content or " ".join(part.text for part in last.parts)
    if "REASON" in said:
        yield message(reasoning="Let me ")
        yield message(reasoning="think.")
    if schema:
        yield from _pieces(json.dumps(_example(json.loads(schema))))
    elif last.role == ROLE_TOOL:
        yield from _pieces("It is noon.")
    elif conversation.tools:
        chosen = conversation.tool_choice.name
        tool = next(each for each in conversation.tools if chosen in {"", each.name})
        example = _example(json.loads(tool.parameters or "{}"))
        arguments = said.partition("ARGS ")[2] or json.dumps(example)
        call_id = f"call_{sum(len(each.tool_calls) for each in conversation.messages)}"
        yield message(tool_call=ToolCallDelta(id=call_id, name=tool.name, arguments=arguments[:4]))
        yield message(tool_call=ToolCallDelta(id=call_id, arguments=arguments[4:]))
    else:
        yield from _pieces("Hello there.")


def _pieces(whole: str) -> Iterator[GenerateResponse]:
    for start in range(0, len(whole), 6):
        yield text(whole[start : start + 6])


def _example(schema: Mapping[str, Any], definitions: Mapping[str, Any] | None = None) -> Any:
    """Returns a value that is valid by a JSON schema of the kind that clients generate."""
    definitions = definitions or schema.get("$defs", {})
    if "$ref" in schema:
        return _example(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    for several in ("anyOf", "oneOf", "allOf"):
        if several in schema:
            return _example(schema[several][0], definitions)
    if "enum" in schema or "const" in schema:
        return schema.get("const", schema.get("enum", [None])[0])
    kind = schema.get("type", "object" if "properties" in schema else "string")
    if kind == "object":
        return {name: _example(each, definitions) for name, each in schema.get("properties", {}).items()}
    if kind == "array":
        return [_example(schema.get("items", {}), definitions)]
    examples = {"integer": 1, "number": 1.5, "boolean": True, "null": None}
    return examples.get(kind if isinstance(kind, str) else kind[0], "noon")


@contextmanager
def _scripted(_folder: Path) -> Iterator[str]:
    model = Obedient()
    describe(model, "text", pipeline="scripted", signature=Signature(sampling=True, media=True))
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(served(model)):
        yield model.endpoint


@contextmanager
def _omni(folder: Path) -> Iterator[str]:
    weights, file = folder / "weights", folder / "omni.yaml"
    qwen3_omni.write(weights)
    pipeline = (
        (ROOT / "examples/qwen3-omni/tiny.yaml").read_text().replace("${STAGEMESH_OMNI:-tiny-omni}", str(weights))
    )
    file.write_text(pipeline.replace("pipeline: qwen3-omni", "pipeline: omni"))
    with ExitStack() as running:
        with with_torchvision():
            up = running.enter_context(deployed(file, ready_s=300))
        yield up.endpoint


@contextmanager
def _built_in(pipeline: str) -> Iterator[str]:
    with deployed(pipeline) as up:
        yield up.endpoint


_STARTS: Mapping[str, Callable[[Path], AbstractContextManager[str]]] = {
    "scripted": _scripted,
    "omni": _omni,
    "speech": lambda _: _built_in("speech"),
    "digits": lambda _: _built_in("examples/digits/pipeline.yaml"),
}


class Models:
    """Starts each model when it is first needed, and stops all of them at the end."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._folder, self._stack = folder, stack
        self._endpoints = dict[str, str]()

    def endpoint_of(self, name: str) -> str:
        """Returns the address of the orchestrator of a model, "host:port"."""
        if name not in self._endpoints:
            folder = self._folder / name
            folder.mkdir()
            self._endpoints[name] = self._stack.enter_context(_STARTS[name](folder))
        return self._endpoints[name]
