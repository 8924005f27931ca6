import json
import shutil
import tarfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.module_fixtures import made_for_module
from tests.repository.commands import ROOT, run
from tools.release import build, find_problems, read_version, write_bill_of_materials

VERSION = read_version(ROOT)
RELEASED = f"# Changelog\n\n## [Unreleased]\n\n## [{VERSION}] - 2026-11-27\n"


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """Returns a folder with the files that must have the version, and a changelog that has it."""
    for name in ("pyproject.toml", "k8s/chart/Chart.yaml", "clients/typescript/package.json"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "CHANGELOG.md").write_text(RELEASED)
    return tmp_path


release = made_for_module(lambda folder: build(folder / "files").parent)


def test_a_changelog_with_the_version_can_be_released(repository: Path) -> None:
    assert find_problems(repository) == []


@pytest.mark.parametrize("section", ["", "## [9.9.9] - 2026-11-27\n", f"## [{VERSION}]\n"])
def test_a_changelog_without_a_dated_section_is_a_problem(repository: Path, section: str) -> None:
    (repository / "CHANGELOG.md").write_text(f"## [Unreleased]\n\n{section}")
    (problem,) = find_problems(repository)
    assert f"## [{VERSION}] - YYYY-MM-DD" in problem


def test_a_chart_of_another_version_is_a_problem(repository: Path) -> None:
    chart = repository / "k8s/chart/Chart.yaml"
    chart.write_text(chart.read_text().replace(VERSION, "9.9.9"))
    assert [problem.split()[1] for problem in find_problems(repository)] == ["version", "appVersion"]


def test_an_npm_package_of_another_version_is_a_problem(repository: Path) -> None:
    package = repository / "clients/typescript/package.json"
    package.write_text(package.read_text().replace(VERSION, "9.9.9"))
    (problem,) = find_problems(repository)
    assert f"npm version {VERSION}" in problem


@pytest.mark.parametrize("file", ["Chart.yaml", "package.json"])
def test_the_chart_and_the_npm_package_have_the_version_of_the_project(file: str) -> None:
    assert not [problem for problem in find_problems(ROOT) if file in problem]


_LINK = "tools/installed/stagemesh/stage_conformance/vectors"


def test_the_wheel_of_the_sdist_equals_that_of_the_repository(release: Path, built_wheel: Path) -> None:
    (wheel,) = release.glob("*.whl")
    assert set(zipfile.ZipFile(wheel).namelist()) == set(zipfile.ZipFile(built_wheel).namelist())


def test_the_sdist_contains_the_files_that_git_does_not_ignore(release: Path) -> None:
    (sdist,) = release.glob("*.tar.gz")
    with tarfile.open(sdist) as files:
        packed = {name.partition("/")[2] for name in files.getnames()}
    kept = set(run("git", "ls-files", "--cached", "--others", "--exclude-standard").splitlines())
    # The conformance tool has the test vectors of the protocol by a link, which the archive follows.
    linked = {f"{_LINK}/{path.name}" for path in (ROOT / "protos" / "vectors").iterdir()}
    assert packed - kept == {"PKG-INFO", *linked}
    assert {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "docs/architecture.md"} <= packed


def test_the_bill_of_materials_names_the_packages_of_a_client(tmp_path: Path, environment: Callable[..., Path]) -> None:
    write_bill_of_materials(environment(), tmp_path / "client.cdx.json")
    bill = json.loads((tmp_path / "client.cdx.json").read_text())
    named = {component["name"] for component in bill["components"]}
    assert bill["metadata"]["component"]["version"] == VERSION
    assert {"grpcio", "numpy", "protobuf"} <= named
    assert not named & {"typer", "torch", "pip"}
