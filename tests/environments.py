"""Environments as users install them: the wheel, and one environment for each set of extras."""

import sys
import zipfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from tests.repository.commands import run
from tests.repository.installed import make_environment


@pytest.fixture(scope="session")
def built_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder))
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory, built_wheel: Path) -> Callable[..., Path]:
    """Returns a function for the interpreter after `pip install 'stagemesh[EXTRA,...]'` of the wheel.

    Tests share the environments, and must not change them.
    """
    unpacked = tmp_path_factory.mktemp("unpacked")
    zipfile.ZipFile(built_wheel).extractall(unpacked)

    @cache
    def make(*extras: str) -> Path:
        return make_environment(
            tmp_path_factory.mktemp("-".join(("stagemesh", *extras))), extras=extras, wheel=unpacked
        )

    return make
