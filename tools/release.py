"""Builds a release: the sdist, the wheel, the npm package, and a software bill of materials of the installed client.

Run it in the repository's root: python -m tools.release [FOLDER]. The version is that of pyproject.toml. The wheel is
built from the sdist, which proves that the sdist is complete. It is installed into a new environment without extras, in
which a client then calls a pipeline that this repository runs. So is the npm package. Packages come from the configured
index of pip, with the versions and hashes of requirements/client.txt, and from the configured registry of npm.
"""

import json
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
PIPELINE = ROOT / "examples/graph/pipeline.yaml"
_END_S = 30
_COMMAND_S = 600
"""The maximum duration of each command of a release, in seconds. A client calls again until an orchestrator answers."""
_CALL = """\
import importlib.util, sys
from stagemesh.client import Client

assert importlib.util.find_spec("typer") is None, "the environment has the packages of the extra cli"
with Client(sys.argv[1]) as client:
    assert client.generate("hello", outputs=["text"]).result().text
"""

_CALL_IN_NODE = """\
import { StagemeshClient } from "stagemesh";

const client = new StagemeshClient([process.argv[2]]);
let text = "";
for await (const event of client.generate("hello")) {
  const content = event.$case === "output" ? event.value.content : undefined;
  if (content?.$case === "text") text += content.value;
}
client.close();
if (!text) throw new Error("the pipeline answered without text");
"""
_NPM = ("npm", "--no-audit", "--no-fund", "--loglevel=error")


def find_problems(root: Path) -> list[str]:
    """Returns what must be repaired before a release of the repository at `root`. Empty if it can be released."""
    version = read_version(root)
    problems: list[str] = []
    if not re.search(
        rf"^## \[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d$", (root / "CHANGELOG.md").read_text(), re.MULTILINE
    ):
        problems.append(
            f"CHANGELOG.md has no section for the version {version}; add the line `## [{version}] - YYYY-MM-DD` below "
            "`## [Unreleased]`"
        )
    chart = yaml.safe_load((root / "k8s/chart/Chart.yaml").read_text())
    problems += [
        f"k8s/chart/Chart.yaml: {key} is {chart[key]}; write the version of pyproject.toml, {version}"
        for key in ("version", "appVersion")
        if chart[key] != version
    ]
    package = json.loads((root / "clients/typescript/package.json").read_text())["version"]
    if package != version:
        problems.append(
            f"clients/typescript/package.json: version is {package}; run `npm version {version} --workspace "
            "clients/typescript --no-git-tag-version`"
        )
    return problems


def read_version(root: Path) -> str:
    """Returns the version of the project."""
    return str(tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"])


def build(folder: Path) -> Path:
    """Builds the sdist and, from it, the wheel into an empty folder. Returns the wheel."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    _run(sys.executable, "-m", "hatchling", "build", "--target", "sdist", "--directory", str(folder))
    (sdist,) = folder.glob("*.tar.gz")
    _run(
        *(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"),
        *("--wheel-dir", str(folder), str(sdist)),
    )
    (wheel,) = folder.glob("*.whl")
    return wheel


def install(wheel: Path, folder: Path) -> Path:
    """Installs the wheel without extras into a new environment in `folder`, and returns its interpreter.

    Raises RuntimeError if requirements/client.txt lacks a package that the wheel needs.
    """
    _run(sys.executable, "-m", "venv", "--without-pip", str(folder))
    python = folder / "bin/python"
    pip = (sys.executable, "-m", "pip", "--python", str(python))
    locked = ("--require-hashes", "--requirement", str(ROOT / "requirements/client.txt"))
    _run(*pip, "install", "--quiet", "--no-deps", *locked)
    _run(*pip, "install", "--quiet", "--no-deps", str(wheel))
    _run(*pip, "check")
    return python


def pack(folder: Path) -> Path:
    """Packs the client in TypeScript, which `make typescript` has built, into a folder. Returns the npm package."""
    _run(*_NPM, "pack", "--workspace", "clients/typescript", "--pack-destination", str(folder))
    (package,) = folder.glob("*.tgz")
    return package


def call_in_node(package: Path, folder: Path, endpoint: str) -> None:
    """Installs the npm package into an empty project in `folder`, and calls a pipeline from there."""
    folder.mkdir()
    (folder / "package.json").write_text('{"private": true, "type": "module"}')
    (folder / "call.js").write_text(_CALL_IN_NODE)
    _run(*_NPM, "install", "--prefix", str(folder), str(package))
    _run("node", str(folder / "call.js"), endpoint)


@contextmanager
def running(pipeline: Path) -> Generator[str]:
    """Runs a pipeline on this machine within the block, and yields the endpoint of its orchestrator.

    Raises RuntimeError if the pipeline does not become ready.
    """
    command = [str(Path(sys.executable).with_name("stagemesh")), "up", str(pipeline)]
    command += ["--port", "0", "--admin-port", "0", "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            events = (json.loads(line) for line in process.stdout)
            ready = next((event for event in events if event.get("event") == "ready"), None)
            if ready is None:
                raise RuntimeError(f"{pipeline} did not become ready; run `stagemesh up {pipeline}`")
            yield ready["endpoint"]
        finally:
            process.terminate()
            process.wait(_END_S)


def write_bill_of_materials(python: Path, file: Path) -> None:
    """Writes the packages of an environment as CycloneDX JSON."""
    _run(
        *(str(Path(sys.executable).with_name("cyclonedx-py")), "environment", "--output-reproducible"),
        *("--pyproject", str(ROOT / "pyproject.toml"), "--mc-type", "library", "--of", "JSON"),
        *("--output-file", str(file), str(python)),
    )


def _run(*command: str) -> None:
    subprocess.run(command, check=True, cwd=ROOT, timeout=_COMMAND_S)


def main(arguments: list[str]) -> int:
    """Builds and checks a release. Returns 1 if it must not be released."""
    problems = find_problems(ROOT)
    if shutil.which("npm") is None:
        problems.append("npm is not installed, so that the npm package cannot be built; install node with npm")
    for problem in problems:
        print(problem, file=sys.stderr)
    if problems:
        return 1
    folder = Path(arguments[0]) if arguments else ROOT / "out/release"
    wheel = build(folder)
    package = pack(folder)
    with tempfile.TemporaryDirectory() as temporary:
        python = install(wheel, Path(temporary) / "client")
        with running(PIPELINE) as endpoint:
            _run(str(python), "-I", "-c", _CALL, endpoint)
            call_in_node(package, Path(temporary) / "project", endpoint)
        write_bill_of_materials(python, folder / f"stagemesh-{read_version(ROOT)}.cdx.json")
    for file in sorted(folder.iterdir()):
        print(f"{file.relative_to(ROOT) if file.is_relative_to(ROOT) else file}: {file.stat().st_size:,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
