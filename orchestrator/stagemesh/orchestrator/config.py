"""What an orchestrator process is told at its start: one JSON file, written by a launcher or mounted by a cluster."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import ConfigDict, TypeAdapter, ValidationError

from stagemesh.common.errors import InvalidRequestError


@dataclass(frozen=True)
class ReplicaAddress:
    """A replica's name in the pipeline, and where it serves ("host:port")."""

    name: str
    endpoint: str


@dataclass(frozen=True)
class DnsName:
    """A name whose addresses are a stage's replicas, all on one port."""

    host: str
    port: int
    poll_s: float = 5.0
    """Seconds between two looks at it."""

    def __post_init__(self) -> None:
        if not self.host or not 0 < self.port < 1 << 16:
            raise ValueError(f"host and port are {self.host!r} and {self.port}; give a name and a port from 1 to 65535")
        if self.poll_s <= 0:
            raise ValueError(f"poll_s is {self.poll_s}; it must be over 0")


@dataclass(frozen=True)
class Registration:
    """Replicas may register themselves."""

    lease_s: float = 30.0
    """How long one that is not heard of stays a member."""

    def __post_init__(self) -> None:
        if not 1 <= self.lease_s <= 3600:
            raise ValueError(f"lease_s is {self.lease_s}; it must be from 1 to 3600")


@dataclass(frozen=True)
class OrchestratorConfig:
    """One orchestrator of one pipeline."""

    # A key that nobody reads is a mistake.
    __pydantic_config__ = ConfigDict(extra="forbid")

    pipeline: str
    """The pipeline file's path, or the name of a shipped one."""
    replicas: Mapping[str, tuple[ReplicaAddress, ...]]
    """By stage; a stage whose replicas are found otherwise may have none."""
    listen: str
    """Where to serve, "host:port"."""
    dns: Mapping[str, DnsName] = field(default_factory=dict[str, DnsName])
    """By stage, the name that stands for its replicas."""
    registration: Registration | None = None
    """Replicas of any stage may register themselves; absent, none may."""
    generations: tuple[str, ...] = ()
    """Generations whose replicas are taken in beside those of the pipeline file's own, while an upgrade goes on."""
    admin_listen: str | None = None
    """Where to serve AdminService, "host:port", never where clients are; nowhere without it."""
    overrides: Mapping[str, str] = field(default_factory=dict[str, str])
    """Values that replace those of the pipeline file, as given to the launcher."""
    max_request_s: float = 3600.0
    """The longest that a request may take, whatever its client allows."""
    drain_s: float = 10.0
    """How long requests that run may go on after SIGTERM; those left then are stopped."""
    max_kept_state_bytes: int = 256 << 20
    """Maximum total size of the checkpoint states kept for lost steps, in bytes; 0 keeps none."""
    parent_pid: int | None = None
    """End when this process does."""

    def __post_init__(self) -> None:
        if self.max_request_s <= 0:
            raise ValueError(f"max_request_s is {self.max_request_s}; it must be over 0")
        if self.admin_listen == self.listen and not self.listen.endswith(":0"):
            raise ValueError(f"admin_listen is {self.admin_listen}, where clients are served; it must be another port")
        for name in ("drain_s", "max_kept_state_bytes"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be 0 or more")
        names = [address.name for addresses in self.replicas.values() for address in addresses]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"replicas holds {', '.join(twice)} more than once; names must be unique")


_CONFIG = TypeAdapter(OrchestratorConfig)


def load_orchestrator_config(path: Path) -> OrchestratorConfig:
    """Reads a config file; raises InvalidRequestError (INVALID_CONFIG) that names the field."""
    try:
        return _CONFIG.validate_json(path.read_bytes())
    except ValidationError as exc:
        raise InvalidRequestError(f"{path}: {exc}", reason="INVALID_CONFIG") from exc
    except OSError as exc:
        raise InvalidRequestError(f"{path} cannot be read: {exc.strerror}", reason="INVALID_CONFIG") from exc


def dump_orchestrator_config(config: OrchestratorConfig) -> bytes:
    """The file's content for `config`."""
    return _CONFIG.dump_json(config)
