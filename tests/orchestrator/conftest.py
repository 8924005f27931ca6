"""Fixtures for several test files of the orchestrator."""

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Disables the garbage collector: objects without references are freed at once, and reference cycles are not."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()
