"""What several files of tests of the orchestrator need."""

import gc
from collections.abc import Iterator

import pytest


@pytest.fixture
def no_collector() -> Iterator[None]:
    """What has no reference left goes at once; circles stay."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()
