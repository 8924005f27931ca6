"""The engine that tests of texts share, and the process that forks the engine cores of all tests.

That process has imported vLLM. Otherwise, each core would import it.
"""

import multiprocessing
from collections.abc import AsyncIterator, Iterator
from importlib import import_module
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from pydantic import JsonValue

from stagemesh.common.process.settings import replace_variables, variables
from stagemesh.services.engines.vllm.engine import VllmEngine
from tests.engines.vllm.engines import started
from tests.engines.vllm.tiny_model import MODEL_LAYERS, OPTIONS, TOOLS_TEMPLATE, write_real_model, write_tiny_model


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


@pytest.fixture(scope="session")
def text_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model whose chat template accepts tools."""
    return write_tiny_model(tmp_path_factory.mktemp("tiny"), template=TOOLS_TEMPLATE)


@pytest.fixture(scope="session")
def deep_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with several layers, whose hidden states tests compare with the hidden states of transformers."""
    return write_real_model(tmp_path_factory.mktemp("deep"), layers=MODEL_LAYERS)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def text_engine(text_model: Path) -> AsyncIterator[VllmEngine]:
    """An engine for at most 8 requests at a time, which emits a checkpoint after each token.

    All tests of a process share it. They must leave no request behind.
    """
    # vLLM's attention in bfloat16 ends with an illegal instruction on some virtual machines with AMX.
    options: dict[str, JsonValue] = {**OPTIONS, "dtype": "float32", "checkpoint_tokens": 1, "max_num_seqs": 8}
    before = variables()
    async with started(text_model, **options) as engine:
        replace_variables(before)
        yield engine
        await engine.close()
