import pytest

from tests.stage.gated_engine import GatedEngine


@pytest.fixture
def engine() -> GatedEngine:
    return GatedEngine()
