"""A running pipeline: `stagemesh up` as a child process, and the actions of a test on it."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import psutil
import pytest
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from stagemesh.cli.launcher.certificates import Authority
from stagemesh.client import Client
from stagemesh.rpc.channels import CHANNEL_OPTIONS, open_sync
from stagemesh.rpc.credentials import PROCESS, Credentials
from stagemesh.v1 import stage_pb2, stage_pb2_grpc

READY_TIMEOUT_S = 150.0
TLS_FOLDER = os.environ.get("STAGEMESH_TEST_TLS")
"""The folder of an authority, or None: `STAGEMESH_TEST_TLS=FOLDER pytest tests/speech` runs these tests by TLS."""

if TLS_FOLDER is not None:
    _NAMES = [f"{role}/tests" for role in ("client", "operator", "orchestrator")]
    PROCESS.use(Credentials(Authority(Path(TLS_FOLDER)).issue(Path(TLS_FOLDER) / "tests", _NAMES)))


class Replicas(ABC):
    """A running pipeline whose clients, loads and admin port a test uses."""

    endpoint: str = ""
    admin_endpoint: str = ""

    @abstractmethod
    def replicas(self) -> Sequence[str]:
        """Returns the names of all stage replicas."""

    @abstractmethod
    def endpoint_of(self, replica: str) -> str:
        """Returns the address of a replica."""

    def client(self) -> Client:
        """Returns a client of the orchestrator."""
        return Client(self.endpoint)

    def load(self, name: str) -> stage_pb2.WatchLoadResponse:
        """Asks a replica for its present load."""
        with open_sync(self.endpoint_of(name), PROCESS.credentials, CHANNEL_OPTIONS) as channel:
            call = stage_pb2_grpc.StageServiceStub(channel).WatchLoad(
                stage_pb2.WatchLoadRequest(), timeout=10, wait_for_ready=True
            )
            report = next(iter(call))
            call.cancel()
            return report

    def idle(self) -> bool:
        """Returns whether no stage has a step or uses memory of its arena."""
        loads = [self.load(name) for name in self.replicas()]
        return all(load.running == load.queued == load.arena_used_bytes == 0 for load in loads)


class Deployment(Replicas):
    """A running `up`, its endpoint, and the latest status of each of its processes."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        self.process = process
        self.statuses: dict[str, Mapping[str, Any]] = {}
        self.history: list[Mapping[str, Any]] = []
        self._changed = threading.Condition()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def runs(self, name: str, process_id: int) -> bool:
        """Returns whether a replica still has this process id."""
        return bool(self.statuses[name]["process_id"] == process_id)

    def process_id(self, name: str) -> int:
        """Returns the process id of a replica."""
        return int(self.statuses[name]["process_id"])

    def kill(self, name: str) -> None:
        """Sends SIGKILL to a replica's process."""
        psutil.Process(self.process_id(name)).kill()

    def wait(self, condition: Callable[[Self], bool], *, timeout_s: float = READY_TIMEOUT_S) -> None:
        """Waits until the condition holds. Fails after `timeout_s`, or if `up` ends first."""
        with self._changed:
            try:
                met = self._changed.wait_for(lambda: condition(self) or self.process.poll() is not None, timeout_s)
            except BaseException as exc:
                # The time limit of the test may end it first.
                exc.add_note(f"while the condition did not hold: {self.statuses}")
                raise
        assert met, f"the condition does not hold after {timeout_s} s: {self.statuses}"
        assert condition(self), f"`up` ended with {self.process.returncode}: {self.history[-3:]}"

    def all_ready(self) -> bool:
        """Returns whether every process is ready."""
        return bool(self.endpoint) and all(status["state"] == "ready" for status in self.statuses.values())

    def replicas(self) -> list[str]:
        return [name for name, status in self.statuses.items() if status["stage"]]

    def endpoint_of(self, replica: str) -> str:
        return str(self.statuses[replica]["endpoint"])

    def scrape(self, name: str) -> dict[str, Metric]:
        """Returns the metrics of a process by name. The pipeline runs with `--metrics`."""
        endpoint = next(each["metrics_endpoints"][name] for each in self.history if each.get("event") == "ready")
        with urllib.request.urlopen(f"http://{endpoint}/metrics", timeout=10) as answer:
            return {metric.name: metric for metric in text_string_to_metric_families(answer.read().decode())}

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            document = json.loads(line)
            with self._changed:
                self.history.append(document)
                if document.get("event") == "ready":
                    self.endpoint, self.admin_endpoint = document["endpoint"], document["admin_endpoint"]
                elif document.get("event") == "process":
                    self.statuses[document["name"]] = document
                self._changed.notify_all()
        with self._changed:
            self._changed.notify_all()


@contextmanager
def deployed(
    pipeline: str | Path,
    *arguments: str,
    until: Callable[[Deployment], bool] = Deployment.all_ready,
    ready_s: float = READY_TIMEOUT_S,
    stagemesh: Sequence[str] = (),
    home: Path | None = None,
) -> Iterator[Deployment]:
    """Runs `stagemesh up`, yields when it is ready, and stops it. Asserts that it exits with status 0.

    `until` is the condition for yielding. `stagemesh` is the command line that starts the program, by default that of
    the environment that runs the tests. `home` is its folder for models and logs, by
    default the folder of this process.
    """
    program = stagemesh or (str(Path(sys.executable).with_name("stagemesh")),)
    command = [*program, "up", str(pipeline), "--port", "0", "--json"]
    if TLS_FOLDER is not None:
        command += ["--tls", TLS_FOLDER]
    environment = None if home is None else {**os.environ, "STAGEMESH_HOME": str(home)}
    process = subprocess.Popen([*command, *arguments], stdout=subprocess.PIPE, text=True, env=environment)
    deployment = Deployment(process)
    try:
        deployment.wait(until, timeout_s=ready_s)
        yield deployment
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            status = process.wait(timeout=30)
        finally:
            process.kill()
            process.stdout.close() if process.stdout else None
    assert status == 0, f"`up` ended with status {status}"


def deployed_for_module(write: Callable[[Path], Path], *arguments: str) -> Any:
    """Returns a fixture for the tests of a module: a deployment of the pipeline that `write` writes to a new folder.

    `arguments` are further arguments of `stagemesh up`.
    """

    @pytest.fixture(scope="module")
    def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
        with deployed(write(tmp_path_factory.mktemp("pipeline")), *arguments) as up:
            yield up

    return running


def metric_value(metrics: Mapping[str, Metric], sample: str, **labels: str) -> float:
    """Returns the sum of the samples with this name and these labels, or 0 if there is none."""
    samples = (each for metric in metrics.values() for each in metric.samples if each.name == sample)
    return sum(each.value for each in samples if labels.items() <= each.labels.items())


def eventually(condition: Callable[[], bool], *, timeout_s: float) -> float:
    """Waits until a condition holds and returns the seconds that it took. Fails after `timeout_s`."""
    began_s = time.monotonic()
    while not condition():
        assert time.monotonic() - began_s < timeout_s, f"the condition does not hold after {timeout_s} s"
        time.sleep(0.01)
    return time.monotonic() - began_s
