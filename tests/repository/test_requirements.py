import re
import tomllib
from collections.abc import Iterator
from importlib.metadata import requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from requirements.lock import (
    CPU_EXTRAS,
    CUDA_EXTRAS,
    EXCLUDED_FROM_ORCHESTRATOR,
    GATEWAY_EXTRAS,
    JOBS_EXTRAS,
    ORCHESTRATOR_EXTRAS,
    normalize,
    read,
)

from tests.repository.commands import ROOT

_SETTINGS = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT, BUILD = _SETTINGS["project"], _SETTINGS["build-system"]["requires"]
EXTRAS = PROJECT["optional-dependencies"]
LOCKS = sorted(str(path.relative_to(ROOT / "requirements")) for path in (ROOT / "requirements").rglob("*.txt"))
# What installs packages: commands for developers, for CI, and in images.
INSTALLERS = [ROOT / "Makefile", ROOT / ".ci/run", *sorted((ROOT / "k8s/images").glob("*Dockerfile"))]


def runtime(extras: str) -> list[str]:
    """Returns the requirements of the project with these extras, which are separated by commas."""
    return [*PROJECT["dependencies"], *(line for extra in extras.split(",") for line in _lines(extra))]


def _lines(extra: str) -> Iterator[str]:
    for line in EXTRAS[extra]:
        requirement = Requirement(line)
        if requirement.name == PROJECT["name"]:
            for other in requirement.extras:
                yield from _lines(other)
        else:
            yield line


@pytest.mark.parametrize(
    ("lock", "wanted", "excluded"),
    [
        (["cpu.txt"], runtime(CPU_EXTRAS), frozenset()),
        (["cuda.txt"], runtime(CUDA_EXTRAS), frozenset()),
        (["orchestrator.txt"], runtime(ORCHESTRATOR_EXTRAS), EXCLUDED_FROM_ORCHESTRATOR),
        (["gateway.txt"], runtime(GATEWAY_EXTRAS), EXCLUDED_FROM_ORCHESTRATOR),
        (["jobs.txt"], runtime(JOBS_EXTRAS), EXCLUDED_FROM_ORCHESTRATOR),
        (["client.txt"], PROJECT["dependencies"], frozenset()),
        (["build.txt"], BUILD, frozenset()),
        (["cpu.txt", "dev.txt"], runtime("bench"), frozenset()),
        (["cpu.txt", "dev.txt"], runtime("jobs"), frozenset()),
        (["cpu.txt", "dev.txt"], EXTRAS["test"] + EXTRAS["dev"], frozenset()),
    ],
)
def test_the_lock_satisfies_the_project(lock: list[str], wanted: list[str], excluded: frozenset[str]) -> None:
    versions = {name: pin.version for file in lock for name, pin in read(file).items()}
    requirements = [item for item in map(Requirement, wanted) if normalize(item.name) not in excluded]
    unmet = [str(item) for item in requirements if not item.specifier.contains(versions.get(normalize(item.name), "0"))]
    assert not unmet


@pytest.mark.parametrize("lock", LOCKS)
def test_every_locked_package_has_hashes(lock: str) -> None:
    pins, lines = read(lock), (ROOT / "requirements" / lock).read_text().splitlines()
    packages = [line for line in lines if line and not line.startswith(("#", " "))]
    assert len(pins) == len(packages) > 0
    assert [name for name, pin in pins.items() if not pin.hashes] == []


def test_torch_has_the_hash_of_the_cpu_build_instead_of_the_cuda_build() -> None:
    cpu, cuda = read("cpu.txt")["torch"], read("cuda.txt")["torch"]
    assert cpu.version == cuda.version
    assert len(cpu.hashes - cuda.hashes) == len(cuda.hashes - cpu.hashes) == 1
    # The default builds for other platforms.
    assert cpu.hashes & cuda.hashes


@pytest.mark.parametrize("path", INSTALLERS, ids=lambda path: path.name)
def test_only_packages_with_hashes_and_the_project_itself_are_installed(path: Path) -> None:
    text = path.read_text().replace("\\\n", " ")
    text = text.replace("$(LOCKED)", "".join(re.findall(r"^LOCKED = (.*)", text, re.MULTILINE)))
    commands = re.findall(r"\bpip\b[^\n&|]*\binstall\b[^\n&|]*", text)
    allowed = re.compile(r".* --require-hashes --no-deps .*|.* --no-deps --no-build-isolation [\w/ -]+ \.\)?\s*")
    assert commands or path.name == "run"
    assert [command for command in commands if not allowed.fullmatch(command)] == []


@pytest.mark.parametrize("lock", ["orchestrator.txt", "client.txt", "build.txt"])
def test_the_lock_of_a_program_has_all_that_its_packages_need(lock: str) -> None:
    locked = read(lock)
    missing = {
        name: [item for item in map(Requirement, requires(name) or []) if _is_needed(item) and item.name not in locked]
        for name in locked
    }
    assert {name: [str(each) for each in items] for name, items in missing.items() if items} == {}


def _is_needed(requirement: Requirement) -> bool:
    requirement.name = normalize(requirement.name)
    return requirement.marker is None or requirement.marker.evaluate({"extra": ""})


def test_the_lock_contains_no_cuda_builds() -> None:
    locked = read("cpu.txt", "dev.txt")
    assert len(locked) > 200
    unwanted = re.compile(r"torchvision|torchaudio|torchcodec|triton|nvidia.*|cuda.*|vllm")
    assert [name for name in locked if unwanted.fullmatch(name)] == []


def test_no_package_is_locked_twice() -> None:
    assert not read("cpu.txt").keys() & read("dev.txt").keys()


def test_the_installed_torch_needs_no_cuda() -> None:
    assert [line for line in requires("torch") or [] if line.startswith(("nvidia", "cuda"))] == []
