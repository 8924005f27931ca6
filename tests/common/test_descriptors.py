"""Descriptors that packages register as entry points, and the errors of packages that do it wrongly."""

from pathlib import Path

import pytest

from stagemesh.common.errors import NotFoundError, NotReadyError
from stagemesh.common.plugins.descriptors import FunctionDescriptor
from stagemesh.common.plugins.entry_points import factory_problem, load_descriptor
from tests.rpc.call_errors import raises
from tests.system.added_transforms import write_package

GOOD = """\
from stagemesh.common.plugins.descriptors import FunctionDescriptor, Signature

DESCRIPTOR = FunctionDescriptor(Signature(), "good:Good")
NUMBER = 3


class Good:
    def open(self): ...
    def __call__(self): ...


class WithoutOpen:
    def __call__(self): ...
"""


def _install(folder: Path, package: str, *, entry: str, name: str = "tested", source: str = GOOD) -> None:
    (folder / f"{entry.partition(':')[0]}.py").write_text(source)
    write_package(folder, name=package, entry_points=f"[stagemesh.functions]\n{name} = {entry}\n")


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def test_a_descriptor_is_found_by_its_name(packages: Path) -> None:
    _install(packages, "pack", entry="found_module:DESCRIPTOR")
    assert load_descriptor(FunctionDescriptor, "tested").factory == "good:Good"
    with pytest.raises(NotFoundError, match=r"unknown function 'other'; known: .*tested"):
        load_descriptor(FunctionDescriptor, "other")


@pytest.mark.parametrize(
    ("entry", "source", "cause"),
    [
        ("failing:DESCRIPTOR", "raise OSError('no disk')", "entry point 'failing:DESCRIPTOR' .*: OSError: no disk"),
        ("lacking:DESCRIPTR", GOOD, "AttributeError: module 'lacking' has no attribute 'DESCRIPTR'"),
        ("numbered:NUMBER", GOOD, "numbered:NUMBER is int; it must be a FunctionDescriptor"),
        (
            "older:DESCRIPTOR",
            GOOD.replace('"good:Good")', '"good:Good", version=1)'),
            "TypeError: .*unexpected keyword argument 'version'",
        ),
    ],
)
def test_a_broken_descriptor_names_its_package(packages: Path, entry: str, source: str, cause: str) -> None:
    _install(packages, "pack", entry=entry, source=source)
    with raises(NotReadyError, reason="INVALID_DESCRIPTOR", match=f"function 'tested' of package pack 1.0: .*{cause}"):
        load_descriptor(FunctionDescriptor, "tested")


def test_a_name_that_two_packages_register_is_an_error(packages: Path) -> None:
    _install(packages, "one", entry="first_module:DESCRIPTOR")
    _install(packages, "two", entry="second_module:DESCRIPTOR")
    with pytest.raises(NotReadyError, match=r"registered more than once, by package (one|two) 1.0 and package"):
        load_descriptor(FunctionDescriptor, "tested")


@pytest.mark.parametrize(
    ("factory", "problem"),
    [
        ("factories:Good", ""),
        ("factories:Bad", "cannot be imported: AttributeError"),
        ("no_such_module:Good", "cannot be imported: ModuleNotFoundError: No module named 'no_such_module'"),
        ("factories:NUMBER", "is int, which cannot be called"),
        ("factories:WithoutOpen", "lacks the methods open"),
    ],
)
def test_a_factory_is_checked(packages: Path, factory: str, problem: str) -> None:
    (packages / "factories.py").write_text(GOOD)
    found = factory_problem(factory, methods=("open", "__call__"))
    assert problem in found
    assert bool(found) == bool(problem)
