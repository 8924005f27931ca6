"""Builds the images of `k8s/images` with buildah, over bases that mmdebstrap makes.

The bases stand for the official ones, which a machine without a container registry cannot fetch.
"""

import ast
import re
import subprocess
import sys
from pathlib import Path

from k8s.cluster.shell import run

REPOSITORY = Path(__file__).parents[2]
ORCHESTRATOR = "localhost/stagemesh/orchestrator"
GATEWAY = "localhost/stagemesh/gateway"
JOBS = "localhost/stagemesh/jobs"
STAGE = "localhost/stagemesh/stage-cpu"
PAUSE = "localhost/pause"
_DEBIAN = "localhost/debian:bookworm-slim"
_PYTHON = "localhost/python3-debian12:nonroot"
_SUITE = "bookworm"
MAX_ORCHESTRATOR_BYTES = 200_000_000
_SLIM = [f"--dpkgopt=path-exclude=/usr/share/{folder}/*" for folder in ("doc", "locale", "man")]
# What the official base of all images but that of stages contains: Python and the libraries that its packages need.
_PYTHON_PACKAGES = (
    "base-files,ca-certificates,libgomp1,libpython3.11-stdlib,libstdc++6,netbase,"
    "python3-minimal,python3.11-minimal,tzdata"
)


def build(folder: Path, *, tag: str) -> dict[str, int]:
    """Builds all images with the tag `tag`. Returns the size of each in bytes, without compression.

    `folder` keeps the pause binary, and pip's configuration for the builds. Ends the program with a message if the
    image of the orchestrator is too large.
    """
    _import_base(_DEBIAN, ["--variant=minbase"])
    _import_base(_PYTHON, ["--variant=extract", f"--include={_PYTHON_PACKAGES}"])
    _build_pause(folder)
    debian, python = _digest(_DEBIAN), _digest(_PYTHON)
    bases = {"BUILD_BASE": _DEBIAN, "BUILD_BASE_DIGEST": debian, "BASE": _PYTHON, "BASE_DIGEST": python}
    _build("orchestrator", f"{ORCHESTRATOR}:{tag}", bases, folder)
    _build("gateway", f"{GATEWAY}:{tag}", bases, folder)
    _build("jobs", f"{JOBS}:{tag}", bases, folder)
    _build("stage", f"{STAGE}:{tag}", {"BASE": _DEBIAN, "BASE_DIGEST": debian, "VARIANT": "cpu"}, folder)
    sizes = {f"{image}:{tag}": _size_bytes(f"{image}:{tag}") for image in (ORCHESTRATOR, GATEWAY, JOBS, STAGE)}
    check_orchestrator_size(sizes[f"{ORCHESTRATOR}:{tag}"])
    return sizes


def check_orchestrator_size(size_bytes: int) -> None:
    """Ends the program with a message if the image of the orchestrator, without compression, is too large."""
    if size_bytes >= MAX_ORCHESTRATOR_BYTES:
        sys.exit(
            f"the image of the orchestrator has {size_bytes:,} bytes, but must have less than "
            f"{MAX_ORCHESTRATOR_BYTES:,}; remove packages from requirements/orchestrator.txt "
            "(EXCLUDED_FROM_ORCHESTRATOR in requirements/lock.py), or files in k8s/images/orchestrator.Dockerfile"
        )


def _size_bytes(image: str) -> int:
    container = run("buildah", "from", "--pull-never", image)
    try:
        return int(run("du", "--summarize", "--bytes", run("buildah", "mount", container)).split()[0])
    finally:
        run("buildah", "rm", container)


def _digest(image: str) -> str:
    return run("buildah", "images", "--format", "{{.Digest}}", image)


def _import_base(image: str, arguments: list[str]) -> None:
    if run("buildah", "images", "--quiet", "--filter", f"reference={image}"):
        return
    container = run("buildah", "from", "scratch")
    mount = run("buildah", "mount", container)
    run("mmdebstrap", "--quiet", "--mode=root", "--format=directory", *_SLIM, *arguments, _SUITE, mount)
    run("buildah", "commit", "--rm", container, image)


def _build_pause(folder: Path) -> None:
    container = run("buildah", "from", "scratch")
    run("buildah", "copy", container, str(folder / "bin" / "pause"), "/pause")
    run("buildah", "config", "--entrypoint", '["/pause"]', "--user", "65535:65535", container)
    run("buildah", "commit", "--rm", container, f"{PAUSE}:latest")


def _build(name: str, image: str, arguments: dict[str, str], folder: Path) -> None:
    command = ["buildah", "build", "--isolation=chroot", "--layers", f"--tag={image}", *_pip_volumes(folder)]
    command += [f"--build-arg={key}={value}" for key, value in arguments.items()]
    command += [f"--file={REPOSITORY}/k8s/images/{name}.Dockerfile", str(REPOSITORY)]
    subprocess.run(command, check=True)


def _pip_volumes(folder: Path) -> list[str]:
    """Returns options that give the build this machine's configuration of pip, and all files that it names."""
    listed = run("python", "-m", "pip", "config", "list")
    settings: dict[str, str] = dict(re.findall(r"^(?:global|:env:)\.([\w-]+)=(.*)$", listed, re.MULTILINE))
    volumes = [f"{folder / 'pip.conf'}:/etc/pip.conf"]

    def mounted(word: str) -> str:
        path = word.removeprefix("file://")
        if not path.startswith("/") or not Path(path).exists():
            return word
        # An index of files refers to packages in the parent of its own folder.
        root = Path(path).parent if word.startswith("file://") else Path(path)
        volumes.append(f"{root}:/mnt{root}")
        return word.replace(path, f"/mnt{path}")

    lines = [f"{key} = {' '.join(map(mounted, ast.literal_eval(value).split()))}\n" for key, value in settings.items()]
    (folder / "pip.conf").write_text("[global]\n" + "".join(lines))
    return [f"--volume={volume}:ro" for volume in dict.fromkeys(volumes)]
