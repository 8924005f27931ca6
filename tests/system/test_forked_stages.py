"""Stages on vLLM that `stagemesh up` forks from one process: their engine cores, failures and restarts."""

import psutil
import pytest

from stagemesh.services.engines.vllm import DESCRIPTOR
from tests.deployment import Deployment

pytestmark = [
    pytest.mark.timeout(700),
    pytest.mark.skipif(DESCRIPTOR.preload is None, reason="only the build of vLLM for CPUs is forked"),
]


def _stage(up: Deployment, name: str) -> psutil.Process:
    return psutil.Process(up.process_id(name))


def _restarted(up: Deployment, name: str, process: psutil.Process) -> psutil.Process:
    """Waits until another process of a stage is ready, and returns it."""
    up.wait(lambda running: not running.runs(name, process.pid) and running.all_ready(), timeout_s=300)
    return _stage(up, name)


def test_stages_and_engine_cores_have_the_imports_of_one_process(split_up: Deployment) -> None:
    one, two = (_stage(split_up, name) for name in ("whole-0", "thinker-0"))
    assert one.ppid() == two.ppid() != split_up.process.pid
    ports = {int(status["endpoint"].rpartition(":")[2]) for status in split_up.statuses.values()}
    for stage in (one, two):
        (core,) = stage.children()
        # vLLM's core listens on ports of its own.
        assert not ports & {each.laddr.port for each in core.net_connections("tcp")}


def test_a_killed_engine_core_restarts_its_stage_alone(split_up: Deployment) -> None:
    one, two = _stage(split_up, "whole-0"), _stage(split_up, "thinker-0")
    one.children()[0].kill()
    again = _restarted(split_up, "whole-0", one)
    assert again.ppid() == two.ppid()
    assert _stage(split_up, "thinker-0") == two
    with split_up.client() as client:
        assert client.generate("hello", outputs=["whole-text"]).result().finished


def test_no_engine_core_outlives_a_killed_stage(split_up: Deployment) -> None:
    two = _stage(split_up, "thinker-0")
    cores = two.children()
    two.kill()
    assert psutil.wait_procs(cores, timeout=3)[1] == []
    _restarted(split_up, "thinker-0", two)


def test_a_killed_fork_server_restarts_all_stages(split_up: Deployment) -> None:
    one, two = _stage(split_up, "whole-0"), _stage(split_up, "thinker-0")
    server = one.parent()
    assert server is not None
    server.kill()
    assert _restarted(split_up, "whole-0", one).ppid() == split_up.process.pid
    assert _restarted(split_up, "thinker-0", two).ppid() == split_up.process.pid
