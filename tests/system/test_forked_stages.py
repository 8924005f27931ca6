"""Stages on vLLM that `stagemesh up` forks from one process: their engine cores, failures and restarts."""

from collections.abc import Iterator

import psutil
import pytest

from stagemesh.services.engines.vllm import DESCRIPTOR
from tests.deployment import Deployment, deployed
from tests.engines.vllm.tiny_model import write_tiny_model

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(DESCRIPTOR.preload is None, reason="only the build of vLLM for CPUs is forked"),
]

PIPELINE = """\
pipeline: forked
main_stage: one
stages:
  one: {{engine: vllm, model: {model}, options: {options}}}
  two: {{engine: vllm, model: {model}, options: {options}}}
edges: []
outputs: {{first: one.text, second: two.text}}
"""
OPTIONS = "{load_format: dummy, kv_cache_memory_bytes: 8388608}"


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    folder = tmp_path_factory.mktemp("forked")
    model = write_tiny_model(folder / "model")
    (folder / "forked.yaml").write_text(PIPELINE.format(model=model, options=OPTIONS))
    with deployed(folder / "forked.yaml") as running:
        yield running


def _stage(up: Deployment, name: str) -> psutil.Process:
    return psutil.Process(up.process_id(name))


def _restarted(up: Deployment, name: str, process: psutil.Process) -> psutil.Process:
    """Waits until another process of a stage is ready, and returns it."""
    up.wait(lambda running: not running.runs(name, process.pid) and running.all_ready())
    return _stage(up, name)


def test_stages_and_engine_cores_have_the_imports_of_one_process(up: Deployment) -> None:
    one, two = (_stage(up, name) for name in ("one-0", "two-0"))
    assert one.ppid() == two.ppid() != up.process.pid
    ports = {int(status["endpoint"].rpartition(":")[2]) for status in up.statuses.values()}
    for stage in (one, two):
        (core,) = stage.children()
        # vLLM's core listens on ports of its own.
        assert not ports & {each.laddr.port for each in core.net_connections("tcp")}


def test_a_killed_engine_core_restarts_its_stage_alone(up: Deployment) -> None:
    one, two = _stage(up, "one-0"), _stage(up, "two-0")
    one.children()[0].kill()
    again = _restarted(up, "one-0", one)
    assert again.ppid() == two.ppid()
    assert _stage(up, "two-0") == two
    with up.client() as client:
        assert client.generate("hello", outputs=["first"]).result().finished


def test_no_engine_core_outlives_a_killed_stage(up: Deployment) -> None:
    two = _stage(up, "two-0")
    cores = two.children()
    two.kill()
    assert psutil.wait_procs(cores, timeout=3)[1] == []
    _restarted(up, "two-0", two)


def test_a_killed_fork_server_restarts_all_stages(up: Deployment) -> None:
    one, two = _stage(up, "one-0"), _stage(up, "two-0")
    server = one.parent()
    assert server is not None
    server.kill()
    assert _restarted(up, "one-0", one).ppid() == up.process.pid
    assert _restarted(up, "two-0", two).ppid() == up.process.pid
