"""The config of a job server."""

from collections.abc import Sequence
from dataclasses import dataclass

from stagemesh.common.process.config import ClientServiceConfig
from stagemesh.common.process.media_config import MediaConfig


@dataclass(frozen=True)
class JobServerConfig(ClientServiceConfig):
    """The configuration of a process that serves JobService for one pipeline, and runs its jobs."""

    pipeline: str
    listen: str
    """The address on which the process listens, as "host:port"."""
    servers: Sequence[str]
    """The addresses of the pipeline's orchestrators, as "host:port". At least one."""
    media: MediaConfig
    """The pipeline's object store, in which results are stored."""
    name: str = "jobs"
    """The name of the process. Processes with the same database or the same store need different names."""
    database: str = ""
    """The URL of the database: sqlite:///PATH or postgresql://USER:PASSWORD@HOST/NAME.

    If it is empty, the database is a SQLite file of the pipeline in the folder `jobs` of STAGEMESH_HOME. Several job
    servers on different hosts share a PostgreSQL database.
    """
    database_file: str = ""
    """The path of a file that contains the URL of the database, so that this config contains no password.

    The file is read when the process starts. It replaces `database`.
    """
    max_running: int = 4
    """The maximum number of jobs that this process runs at the same time."""
    max_queued: int = 10_000
    """The maximum number of jobs of the pipeline that wait."""
    max_queued_per_caller: int = 1_000
    """The maximum number of jobs of one caller that wait."""
    max_jobs_per_caller: int = 10_000
    """The maximum number of jobs of one caller that are stored, including those that have ended."""
    max_request_bytes: int = 8 << 20
    """The maximum size of a job's request in bytes."""
    max_failures: int = 5
    """The number of failed attempts after which a job fails.

    An attempt fails if its request ends with an error that a retry may remedy, or if its job server terminates.
    """
    lease_s: float = 15.0
    """The time in seconds after which a job whose server no longer renews its lease is run by another job server."""
    max_wait_s: float = 604_800.0
    """The time in seconds after its submission after which a job that still waits for an attempt is deleted."""
    keep_s: float = 86_400.0
    """The time in seconds for which a job and its files are kept after its end."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.servers:
            raise ValueError("servers: name the address of an orchestrator of the pipeline")
        if not self.media.store:
            raise ValueError("media.store is not set; name the folder or the URL in which results are stored")
        if self.database and self.database_file:
            raise ValueError("database and database_file are both set; keep one of them")
        if self.database:
            check_database_url(self.database)
        limits = ("max_running", "max_queued", "max_queued_per_caller", "max_jobs_per_caller", "max_request_bytes")
        for field in (*limits, "max_failures", "lease_s", "max_wait_s", "keep_s"):
            if not getattr(self, field) >= 1:
                raise ValueError(f"{field} is {getattr(self, field)}; it must be at least 1")


def check_database_url(url: str) -> None:
    """Raises ValueError if a URL is not that of a database of jobs. The message does not contain the URL."""
    if not url.startswith(("sqlite:///", "postgresql://")):
        raise ValueError("the URL of the database is neither sqlite:///PATH nor postgresql://USER:PASSWORD@HOST/NAME")
