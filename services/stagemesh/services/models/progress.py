"""Displays the progress of fetching: bars on a terminal, and lines of text otherwise."""

from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeElapsedColumn


class ProgressBars:
    """A `Reporter` that shows one bar for each phase."""

    def __init__(self, console: Console) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
        self._console = console
        self._bars = Progress(*columns, console=console, disable=not console.is_terminal, transient=True)
        self._bar: TaskID | None = None

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def present(self, model: str, folder: Path) -> None:
        self._console.print(f"{model}: already in {folder}", soft_wrap=True, highlight=False)

    def phase(self, model: str, what: str, *, total: int | None = None) -> None:
        self._end()
        if not self._console.is_terminal:
            self._console.print(f"{model}: {what}", highlight=False)
        self._bar = self._bars.add_task(f"{model}: {what}", total=total)

    def progress(self, model: str, done: int) -> None:  # noqa: ARG002
        if self._bar is not None:
            self._bars.update(self._bar, completed=done)

    def done(self, model: str, folder: Path) -> None:
        self._end()
        self._console.print(f"{model}: ready in {folder}", soft_wrap=True, highlight=False)

    def _end(self) -> None:
        if self._bar is not None:
            self._bars.remove_task(self._bar)
            self._bar = None
