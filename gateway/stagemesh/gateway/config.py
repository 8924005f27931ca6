"""The config of a gateway."""

from collections.abc import Sequence
from dataclasses import dataclass

from stagemesh.common.process.config import ProcessConfig


@dataclass(frozen=True)
class GatewayConfig(ProcessConfig):
    """The configuration of a process that serves OpenAI's API for some pipelines."""

    listen: str
    """The address on which the process serves HTTP, as "host:port"."""
    servers: Sequence[Sequence[str]]
    """For each pipeline, the addresses of its orchestrators, as "host:port". At least one of each."""
    tls: str | None = None
    """The folder with the certificates for the connections to the orchestrators. None for connections without TLS.

    With `ca.crt` alone, each request is sent with the token of its HTTP caller (`Authorization: Bearer TOKEN`). With
    `tls.crt` and `tls.key`, too, the gateway sends all requests as its own, and does not know its HTTP callers.
    """
    https: str | None = None
    """The folder with `tls.crt` and `tls.key`, with which the gateway serves HTTPS. None for HTTP."""
    max_body_bytes: int = 64 << 20
    """The limit for the body of an HTTP request in bytes."""
    max_websockets: int = 256
    """The maximum number of open WebSockets. Each may hold 48 MiB of the audio of its caller."""
    page: bool = True
    """Whether the process serves the page on which people try a pipeline, at `/`."""
    voices: str | None = None
    """The folder in which the process stores the voices that callers create, or None if callers cannot create voices.

    Several gateways may share a folder.
    """

    def __post_init__(self) -> None:
        if not self.servers or not all(self.servers):
            raise ValueError("servers: name the address of an orchestrator of each pipeline")
        if self.max_websockets < 1:
            raise ValueError(f"max_websockets is {self.max_websockets}; it must be at least 1")
