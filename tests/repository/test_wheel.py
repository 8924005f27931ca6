import zipfile
from pathlib import Path

import pytest

from tests.repository.commands import ROOT, SOURCES

PACKAGES = sorted(path.name for source in SOURCES for path in (ROOT / source / "stagemesh").iterdir() if path.is_dir())


@pytest.fixture(scope="module")
def wheel(built_wheel: Path) -> zipfile.Path:
    return zipfile.Path(built_wheel)


@pytest.mark.parametrize("package", PACKAGES)
def test_the_wheel_contains_every_package_with_its_types(wheel: zipfile.Path, package: str) -> None:
    assert (wheel / "stagemesh" / package / "py.typed").exists()


@pytest.mark.parametrize(
    ("folder", "kind", "one"),
    [
        ("pipeline/stagemesh/pipeline/built_in", "*.yaml", "speech.yaml"),
        ("gateway/stagemesh/gateway/page", "*.*", "index.html"),
        ("protos/stagemesh/v1", "*.proto", "orchestrator.proto"),
    ],
)
def test_the_wheel_contains_data(wheel: zipfile.Path, folder: str, kind: str, one: str) -> None:
    root, _, packed = folder.partition("/")
    files = {str(path.relative_to(ROOT / root)) for path in (ROOT / folder).rglob(kind)}
    assert f"{packed}/{one}" in files <= set(wheel.root.namelist())


def test_the_namespace_package_has_no_init(wheel: zipfile.Path) -> None:
    assert not (wheel / "stagemesh" / "__init__.py").exists()


def test_the_wheel_contains_nothing_else(wheel: zipfile.Path) -> None:
    top = {path.name for path in wheel.iterdir() if not path.name.endswith(".dist-info")}
    assert top == {"stagemesh"}
    assert {path.name for path in (wheel / "stagemesh").iterdir()} == set(PACKAGES)


def sources(package: Path) -> set[str]:
    return {str(path.relative_to(package.parent)) for path in package.rglob("*.py")}


@pytest.mark.parametrize("root", ["protos", "common", "connectors", "services", "orchestrator", "gateway", "jobs"])
def test_the_wheel_contains_every_module(wheel: zipfile.Path, root: str) -> None:
    packed = set(wheel.root.namelist())
    assert sources(ROOT / root / "stagemesh") <= packed
