"""The config of an orchestrator process.

The config is one JSON file. The launcher writes the file, or Kubernetes mounts it.
"""

from collections.abc import Mapping
from dataclasses import field
from typing import Annotated

from pydantic import Field
from pydantic.dataclasses import dataclass

from stagemesh.common.process.config import ClientServiceConfig


@dataclass(frozen=True)
class ReplicaAddress:
    """A replica's name in the pipeline and its address ("host:port")."""

    name: str
    endpoint: str
    server_name: str = ""
    """The name in the replica's TLS certificate, or empty if it is the host in `endpoint`."""


@dataclass(frozen=True)
class DnsName:
    """A DNS name that resolves to the addresses of a stage's replicas.

    All of these replicas must listen on the same port, `port`. Their TLS certificates contain the DNS name.
    """

    host: Annotated[str, Field(min_length=1)]
    port: Annotated[int, Field(ge=1, le=65535)]
    poll_s: Annotated[float, Field(gt=0)] = 5.0
    """The interval between two DNS lookups, in seconds."""


@dataclass(frozen=True)
class Registration:
    """Settings for replicas that register themselves with the orchestrator."""

    lease_s: Annotated[float, Field(ge=1, le=3600)] = 30.0
    """The duration of a replica's lease, in seconds.

    A replica that does not renew its lease within this time is no longer a member.
    """


@dataclass(frozen=True)
class OrchestratorConfig(ClientServiceConfig):
    """The config of one orchestrator process, which serves one pipeline."""

    pipeline: str
    """The path of the pipeline file, or the name of a built-in pipeline."""
    replicas: Mapping[str, tuple[ReplicaAddress, ...]]
    """The replicas with fixed addresses, by stage.

    May omit stages whose replicas are found by DNS, register themselves, or have addresses in the pipeline file.
    """
    listen: str
    """The address at which clients reach the orchestrator, "host:port"."""
    dns: Mapping[str, DnsName] = field(default_factory=dict[str, DnsName])
    """The DNS names that resolve to replicas, by stage."""
    registration: Registration | None = None
    """The settings for replicas that register themselves, or None if replicas cannot register."""
    generation: str = ""
    """The generation of this orchestrator's own replicas. Empty stands for the generation of the pipeline file, which
    is computed from the file's stages."""
    generations: tuple[str, ...] = ()
    """Additional generations whose replicas are accepted during an upgrade, as patterns: `*` stands for any text.

    Replicas of the orchestrator's own generation are always accepted. Replicas of the additional generations must
    report the signatures of the pipeline file's stages, too.
    """
    admin_listen: str | None = None
    """The address at which operators and stages reach the orchestrator, "host:port", or None if they cannot.

    AdminService and MembershipService listen there. Must differ from `listen`. Required with `registration`.
    """
    metrics_listen: str | None = None
    """The address at which Prometheus reads metrics by HTTP, "host:port", or None if it cannot."""
    warm: Mapping[str, Annotated[float, Field(ge=0, allow_inf_nan=False)]] = field(default_factory=dict[str, float])
    """The stages whose sleeping replicas are woken when requests need them, by name.

    Each value is the waiting work of the stage in seconds above which a sleeping replica is woken. A stage without a
    ready replica wakes one for any request.
    """
    overrides: Mapping[str, str] = field(default_factory=dict[str, str])
    """Overrides of the pipeline file's settings: maps each setting's path to its new value, for example
    {"edges.*.connector": "grpc"}.
    """
    media_endpoint: str = ""
    """The address at which clients reach the media service, "host:port". Empty if the pipeline accepts no uploads."""
    media_server_name: str = ""
    """The name in the media service's TLS certificate, or empty if it is the host in `media_endpoint`."""
    jobs_endpoint: str = ""
    """The address at which clients reach the job server, "host:port". Empty if the pipeline runs no jobs."""
    jobs_server_name: str = ""
    """The name in the job server's TLS certificate, or empty if it is the host in `jobs_endpoint`."""
    max_request_s: Annotated[float, Field(gt=0)] = 3600.0
    """The maximum duration of a request, in seconds. A client may set a shorter limit for its own request."""
    drain_s: Annotated[float, Field(ge=0)] = 10.0
    """The time for which requests may continue to run after SIGTERM, in seconds.

    Requests that are still running after this time are stopped.
    """
    max_kept_state_bytes: Annotated[int, Field(ge=0)] = 256 << 20
    """The maximum total size of the checkpoints that the orchestrator retains, in bytes.

    If a replica terminates, the steps that it ran resume from these checkpoints on other replicas. If 0, no checkpoints
    are retained.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        addresses: dict[str, str] = {}
        for name in ("listen", "admin_listen", "metrics_listen", "health_listen"):
            address: str | None = getattr(self, name)
            if address is None or address.endswith(":0"):
                continue
            if address in addresses:
                raise ValueError(f"{name} is {address}, as {addresses[address]} is; they must be different addresses")
            addresses[address] = name
        if self.registration is not None and self.admin_listen is None:
            raise ValueError("registration needs admin_listen, the address at which replicas register")
        names = [address.name for addresses in self.replicas.values() for address in addresses]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"replicas contains {', '.join(twice)} more than once; names must be unique")
