"""The folder with the config files and logs of one run of the launcher."""

import fcntl
import os
import shutil
import time
from pathlib import Path

KEPT_RUNS = 5
_LOCK = ".lock"


class RunFolder:
    """The folder with the config files and logs of one run.

    A file lock in the folder shows that the run is in progress. The kernel releases the lock when the launcher's
    process terminates for any reason.
    """

    def __init__(self, runs_dir: Path) -> None:
        """Creates and locks a folder for a new run in `runs_dir`.

        Removes the config files of the newest KEPT_RUNS ended runs, and the folders of all other ended runs.
        """
        runs_dir.mkdir(parents=True, exist_ok=True)
        runs_lock = _lock(runs_dir, flags=fcntl.LOCK_EX)
        try:
            _remove_ended_runs(runs_dir)
            self.path = (
                runs_dir / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-{time.monotonic_ns() % 1_000_000:06d}"
            )
            self.path.mkdir(mode=0o700)
            self._lock: int | None = _lock(self.path, flags=fcntl.LOCK_EX)
        finally:
            os.close(runs_lock)

    def write_config(self, name: str, content: bytes) -> Path:
        """Writes the config file of the process `name`. Returns the path of the file."""
        path = self.path / f"{name}.json"
        path.write_bytes(content)
        return path

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


def _remove_ended_runs(runs_dir: Path) -> None:
    newest_first = sorted((path for path in runs_dir.iterdir() if path.is_dir()), reverse=True)
    ended = [path for path in newest_first if _is_ended(path)]
    for path in ended[:KEPT_RUNS]:
        _remove_configs(path)
    for path in ended[KEPT_RUNS:]:
        shutil.rmtree(path, ignore_errors=True)


def _is_ended(path: Path) -> bool:
    try:
        os.close(_lock(path, flags=fcntl.LOCK_EX | fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    return True


def _remove_configs(path: Path) -> None:
    for config in path.glob("*.json"):
        config.unlink(missing_ok=True)


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
