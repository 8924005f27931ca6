"""The config of a gateway."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Literal, NamedTuple

from stagemesh.common.process.config import ProcessConfig

_NAME = re.compile(r"[a-z0-9_-]{1,63}(\.[a-z0-9_-]{1,63})*")
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^A-Z/]+")
_HOST = re.compile(r"(\[[^\]]*\]|[^\[\]:]*)(?::([0-9]{1,5}))?")


class Host(NamedTuple):
    """A host of a URL. Hosts with the same name are the same."""

    name: str
    """A name in lower case without a final dot, or an IP address in its shortest form without brackets."""
    port: str | None
    """None if the URL has none."""
    is_address: bool

    @classmethod
    def parse(cls, text: str) -> "Host | None":
        """Returns the host of "host" or "host:port", or None if the text has another form."""
        found = _HOST.fullmatch(text.lower())
        if found is None:
            return None
        try:
            return cls(str(ip_address(found[1].strip("[]"))), found[2], is_address=True)
        except ValueError:
            name = found[1].removesuffix(".")
            return cls(name, found[2], is_address=False) if _NAME.fullmatch(name) else None


@dataclass(frozen=True)
class Aliases:
    """Further names of models and voices."""

    models: Mapping[str, str] = field(default_factory=dict[str, str])
    """The model, such as a pipeline or PIPELINE:ADAPTER, by its further name."""
    voices: Mapping[str, str] = field(default_factory=dict[str, str])
    """The voice by its further name."""


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
    hosts: Sequence[str] | None = None
    """The further names of the gateway's host by which clients call it, without a port. None if there are none.

    A gateway without the tokens of its callers rejects requests for other hosts than these, `listen` and localhost.
    """
    cors_origins: Sequence[str] = ()
    """The origins of web pages that may call the gateway, such as https://app.example.com, or "*" for all pages.

    "*" needs the tokens of callers.
    """
    metrics_listen: str | None = None
    """The address at which the process serves its metrics to Prometheus, as "host:port", or None for no metrics."""
    max_body_bytes: int = 16 << 20
    """The limit for the body of an HTTP request in bytes."""
    max_bodies_bytes: int = 256 << 20
    """The limit for the bodies of all running HTTP requests, and messages of WebSockets, in bytes."""
    max_connections: int = 4096
    """The maximum number of open connections. Further ones are closed. One host may have half of what others leave."""
    keep_alive_s: int = 120
    """The time in seconds for which a connection without a request remains open. Proxies must close it earlier."""
    max_websockets: int = 256
    """The maximum number of open WebSockets. One caller may have half of what others leave.

    Each may hold 48 MiB of the audio of its caller.
    """
    aliases: Aliases = Aliases()
    """Further names of models and voices: {"models": {NAME: PIPELINE}, "voices": {NAME: VOICE}}.

    OpenAI's names of models that speak or transcribe, and of voices, have defaults.
    """
    unknown_parameters: Literal["reject", "warn"] = "reject"
    """Whether a parameter that neither OpenAI's API nor vLLM knows is an error or a warning."""
    strict: bool = False
    """Whether each parameter that would have no effect is an error, instead of a warning."""
    max_responses_bytes: int = 64 << 20
    """The limit for the stored responses of `/v1/responses`, in bytes. 0 stores none.

    One caller may have half of what others leave. Its oldest ones are dropped for new ones.
    """
    response_ttl_s: float = 3600.0
    """The time after its last use for which a response is stored, in seconds."""
    page: bool = True
    """Whether the process serves the page on which people try a pipeline, at `/`."""
    voices: str | None = None
    """The folder in which the process stores the voices that callers create, or None if callers cannot create voices.

    Several gateways may share a folder.
    """

    def __post_init__(self) -> None:
        if not self.servers or not all(self.servers):
            raise ValueError("servers: name the address of an orchestrator of each pipeline")
        for name in ("max_body_bytes", "max_bodies_bytes", "max_connections", "max_websockets", "keep_alive_s"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")
        for origin in self.cors_origins:
            if origin != "*" and (_ORIGIN.fullmatch(origin) is None or Host.parse(origin.partition("://")[2]) is None):
                raise ValueError(f"cors_origins: {origin!r} is not an origin; write SCHEME://HOST[:PORT] in lower case")
        if self.max_responses_bytes < 0 or self.response_ttl_s <= 0:
            raise ValueError("max_responses_bytes must be at least 0, and response_ttl_s must be above 0")
        if self.hosts is not None and not self.hosts:
            raise ValueError("hosts is empty; name at least one host, or omit the key")
        for host in self.hosts or ():
            if (parsed := Host.parse(host)) is None or parsed.port is not None:
                raise ValueError(
                    f"hosts: {host!r} is not a host; write each name or IP address (IPv6 in brackets) without scheme, "
                    "port, path and wildcards, such as ai.example.com"
                )
