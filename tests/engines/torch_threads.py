"""A fixture for tests that compute with torch in their own process."""

import sys
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module", autouse=True)
def one_torch_thread() -> Iterator[None]:
    """Computes with one thread in this thread, in the engines' threads and in processes that the tests start.

    The bits of a result depend on the number of torch's threads. A reference implementation runs on the thread of the
    test, and an engine on its own. Does nothing if the file of tests has not imported torch.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        yield
        return
    before = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        torch.set_num_threads(1)
        yield
    torch.set_num_threads(before)
