"""The configuration of a stage process: one JSON file, written by a launcher or mounted by a cluster."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import JsonValue, TypeAdapter, ValidationError

from stagemesh.common.errors import InvalidRequestError

STALL_S = 300.0
"""Longer than slow but correct work takes between two signs of progress: a long prompt, a model that compiles."""


@dataclass(frozen=True)
class DataPlaneConfig:
    """The limits of a replica's data plane. A chunk may have at most half of `arena_bytes`."""

    arena_bytes: int = 64 << 20
    window_bytes: int = 8 << 20
    """The credit of each flow."""
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
    """The address to serve on, "host:port"."""
    function: str | None = None
    model: str | None = None
    """The path of a folder or file."""
    options: Mapping[str, JsonValue] = field(default_factory=dict[str, JsonValue])
    data_plane: DataPlaneConfig = DataPlaneConfig()
    max_queued: int = 256
    """The most steps that are held at once. Further steps are rejected."""
    stall_s: float = STALL_S
    """The replica ends if none of its steps makes progress for this time though one could, or if its event loop is
    blocked for this time. 0 means never.
    """
    orchestrators: tuple[str, ...] = ()
    """Orchestrators to register with, "host:port" each. Empty if orchestrators find the replica in another way."""
    advertise: str | None = None
    """The address by which orchestrators and other replicas reach it, "host:port". Port 0 stands for the port that it
    listens on. The default is `listen`.
    """
    zone: str | None = None
    """The location of its host, for plans that prefer close replicas. The default is STAGEMESH_ZONE."""
    parent_pid: int | None = None
    """The process ends when this parent process ends."""

    def __post_init__(self) -> None:
        if not self.stall_s >= 0:
            raise ValueError(f"stall_s is {self.stall_s:g}; it must be a positive number of seconds, or 0 for never")


_STAGE_CONFIG = TypeAdapter(StageConfig)


def load_stage_config(path: Path) -> StageConfig:
    """Reads a config file. Raises InvalidRequestError, which names the field."""
    try:
        return _STAGE_CONFIG.validate_json(path.read_bytes())
    except ValidationError as exc:
        raise InvalidRequestError(f"{path}: {exc}", reason="INVALID_CONFIG") from exc


def dump_stage_config(config: StageConfig) -> bytes:
    """Returns the content of a config file."""
    return _STAGE_CONFIG.dump_json(config)
