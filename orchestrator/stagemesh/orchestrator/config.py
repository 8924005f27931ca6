"""The config of an orchestrator process.

It is one JSON file, which is written by the launcher or mounted by Kubernetes.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import ConfigDict, TypeAdapter, ValidationError

from stagemesh.common.errors import InvalidRequestError


@dataclass(frozen=True)
class ReplicaAddress:
    """A replica's name in the pipeline and its address ("host:port")."""

    name: str
    endpoint: str


@dataclass(frozen=True)
class DnsName:
    """A DNS name that resolves to the addresses of a stage's replicas, and the port that all of them use."""

    host: str
    port: int
    poll_s: float = 5.0
    """The interval between two lookups in seconds."""

    def __post_init__(self) -> None:
        if not self.host or not 0 < self.port < 1 << 16:
            raise ValueError(
                f"host and port are {self.host!r} and {self.port}; give a host name and a port from 1 to 65535"
            )
        if self.poll_s <= 0:
            raise ValueError(f"poll_s is {self.poll_s}; it must be greater than 0")


@dataclass(frozen=True)
class Registration:
    """Enables replicas to register themselves, and sets the duration of their leases."""

    lease_s: float = 30.0
    """The time in seconds for which a registered replica remains a member without renewing its lease."""

    def __post_init__(self) -> None:
        if not 1 <= self.lease_s <= 3600:
            raise ValueError(f"lease_s is {self.lease_s}; it must be from 1 to 3600")


@dataclass(frozen=True)
class OrchestratorConfig:
    """The config of one orchestrator process, which serves one pipeline."""

    # An unknown key is a mistake.
    __pydantic_config__ = ConfigDict(extra="forbid")

    pipeline: str
    """The path of the pipeline file, or the name of a built-in pipeline."""
    replicas: Mapping[str, tuple[ReplicaAddress, ...]]
    """The replicas with fixed addresses, by stage.

    May omit stages whose replicas are found by DNS or register themselves.
    """
    listen: str
    """The address at which clients reach the orchestrator, "host:port"."""
    dns: Mapping[str, DnsName] = field(default_factory=dict[str, DnsName])
    """The DNS names that resolve to replicas, by stage."""
    registration: Registration | None = None
    """The settings for replicas that register themselves, or None if replicas cannot register."""
    generations: tuple[str, ...] = ()
    """Additional generations whose replicas are accepted during an upgrade.

    Replicas of the pipeline file's own generation are always accepted.
    """
    admin_listen: str | None = None
    """The address of AdminService, "host:port", or None to disable AdminService. Must differ from `listen`."""
    overrides: Mapping[str, str] = field(default_factory=dict[str, str])
    """Overrides of the pipeline file, by key, for example {"edges.*.connector": "grpc"}."""
    max_request_s: float = 3600.0
    """The maximum duration of a request in seconds. A client may request a shorter limit."""
    drain_s: float = 10.0
    """The time in seconds for which requests may continue to run after SIGTERM.

    The remaining requests are then stopped.
    """
    max_kept_state_bytes: int = 256 << 20
    """The maximum total size in bytes of the checkpoints that the orchestrator retains.

    If a replica terminates, its steps resume from their checkpoints. 0 retains no checkpoints.
    """
    parent_pid: int | None = None
    """The id of a process, or None. If that process ends, this process ends too."""

    def __post_init__(self) -> None:
        if self.max_request_s <= 0:
            raise ValueError(f"max_request_s is {self.max_request_s}; it must be greater than 0")
        if self.admin_listen == self.listen and not self.listen.endswith(":0"):
            raise ValueError(
                f"admin_listen is {self.admin_listen}, which is the address for clients; it must be another address"
            )
        for name in ("drain_s", "max_kept_state_bytes"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be 0 or more")
        names = [address.name for addresses in self.replicas.values() for address in addresses]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"replicas contains {', '.join(twice)} more than once; names must be unique")


_CONFIG = TypeAdapter(OrchestratorConfig)


def load_orchestrator_config(path: Path) -> OrchestratorConfig:
    """Reads a config file. Raises InvalidRequestError (INVALID_CONFIG), with the name of the invalid field."""
    try:
        return _CONFIG.validate_json(path.read_bytes())
    except ValidationError as exc:
        raise InvalidRequestError(f"{path}: {exc}", reason="INVALID_CONFIG") from exc
    except OSError as exc:
        raise InvalidRequestError(f"{path} cannot be read: {exc.strerror}", reason="INVALID_CONFIG") from exc


def dump_orchestrator_config(config: OrchestratorConfig) -> bytes:
    """Converts a config to the content of a config file."""
    return _CONFIG.dump_json(config)
