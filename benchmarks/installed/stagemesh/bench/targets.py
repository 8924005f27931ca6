"""The servers that receive a load, and the mix of requests to send."""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, Protocol, Self

import msgspec

from stagemesh.bench.measurements import Failure, Measurement
from stagemesh.client import AsyncClient, AudioChunk, Finished, GenerateArguments, RetryPolicy, Text, Tokens
from stagemesh.common.errors import (
    InvalidRequestError,
    NotFoundError,
    PermissionDeniedError,
    StagemeshError,
    UnauthenticatedError,
    UnsupportedError,
)
from stagemesh.v1.signature_pb2 import TENSOR_KIND_TEXT


class ChatMessage(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A message of a conversation. `role` is for example "user"."""

    role: str
    content: str


class MixedRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A line of a requests file: a request and its share of the load. Exactly one of prompt and messages is set."""

    prompt: str | None = None
    messages: tuple[ChatMessage, ...] = ()
    weight: float = 1.0
    """The share of the load, relative to the weights of the other requests."""
    max_tokens: int | None = None
    """The maximum number of tokens, or None for that of the command line."""
    outputs: tuple[str, ...] = ()
    """The outputs of the pipeline, or the modalities of a chat completion. Empty for those of the command line."""
    options: Mapping[str, str | int | float | bool] = {}
    """Options of the pipeline's stages, or fields of the HTTP body, in addition to those of the command line."""

    def __post_init__(self) -> None:
        if (self.prompt is None) == (not self.messages):
            raise ValueError("give either prompt or messages")
        if not self.weight > 0:
            raise ValueError(f"weight is {self.weight:g}; it must be greater than 0")
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ValueError(f"max_tokens is {self.max_tokens}; it must be at least 1")


def read_requests(path: Path) -> list[MixedRequest]:
    """Returns the requests in a JSONL file. Empty lines are skipped.

    Raises InvalidRequestError if the file cannot be read, has no request, or if a line is invalid. The message names
    the line and the field.
    """
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as exc:
        raise InvalidRequestError(f"--requests-file: cannot read {path}: {exc}") from exc
    requests = [_read_line(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()]
    if not requests:
        raise InvalidRequestError(
            f'--requests-file: {path} has no requests; add lines such as {{"prompt": "Tell me a story."}}'
        )
    return requests


def _read_line(line: str, place: str) -> MixedRequest:
    try:
        return msgspec.json.decode(line, type=MixedRequest)
    except msgspec.DecodeError as exc:
        raise InvalidRequestError(f"--requests-file: {place}: {exc}") from exc


def draw_requests(requests: Sequence[MixedRequest], *, seed: int) -> Iterator[MixedRequest]:
    """Yields requests without end, at random by their weights. The same seed yields the same order."""
    generator = random.Random(seed)
    weights = [request.weight for request in requests]
    while True:
        yield from generator.choices(requests, weights, k=1)


Clock = Callable[[], float]
"""Returns the time on the clock of the measurements, in seconds."""

# A rejected request is not repeated. A call that no server has received is: when many calls begin at once, a new
# connection refuses those that gRPC sends on it before it knows how many calls the server permits.
_RETRY_POLICY = RetryPolicy(attempts=1, first_pause_s=0.005, reach_s=1.0)
_FINAL = (InvalidRequestError, NotFoundError, PermissionDeniedError, UnauthenticatedError, UnsupportedError)


class Target(AbstractAsyncContextManager["Target"], Protocol):
    """A server that is measured. The context manager closes its connections."""

    async def check(self) -> None:
        """Checks that the server can be reached and has the model. Raises a StagemeshError otherwise."""

    async def send(self, request: MixedRequest, measurement: Measurement, *, seed: int, clock: Clock) -> Failure | None:
        """Sends a request, and records its outputs in `measurement` until it ends.

        `seed` is the random seed of the request. Returns the failure of the request, or None if it succeeded.
        """
        ...


class PipelineTarget:
    """A pipeline behind orchestrators, called by gRPC. Rejected and failed requests are not repeated."""

    def __init__(self, endpoints: Sequence[str], arguments: GenerateArguments, *, timeout_s: float) -> None:
        """Connects to the orchestrators.

        - `arguments` are the arguments of all requests.
        - `timeout_s` is the time limit of each request in seconds.
        """
        self._client = AsyncClient(*endpoints, retry_policy=_RETRY_POLICY)
        self._arguments, self._timeout_s = arguments, timeout_s
        self._text_stages: frozenset[str] = frozenset()
        """The stages of the outputs of text, whose tokens count."""

    async def check(self) -> None:
        description = await self._client.describe()
        self._text_stages = frozenset(each.stage for each in description.outputs if each.kind == TENSOR_KIND_TEXT)

    async def send(self, request: MixedRequest, measurement: Measurement, *, seed: int, clock: Clock) -> Failure | None:
        arguments: Any = {**self._arguments, **_own_arguments(request, self._arguments), "seed": seed}
        try:
            async for event in self._client.generate(request.prompt, timeout_s=self._timeout_s, **arguments):
                match event:
                    case Text() | Tokens():
                        measurement.add_text(clock())
                    case AudioChunk():
                        measurement.add_audio(clock(), duration_s=event.duration_s)
                    case Finished():
                        measurement.output_tokens = self._tokens(event)
                    case _:
                        pass
        except StagemeshError as exc:
            return Failure(exc.reason, exc.message, isinstance(exc, _FINAL))
        return None

    def _tokens(self, finished: Finished) -> int:
        usage = finished.usage
        stages = usage.keys() & self._text_stages or usage.keys()
        return sum(usage[stage].output_tokens for stage in stages)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.close()


def _own_arguments(request: MixedRequest, shared: GenerateArguments) -> Mapping[str, object]:
    """Returns the arguments of the client in which a request differs from the others."""
    own: dict[str, object] = {}
    if request.messages:
        own["messages"] = [(message.role, message.content) for message in request.messages]
    if request.max_tokens is not None:
        own["max_tokens"] = request.max_tokens
    if request.outputs:
        own["outputs"] = request.outputs
    if request.options:
        own["options"] = {**shared.get("options", {}), **request.options}
    return own
