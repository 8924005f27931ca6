"""The gate of the functions that the tests of the function engine run."""

from collections.abc import Iterator

import pytest

from tests.engines.functions import ENTERED, GATE


@pytest.fixture(autouse=True)
def _open_gate() -> Iterator[None]:
    """Opens the gate before each test and after it."""
    GATE.set()
    ENTERED.clear()
    yield
    GATE.set()
