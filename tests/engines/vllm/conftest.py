"""Forks the engine cores of the tests from one process that has imported vLLM. Otherwise each core imports it."""

import multiprocessing
from collections.abc import Iterator
from importlib import import_module
from multiprocessing.context import ForkServerContext, ForkServerProcess
from typing import Any

import pytest

from stagemesh.common.process.settings import replace_variables, variables


class _Core(ForkServerProcess):
    """A forked process with the environment variables of the process that starts it."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._variables = variables()

    def run(self) -> None:
        replace_variables(self._variables)
        super().run()


class _Context(ForkServerContext):
    Process = _Core


@pytest.fixture(scope="module", autouse=True)
def _own_variables() -> Iterator[None]:
    """Removes the variables that an engine sets for the libraries of its process."""
    before = variables()
    yield
    replace_variables(before)


@pytest.fixture(scope="session", autouse=True)
def _forked_cores() -> Iterator[None]:
    multiprocessing.set_forkserver_preload(["tests.engines.vllm.imported_cores"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(import_module("vllm.v1.engine.utils"), "get_mp_context", _Context)
        yield
