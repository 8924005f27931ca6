"""The lines of the logs of one run, merged by time."""

import re
import time
from collections.abc import Iterable, Iterator
from heapq import merge
from pathlib import Path
from typing import NamedTuple

from stagemesh.common.errors import NotFoundError
from stagemesh.orchestrator.launcher.run_folder import PastRun

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
