"""The parameters of the requests to a server with OpenAI's API."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum


class Endpoint(StrEnum):
    """The endpoint that receives the requests."""

    CHAT = "chat"
    """Chat completions, streamed as events."""
    SPEECH = "speech"
    """Speech, streamed as PCM."""


@dataclass(frozen=True)
class HttpSettings:
    """The parameters of all requests to a server with OpenAI's API."""

    url: str
    """The URL of the server, with or without the final /v1."""
    model: str
    endpoint: Endpoint
    modalities: tuple[str, ...]
    """The modalities of chat completions: "text", or "text" and "audio"."""
    sample_rate_hz: int
    """The number of samples per second of PCM, which has no header that states it."""
    timeout_s: float
    """The time limit of each request in seconds."""
    api_key: str = ""
    """The key that is sent as a bearer token. Empty for none."""
    max_tokens: int | None = None
    temperature: float | None = None
    options: Mapping[str, object] = field(default_factory=dict[str, object])
    """Further fields of the bodies. `voice` is the voice of speech and of spoken answers."""

    @property
    def root(self) -> str:
        """The URL below which the endpoints are located."""
        url = self.url.rstrip("/")
        return url if url.endswith("/v1") else f"{url}/v1"
