import sys
from pathlib import Path

import pytest

from tests.repository.commands import run


@pytest.fixture(scope="session")
def built_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    run(sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder))
    return next(folder.glob("*.whl"))
