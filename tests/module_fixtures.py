"""Fixtures that a module of tests makes once."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest


def made_for_module(make: Callable[[Path], object]) -> Any:
    """Returns a fixture for the tests of a module: what `make` makes in a new folder."""

    @pytest.fixture(scope="module")
    def made(tmp_path_factory: pytest.TempPathFactory) -> object:
        return make(tmp_path_factory.mktemp("made"))

    return made
