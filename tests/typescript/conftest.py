import pytest

from tests.client.conftest import orchestrator
from tests.typescript.nodes import require_programs

__all__ = ["orchestrator"]


@pytest.fixture(scope="session", autouse=True)
def _built() -> None:
    require_programs()
