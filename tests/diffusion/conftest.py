"""Tiny models that the tests of the diffusion engine share."""

import os
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.diffusion.tiny.pipelines import WRITERS
from tests.engines.torch_threads import one_torch_thread

__all__ = ["one_torch_thread"]


@pytest.fixture(scope="module", autouse=True)
def variable_of_inductor() -> Iterator[None]:
    """Removes a variable that torch sets when it compiles a function."""
    yield
    os.environ.pop("_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR", None)


@pytest.fixture(scope="session")
def tiny_diffusion(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Returns the folder of a tiny model by its name. All tests of a process share it, and must not write to it."""
    return cache(lambda name: WRITERS[name](tmp_path_factory.mktemp(name)))


@pytest.fixture(scope="session")
def qwen_image(tiny_diffusion: Callable[[str], Path]) -> Path:
    """The folder of the tiny Qwen-Image, which all tests of a process share. They must not write to it."""
    return tiny_diffusion("qwen-image")
