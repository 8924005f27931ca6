"""A process of a stage: its config file, the request to fork it, and the state of its replica."""

import math
import os
import socket
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Literal

from pydantic import JsonValue

from stagemesh.common.process.config import ServiceConfig
from stagemesh.common.process.media_config import MediaConfig
from stagemesh.v1 import stage_pb2

STALL_S = 300.0
"""The default of `StageConfig.stall_s` in seconds.

A working replica makes progress more often, even during slow work such as a long prompt or the compilation of a model.
"""


@dataclass(frozen=True)
class DataPlaneConfig:
    """The size limits of a replica's data plane. A chunk may occupy at most half of `arena_bytes`."""

    arena_bytes: int = 64 << 20
    """The size in bytes of the arena, the replica's memory for tensors. A power of two, and at least 1 MiB."""
    window_bytes: int = 8 << 20
    """The credit window of each flow: the maximum number of sent bytes that the consumer has not read yet."""
    inline_limit_bytes: int = 4 << 10
    """The maximum size in bytes of a chunk that is sent inline in a message.

    Larger chunks are sent through the arena.
    """
    shared_arena: bool = True
    """Whether other processes on the host can map the arena.

    A private arena uses huge pages, from which the nixl connector reads faster. The shm connector and workers that
    write into partitions need a shared arena.
    """

    def __post_init__(self) -> None:
        if self.arena_bytes < 1 << 20 or self.arena_bytes & (self.arena_bytes - 1):
            raise ValueError(f"arena_bytes is {self.arena_bytes}; it must be a power of two from 1 MiB")
        if not 0 < self.window_bytes <= self.arena_bytes:
            raise ValueError(f"window_bytes is {self.window_bytes}; it must be from 1 to arena_bytes")


@dataclass(frozen=True)
class OrchestratorAddress:
    """The address at which a replica registers with an orchestrator, on its port for operators and stages."""

    endpoint: str
    """The address, as "host:port"."""
    server_name: str = ""
    """The name in the orchestrator's TLS certificate, or empty if it is the host in `endpoint`."""


@dataclass(frozen=True)
class StageConfig(ServiceConfig):
    """The configuration of one replica of one stage."""

    pipeline: str
    """The name of the pipeline."""
    generation: str
    """The pipeline's generation. Orchestrators reject a replica of a generation that they do not accept."""
    stage: str
    """The name of the stage."""
    replica: str
    """The name of the replica, which is unique in the pipeline."""
    engine: str
    """The name of the engine."""
    listen: str
    """The address on which the replica listens, as "host:port"."""
    function: str | None = None
    """The name of the stage's function, or None if the stage's engine runs no function."""
    model: str | None = None
    """The path of the model's folder or file, or None if the stage has no model."""
    options: Mapping[str, JsonValue] = field(default_factory=dict[str, JsonValue])
    """The options of the engine, and of the function if there is one."""
    data_plane: DataPlaneConfig = DataPlaneConfig()
    """The size limits of the data plane."""
    max_queued: int = 256
    """The maximum number of steps that the replica accepts at the same time. The replica rejects further steps."""
    stall_s: float = STALL_S
    """The number of seconds without progress after which the replica terminates. 0 disables this check.

    A replica makes no progress if its event loop is blocked. It also makes no progress if at least one step could
    advance but no step advances.
    """
    drain_s: float = 10.0
    """The number of seconds that running steps have to end after SIGTERM. The remaining steps are then moved to other
    replicas."""
    sleep_when_idle_s: float | None = None
    """The number of seconds without a step after which the replica falls asleep at level 1.

    It also falls asleep as soon as it has loaded. An orchestrator that needs it wakes it (`OrchestratorConfig.warm`).
    None if the replica never falls asleep by itself.
    """
    orchestrators: tuple[OrchestratorAddress, ...] = ()
    """The addresses of the orchestrators with which the replica registers.

    Empty if orchestrators discover the replica in another way.
    """
    advertise: str | None = None
    """The address at which orchestrators and other replicas reach this replica, as "host:port".

    Port 0 stands for the port on which the replica listens. None stands for the address in `listen`.
    """
    server_name: str = ""
    """The name in the replica's TLS certificate, which orchestrators and other replicas verify.

    Empty if it is the host of the address at which they reach the replica.
    """
    metrics_listen: str | None = None
    """The address at which Prometheus reads metrics by HTTP, "host:port", or None for no such port."""
    zone: str | None = None
    """The name of the location of the replica's host. Plans prefer replicas in the same location.

    None stands for the value of STAGEMESH_ZONE.
    """
    insecure_tcp: bool = False
    """Whether libraries may use TCP without TLS and authentication although the replica has certificates.

    The connector nixl, the hand-over of KV caches and a vllm stage over several nodes need TCP between hosts without
    RDMA. Everyone who reaches their ports can read and change the replica's memory.
    """
    media: MediaConfig | None = None
    """The stores of media files that the replica reads and writes, or None if the pipeline has none."""
    non_finite: Literal["warn", "error"] = "warn"
    """Whether NaN or infinite values in audio or in images add a warning to the request, or fail the request."""
    error_details: bool = False
    """Whether clients receive the text and the place of an exception that the code of a function or transform raised.

    They contain names of files, and may contain data of the request.
    """
    log: str = ""
    """The path of the replica's log, which errors name if `error_details` is True. Empty if it is not known."""

    @property
    def permits_plain_tcp(self) -> bool:
        """Whether libraries may use TCP without TLS: if the replica has no certificates, or by `insecure_tcp`."""
        return self.insecure_tcp or self.tls is None

    @property
    def model_path(self) -> Path | None:
        """The path of the model, or None if the stage has no model."""
        return None if self.model is None else Path(self.model)

    def __post_init__(self) -> None:
        if not 0 <= self.drain_s < math.inf:
            raise ValueError(f"drain_s is {self.drain_s:g}; it must be a number of seconds, or 0 for none")
        # A replica that wakes must stay awake until orchestrators know it and have planned the requests that wait.
        if self.sleep_when_idle_s is not None and not 1 <= self.sleep_when_idle_s < math.inf:
            raise ValueError(f"sleep_when_idle_s is {self.sleep_when_idle_s:g}; it must be at least 1 s, or omitted")
        if not self.stall_s >= 0:
            raise ValueError(f"stall_s is {self.stall_s:g}; it must be a positive number of seconds, or 0 for never")


_MAX_BYTES = 1 << 16


@dataclass(frozen=True)
class ForkRequest:
    """A request to fork a stage's process.

    - `config` is the path of the process's config file.
    - `log` and `status` are file descriptors, which the server owns.
    """

    config: Path
    log: int
    status: int


def socket_pair() -> tuple[socket.socket, socket.socket]:
    """Returns the two connected ends of a socket for requests."""
    return socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)


def send_request(server: socket.socket, request: ForkRequest) -> None:
    """Sends a request, with duplicates of its file descriptors. Raises OSError if the server has ended."""
    socket.send_fds(server, [os.fsencode(request.config)], [request.log, request.status])


def receive_request(client: socket.socket) -> ForkRequest | None:
    """Waits for the next request. Returns None if the client has closed its end."""
    with suppress(ConnectionResetError):
        config, descriptors, _, _ = socket.recv_fds(client, _MAX_BYTES, 2)
        if config:
            log, status = descriptors
            return ForkRequest(Path(os.fsdecode(config)), log, status)
    return None


class ReplicaState(Enum):
    """The state of a replica. Each value is the number of the state in the protobuf enum."""

    LOADING = stage_pb2.REPLICA_STATE_LOADING
    READY = stage_pb2.REPLICA_STATE_READY
    DRAINING = stage_pb2.REPLICA_STATE_DRAINING
    FAILED = stage_pb2.REPLICA_STATE_FAILED
    ASLEEP = stage_pb2.REPLICA_STATE_ASLEEP
    UNREACHABLE = stage_pb2.REPLICA_STATE_UNREACHABLE

    @classmethod
    def _missing_(cls, value: object) -> "ReplicaState":
        """Returns FAILED for a state number that this version does not know."""
        del value
        return cls.FAILED
