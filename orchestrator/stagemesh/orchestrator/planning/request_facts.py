"""What conditions ask of a request."""

from collections.abc import Iterator, Mapping

from stagemesh.orchestrator.request.validation import ValidRequest
from stagemesh.orchestrator.spec.conditions import Fact, Facts, InputKind
from stagemesh.v1 import request_pb2

_KINDS: Mapping[str, InputKind] = {
    "text": "text",
    "image": "image",
    "audio": "audio",
    "audio_file": "audio",
    "video_file": "video",
}


def facts_of(request: ValidRequest) -> Facts:
    """The options that a request sets, what its input holds, and the outputs that it wants."""
    return {
        **{Fact("option", name): value for name, value in request.parameters.options.items()},
        **{Fact("input", kind): 1.0 for kind in _input_kinds(request.input)},
        **{Fact("output", name): 1.0 for name in request.outputs},
    }


def _input_kinds(given: request_pb2.Input) -> Iterator[InputKind]:
    if given.text:
        yield "text"
    if given.token_ids.ids:
        yield "tokens"
    if given.tensors:
        yield "tensors"
    for message in given.conversation.messages:
        if message.content:
            yield "text"
        for part in message.parts:
            content = part.WhichOneof("content")
            if content is not None:
                yield _KINDS[content]
