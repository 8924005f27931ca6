"""Process-wide state of torch that the tests of the diffusion engine change and restore."""

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture(scope="module", autouse=True)
def one_torch_thread() -> Iterator[None]:
    """Computes with one thread in this thread, in the engines' threads and in processes that the tests start.

    The bits of an image depend on the number of torch's threads. `__call__` runs on the thread of the test, and the
    engine on its own.
    """
    before = torch.get_num_threads()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        torch.set_num_threads(1)
        yield
    torch.set_num_threads(before)
