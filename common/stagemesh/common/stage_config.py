"""What a stage process is told at its start: one JSON file, written by a launcher or mounted by a cluster."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import JsonValue, TypeAdapter, ValidationError

from stagemesh.common.errors import InvalidRequestError

STALL_S = 300.0
"""More than what is slow and honest takes between two signs of life: a long prompt, a model that compiles."""


@dataclass(frozen=True)
class DataPlaneConfig:
    """Limits of a replica's data plane. A chunk may be as large as half the arena."""

    arena_bytes: int = 64 << 20
    window_bytes: int = 8 << 20
    """Credit given to each flow."""
    inline_limit_bytes: int = 4 << 10

    def __post_init__(self) -> None:
        if self.arena_bytes < 1 << 20 or self.arena_bytes & (self.arena_bytes - 1):
            raise ValueError(f"arena_bytes is {self.arena_bytes}; it must be a power of two from 1 MiB")
        if not 0 < self.window_bytes <= self.arena_bytes:
            raise ValueError(f"window_bytes is {self.window_bytes}; it must be from 1 to arena_bytes")


@dataclass(frozen=True)
class StageConfig:
    """One replica of one stage."""

    pipeline: str
    generation: str
    stage: str
    replica: str
    engine: str
    listen: str
    """Where to serve, "host:port"."""
    function: str | None = None
    model: str | None = None
    """A directory or file, already resolved."""
    options: Mapping[str, JsonValue] = field(default_factory=dict[str, JsonValue])
    data_plane: DataPlaneConfig = DataPlaneConfig()
    max_queued: int = 256
    """Steps held at once; more are refused."""
    stall_s: float = STALL_S
    """The replica ends when none of its steps gets on for so long though one could, or when its event loop stands
    still; 0 for never.
    """
    orchestrators: tuple[str, ...] = ()
    """Where to register, "host:port" each; empty where orchestrators know of the replica otherwise."""
    advertise: str | None = None
    """Where orchestrators and other replicas reach it, "host:port", with port 0 for the one it listens on; absent for
    `listen`.
    """
    zone: str | None = None
    """Where its host stands, for plans that keep neighbours together; absent for STAGEMESH_ZONE."""
    parent_pid: int | None = None
    """End when this process does."""

    def __post_init__(self) -> None:
        if not self.stall_s >= 0:
            raise ValueError(f"stall_s is {self.stall_s:g}; it must be a number of seconds, or 0 for never")


_STAGE_CONFIG = TypeAdapter(StageConfig)


def load_stage_config(path: Path) -> StageConfig:
    """Reads a config file; raises InvalidRequestError that names the field."""
    try:
        return _STAGE_CONFIG.validate_json(path.read_bytes())
    except ValidationError as exc:
        raise InvalidRequestError(f"{path}: {exc}", reason="INVALID_CONFIG") from exc


def dump_stage_config(config: StageConfig) -> bytes:
    """The file's content for `config`."""
    return _STAGE_CONFIG.dump_json(config)
