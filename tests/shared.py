"""Deployments that several files of tests share: one start of `stagemesh up` for all of them.

The files form a group in tests/scheduling.py, so that one process runs them. After each file, all replicas must be
ready and idle again. After the group, the deployment is stopped.
"""

import os
from collections.abc import Callable, Generator, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deployment import Deployment, deployed, eventually
from tests.scheduling import group_of
from tests.system.pipelines import relays
from tests.traces import TRACE_VARIABLES, TraceReceiver, receiving_traces

_TINY_OMNI = Path(__file__).parents[1] / "examples/qwen3-omni/tiny.yaml"


class SharedDeployments:
    """Starts each shared deployment when a file first uses it, and stops all of them after the group."""

    def __init__(self) -> None:
        self._running = ExitStack()
        self._found = dict[str, Any]()

    def enter(self, name: str, start: Callable[[], AbstractContextManager[Any]]) -> Any:
        """Returns the running deployment with this name. Starts it if it does not run."""
        if name not in self._found:
            self._found[name] = self._running.enter_context(start())
        return self._found[name]

    def stop(self) -> None:
        """Stops all deployments that run."""
        self._found.clear()
        self._running.close()


_SHARED = SharedDeployments()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, Any, Any]:
    """Stops the shared deployments after the last test of their group."""
    try:
        return (yield)
    finally:
        if nextitem is None or group_of(nextitem.nodeid) != group_of(item.nodeid):
            _SHARED.stop()


@pytest.fixture(scope="module")
def omni_up(tiny_qwen3_omni: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """A deployment of examples/qwen3-omni/tiny.yaml, of which a client may ask tokens and codes, too.

    A talker of 1,536 tokens, small batches and small chunks show that tokens and audio depend on none of these.
    """

    # Imports torch, which most tests do without.
    from tests.models.qwen3_omni.deployment import with_torchvision

    @contextmanager
    def start() -> Iterator[Deployment]:
        pipeline = yaml.safe_load(_TINY_OMNI.read_text())
        for stage in ("thinker", "talker", "code2wav"):
            pipeline["stages"][stage]["model"] = str(tiny_qwen3_omni)
        pipeline["stages"]["thinker"]["options"]["max_num_batched_tokens"] = 64
        pipeline["stages"]["talker"]["options"] |= {"max_num_batched_tokens": 64, "max_model_len": 1536}
        pipeline["edges"][-1]["chunk"] = {"frames": 8, "initial_frames": 3}
        pipeline["outputs"] |= {"tokens": "thinker.token_ids", "codes": "talker.codes"}
        file = tmp_path_factory.mktemp("omni") / "omni.yaml"
        file.write_text(yaml.safe_dump(pipeline, sort_keys=False))
        with deployed(file, ready_s=300) as up:
            yield up

    with with_torchvision():
        yield from _released(_SHARED.enter("omni", start))


@pytest.fixture(scope="module")
def relays_up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """A deployment of source → relay → frames. Each request lasts for 30 steps of 30 ms."""

    def start() -> AbstractContextManager[Deployment]:
        return deployed(relays(tmp_path_factory.mktemp("relays"), steps=30, step_s=0.03, size_bytes=0))

    yield from _released(_SHARED.enter("relays", start))


@pytest.fixture(scope="module")
def split_up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """A deployment of a model on vLLM as prefill and decode replicas, and of the same model in one stage."""

    def start() -> AbstractContextManager[Deployment]:
        # Imports torch, which most tests do without.
        from tests.system.split_stage import write_pipeline

        return deployed(write_pipeline(tmp_path_factory.mktemp("pair")), ready_s=300)

    yield from _released(_SHARED.enter("split", start))


@pytest.fixture(scope="module")
def speech_traces() -> Iterator[TraceReceiver]:
    """Receives the traces of `speech_up`."""
    yield _SHARED.enter("speech traces", receiving_traces)
    # The deployment has them. The next file of the group begins without them.
    for variable in TRACE_VARIABLES:
        os.environ.pop(variable, None)


@pytest.fixture(scope="module")
def speech_up(speech_traces: TraceReceiver) -> Iterator[Deployment]:
    """A deployment of the built-in pipeline `speech`, of which each edge has another connector."""
    del speech_traces  # must receive traces before the pipeline starts
    connectors = ("--set", "edges.thinker->acoustic.connector=shm", "--set", "edges.acoustic->vocoder.connector=grpc")
    yield from _released(_SHARED.enter("speech", lambda: deployed("speech", *connectors)))


@pytest.fixture(scope="module")
def jobs_up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """A deployment of the pipeline of tests/jobs/servers.py, with a job server. Tests may start further ones."""

    from tests.jobs.servers import write_pipeline

    def start() -> AbstractContextManager[Deployment]:
        folder = tmp_path_factory.mktemp("spoken")
        return deployed(write_pipeline(folder), "--jobs", home=folder / "home")

    yield from _released(_SHARED.enter("jobs", start))


def _released(up: Deployment) -> Iterator[Deployment]:
    yield up
    up.wait(Deployment.all_ready, timeout_s=300)
    eventually(up.idle, timeout_s=30)
