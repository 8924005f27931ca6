"""Where one `up` keeps the configs and logs of its processes."""

import fcntl
import os
import shutil
import time
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

KEPT_RUNS = 5
_LOCK = ".lock"


class RunFolder:
    """A folder of its own for one run, held by a file lock, which the kernel drops however the run ends."""

    def __init__(self, path: Path, lock: int) -> None:
        self.path = path
        self._lock: int | None = lock

    @classmethod
    def create(cls, runs_dir: Path) -> "RunFolder":
        """A new folder. Clears away what ended runs left: all but the logs of the newest few."""
        runs_dir.mkdir(parents=True, exist_ok=True)
        with _locked(runs_dir):
            _sweep(runs_dir)
            path = runs_dir / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-{time.monotonic_ns() % 1_000_000:06d}"
            path.mkdir(mode=0o700)
            lock = _try_lock(path)
        assert lock is not None, "nobody else knows a folder made a moment ago"
        return cls(path, lock)

    def write_config(self, name: str, content: bytes) -> Path:
        """Writes a process's config and returns its path."""
        path = self.path / f"{name}.json"
        path.write_bytes(content)
        return path

    def log_path(self, name: str) -> Path:
        """Where a process's output goes."""
        return self.path / f"{name}.log"

    def close(self) -> None:
        """Removes the configs and lets go; the logs stay for a few more runs. Closing twice is harmless."""
        if self._lock is not None:
            _remove_configs(self.path)
            os.close(self._lock)
            self._lock = None


def read_tail(path: Path, *, lines: int = 20) -> str:
    """The last lines of a log; empty where there is none."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - 16384))
            return "\n".join(file.read().decode(errors="replace").splitlines()[-lines:])
    except FileNotFoundError:
        return ""


def _sweep(runs_dir: Path) -> None:
    newest_first = sorted((path for path in runs_dir.iterdir() if path.is_dir()), reverse=True)
    ended = [path for path in newest_first if _is_ended(path)]
    for path in ended[:KEPT_RUNS]:
        _remove_configs(path)
    for path in ended[KEPT_RUNS:]:
        shutil.rmtree(path, ignore_errors=True)


def _is_ended(path: Path) -> bool:
    lock = _try_lock(path)
    if lock is None:
        return False
    os.close(lock)
    return True


def _remove_configs(path: Path) -> None:
    for config in path.glob("*.json"):
        config.unlink(missing_ok=True)


@contextmanager
def _locked(folder: Path) -> Generator[None]:
    lock = os.open(folder / _LOCK, os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
    finally:
        os.close(lock)


def _try_lock(folder: Path) -> int | None:
    lock = os.open(folder / _LOCK, os.O_CREAT | os.O_RDWR, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    return lock
