"""The folder of a run on this machine: its files, its lock, and its logs."""

import errno
import fcntl
import os
import re
import shutil
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from heapq import merge
from pathlib import Path
from typing import NamedTuple

from stagemesh.common.errors import InvalidRequestError, NotFoundError

KEPT_S = 7 * 24 * 3600.0
KEPT_BYTES, KEPT_RUNS = 1 << 30, 200
"""The folders of ended runs are kept up to this age in seconds, this total size in bytes, and this number."""
_LOCK = ".lock"
_CERTIFICATES = "tls"


class RunFolder:
    """The folder with the config files and logs of one run.

    A file lock in the folder shows that the run is in progress. The kernel releases the lock when the launcher's
    process terminates for any reason.
    """

    def __init__(self, runs_dir: Path, *, pipeline: str) -> None:
        """Creates and locks a folder for a new run of `pipeline` in `runs_dir`.

        Removes the config files of ended runs, and the folders of ended runs beyond KEPT_S, KEPT_BYTES or KEPT_RUNS.
        Raises InvalidRequestError (CANNOT_WRITE) if the folder cannot be written.
        """
        try:
            runs_dir.mkdir(parents=True, exist_ok=True)
            runs_lock = _lock(runs_dir, flags=fcntl.LOCK_EX)
            try:
                _remove_ended_runs(runs_dir)
                number = f"{os.getpid()}-{time.monotonic_ns() % 1_000_000:06d}"
                self.path = runs_dir / f"{time.strftime('%Y%m%d-%H%M%S')}-{number}-{pipeline}"
                self.path.mkdir(mode=0o700)
                self._lock: int | None = _lock(self.path, flags=fcntl.LOCK_EX)
            finally:
                os.close(runs_lock)
        except OSError as exc:
            raise _unwritable(runs_dir, exc) from exc

    def write_config(self, name: str, content: bytes) -> Path:
        """Writes the config file of the process `name`. Returns the path of the file.

        Raises InvalidRequestError (CANNOT_WRITE) if the file cannot be written.
        """
        path = self.path / f"{name}.json"
        try:
            path.write_bytes(content)
        except OSError as exc:
            raise _unwritable(self.path, exc) from exc
        return path

    def certificates_path(self, name: str) -> Path:
        """Returns the path of the folder for the certificates of the process `name`. Does not create the folder."""
        return self.path / _CERTIFICATES / name

    def log_path(self, name: str) -> Path:
        """Returns the path of the log file of the process `name`. Does not create the file."""
        return self.path / f"{name}.log"

    def close(self) -> None:
        """Removes the config files and releases the lock. A later run removes the logs. Idempotent."""
        if self._lock is not None:
            _remove_configs(self.path)
            os.close(self._lock)
            self._lock = None


def read_tail(path: Path, *, lines: int = 20) -> str:
    """Returns at most the last `lines` lines of a log. Returns an empty string if the log does not exist.

    Reads only the last 16 KiB of the log.
    """
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 16384))
            return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])
    except FileNotFoundError:
        return ""


@dataclass(frozen=True)
class PastRun:
    """The folder of a run of the launcher, which may still be in progress."""

    path: Path

    @property
    def name(self) -> str:
        """The run's name, which begins with the time of its start."""
        return self.path.name

    @property
    def pipeline(self) -> str:
        """The name of the run's pipeline."""
        return "".join(self.name.split("-", 4)[4:])

    @property
    def is_over(self) -> bool:
        """Whether the run has ended."""
        try:
            os.close(_lock(self.path, flags=fcntl.LOCK_EX | fcntl.LOCK_NB))
        except BlockingIOError:
            return False
        return True

    @property
    def size_bytes(self) -> int:
        """The size of the run's logs in bytes."""
        return sum(path.stat().st_size for path in self.path.glob("*.log"))


def past_runs(runs_dir: Path) -> list[PastRun]:
    """Returns the runs whose folders are kept, the newest first."""
    if not runs_dir.is_dir():
        return []
    return [PastRun(path) for path in sorted(runs_dir.iterdir(), reverse=True) if path.is_dir()]


def find_run(runs_dir: Path, name: str | None) -> PastRun:
    """Returns the run whose name begins with `name`.

    If it is None, returns the newest run in progress, or the newest one if all have ended.

    Raises NotFoundError (UNKNOWN_LOG) unless there is exactly one such run.
    """
    runs = past_runs(runs_dir)
    if name is None:
        found = ([run for run in runs if not run.is_over] or runs)[:1]
    else:
        found = [run for run in runs if run.name.startswith(name)]
    if len(found) == 1:
        return found[0]
    if not runs:
        raise NotFoundError(f"no run is kept in {runs_dir}; `stagemesh up` creates one", reason="UNKNOWN_LOG")
    problem = "no run has" if not found else f"{len(found)} runs have"
    raise NotFoundError(
        f"{problem} a name that begins with {name!r}; `stagemesh logs --list` shows the names", reason="UNKNOWN_LOG"
    )


def _unwritable(path: Path, exc: OSError) -> InvalidRequestError:
    remedy = "free some space" if exc.errno in (errno.ENOSPC, errno.EDQUOT) else "make it writable"
    return InvalidRequestError(
        f"the configs and logs of a run cannot be written to {path}: {exc.strerror}; {remedy}, or set STAGEMESH_HOME "
        "to another folder",
        reason="CANNOT_WRITE",
    )


def _remove_ended_runs(runs_dir: Path) -> None:
    kept_bytes, kept_runs, oldest_s = 0, 0, time.time() - KEPT_S
    for run in past_runs(runs_dir):
        if run.is_over:
            kept_bytes, kept_runs = kept_bytes + run.size_bytes, kept_runs + 1
            if kept_bytes > KEPT_BYTES or kept_runs > KEPT_RUNS or run.path.stat().st_mtime < oldest_s:
                shutil.rmtree(run.path, ignore_errors=True)
            else:
                _remove_configs(run.path)


def _remove_configs(path: Path) -> None:
    for config in path.glob("*.json"):
        config.unlink(missing_ok=True)
    shutil.rmtree(path / _CERTIFICATES, ignore_errors=True)


def _lock(folder: Path, *, flags: int) -> int:
    """Locks a folder, and returns the file descriptor of the lock. Closing the descriptor releases the lock.

    `flags` are flags of `flock`. Raises BlockingIOError if `flags` contain LOCK_NB and another process has locked the
    folder.
    """
    lock = os.open(folder / _LOCK, os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(lock, flags)
    except BlockingIOError:
        os.close(lock)
        raise
    return lock


_POLL_S = 0.2
_TIME = re.compile(rb"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} ")
_JSON_TIME = re.compile(rb'^\{.*"time": "([^"]*)"')


class LogLine(NamedTuple):
    """A line of a process's log. `time` is its time as text, or that of the last line before it that has one."""

    time: bytes
    process: str
    text: str


class RunLogs:
    """The logs of some processes of a run."""

    def __init__(self, run: PastRun, *, name: str | None = None) -> None:
        """`name` is the name of a stage or of a process. None stands for all processes.

        Raises NotFoundError (UNKNOWN_LOG) if the run has no log of this name.
        """
        self._run, self._name = run, name
        self._files: dict[str, _LogFile] = {}
        self._find()
        if not self._files and name is not None:
            names = ", ".join(sorted(path.stem for path in run.path.glob("*.log"))) or "none"
            raise NotFoundError(
                f"run {run.name} has no log of {name!r}; it has {names}; `stagemesh logs --list` shows other runs, of "
                "which --run selects one",
                reason="UNKNOWN_LOG",
            )

    def read(self) -> Iterator[LogLine]:
        """Yields the lines that have been added since the last call, in the order of their times.

        Yields an incomplete last line only if the run is over.
        """
        is_over = self._run.is_over
        self._find()
        return merge(*[file.read(to_end=is_over) for file in self._files.values()], key=lambda line: line.time)

    def follow(self) -> Iterator[LogLine]:
        """Yields all lines, and then each further line until the run has ended."""
        while True:
            is_over = self._run.is_over
            yield from self.read()
            if is_over:
                return
            time.sleep(_POLL_S)

    def _find(self) -> None:
        for path in sorted(self._run.path.glob("*.log")):
            process = path.stem
            if self._name in (None, process, process.rpartition("-")[0]):
                self._files.setdefault(process, _LogFile(path))


class _LogFile:
    def __init__(self, path: Path) -> None:
        self._path, self._offset, self._time = path, 0, b""

    def read(self, *, to_end: bool) -> list[LogLine]:
        with self._path.open("rb") as file:
            file.seek(self._offset)
            added = file.read()
        complete = added if to_end else added[: added.rfind(b"\n") + 1]
        self._offset += len(complete)
        return list(self._lines(complete.splitlines()))

    def _lines(self, lines: Iterable[bytes]) -> Iterator[LogLine]:
        for line in lines:
            if found := _TIME.match(line) or _JSON_TIME.match(line):
                self._time = found[found.lastindex or 0]
            yield LogLine(self._time, self._path.stem, line.decode(errors="replace"))
