"""The settings of a load: the arrivals of requests, and the HTTP API that is called."""

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import count


class Arrivals(StrEnum):
    """The pattern in which requests arrive."""

    POISSON = "poisson"
    """Independent requests: the times between two arrivals are exponentially distributed."""
    UNIFORM = "uniform"
    """The same time between any two arrivals."""
    BURST = "burst"
    """Several requests at once, then none until the next burst."""


def arrival_times_s(pattern: Arrivals, *, rate_per_s: float, burst: int, seed: int) -> Iterator[float]:
    """Yields the times of arrivals without end, in seconds since the start of the load, in ascending order.

    - `rate_per_s` is the average number of arrivals per second in every pattern.
    - `burst` is the number of requests that arrive at once in the pattern BURST.
    - `seed` determines the times of the pattern POISSON.
    """
    match pattern:
        case Arrivals.POISSON:
            return _poisson_s(rate_per_s, random.Random(seed))
        case Arrivals.UNIFORM:
            return (index / rate_per_s for index in count())
        case Arrivals.BURST:
            return (index // burst * burst / rate_per_s for index in count())


def _poisson_s(rate_per_s: float, generator: random.Random) -> Iterator[float]:
    due_s = 0.0
    while True:
        due_s += generator.expovariate(rate_per_s)
        yield due_s


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
