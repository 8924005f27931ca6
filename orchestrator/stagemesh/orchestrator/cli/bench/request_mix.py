"""The requests of a load: their prompts, their shares of the load, and the order in which they are sent."""

import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from stagemesh.common.errors import InvalidRequestError


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
    generator = random.Random(seed)  # noqa: S311 - a reproducible order, not secrets
    weights = [request.weight for request in requests]
    while True:
        yield from generator.choices(requests, weights, k=1)
