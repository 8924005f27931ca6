import pytest

from tests.typescript.nodes import require_programs


@pytest.fixture(scope="session", autouse=True)
def _built() -> None:
    require_programs()
