"""Tiny models that the tests of the diffusion engine share, and the state of torch that they change and restore."""

from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest
import torch

from tests.diffusion.tiny.pipelines import WRITERS


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


@pytest.fixture(scope="session")
def tiny_diffusion(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Returns the folder of a tiny model by its name. All tests of a process share it, and must not write to it."""
    return cache(lambda name: WRITERS[name](tmp_path_factory.mktemp(name)))


@pytest.fixture(scope="session")
def qwen_image(tiny_diffusion: Callable[[str], Path]) -> Path:
    """The folder of the tiny Qwen-Image, which all tests of a process share. They must not write to it."""
    return tiny_diffusion("qwen-image")
