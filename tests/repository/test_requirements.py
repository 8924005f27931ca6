import re
import tomllib
from collections.abc import Iterator
from importlib.metadata import requires

import pytest
from packaging.requirements import Requirement
from requirements.lock import (
    CPU_EXTRAS,
    CUDA_EXTRAS,
    EXCLUDED_FROM_ORCHESTRATOR,
    JOBS_EXTRAS,
    ORCHESTRATOR_EXTRAS,
    normalize,
    read,
)

from tests.repository.commands import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]


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
        (["jobs.txt"], runtime(JOBS_EXTRAS), EXCLUDED_FROM_ORCHESTRATOR),
        (["cpu.txt", "dev.txt"], runtime("bench"), frozenset()),
        (["cpu.txt", "dev.txt"], runtime("jobs"), frozenset()),
        (["cpu.txt", "dev.txt"], EXTRAS["test"] + EXTRAS["dev"], frozenset()),
    ],
)
def test_the_lock_satisfies_the_project(lock: list[str], wanted: list[str], excluded: frozenset[str]) -> None:
    versions = {name: version for file in lock for name, version in read(file).items()}
    requirements = [item for item in map(Requirement, wanted) if normalize(item.name) not in excluded]
    unmet = [str(item) for item in requirements if not item.specifier.contains(versions.get(normalize(item.name), "0"))]
    assert not unmet


def test_the_lock_of_an_orchestrator_has_all_that_its_packages_need() -> None:
    locked = read("orchestrator.txt")
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
