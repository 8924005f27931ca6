"""Disturbs the release under load, and counts requests that failed or had wrong outputs.

An output is wrong if its bytes differ from those that the same prompt and seed gave before the first disturbance.
"""

import itertools
import json
import random
import signal
import sys
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from k8s.cluster.cluster import REPOSITORY
from k8s.cluster.release import Release
from k8s.cluster.shell import wait_until

_GROUPS = ("thinker", "voice")
_WORKLOADS = ("orchestrator", *_GROUPS)
_READY_S = 300
# A changed option is a new generation of the same topology, and a changed edge is another topology. Neither changes the
# outputs.
_OPTION = "pipeline.stages.thinker.options.max_model_len"
_EDGE = "pipeline.edges"
_EDGES = (
    '[{"from": "thinker", "to": "acoustic", "transform": "text.sentences", "connector": "CONNECTOR"},'
    ' {"from": "acoustic", "to": "vocoder", "connector": "shm", "chunk": {"frames": 64, "initial_frames": 16}}]'
)


@dataclass(frozen=True)
class Phase:
    """The requests that ended during one disturbance."""

    name: str
    seconds: float
    requests: int
    failed: int
    wrong: int
    slowest_s: float


class Campaign:
    """The disturbances of a release, with a log of its own."""

    def __init__(self, release: Release, folder: Path, *, clients: int, seed: int) -> None:
        self._release = release
        self._cluster = release.cluster
        self._folder = folder
        self._clients = clients
        self._random = random.Random(seed)
        self._phases: list[tuple[str, float, float]] = []
        self._settings = {_OPTION: "2048", _EDGE: _EDGES.replace("CONNECTOR", "auto")}
        self._log = (folder / "campaign.log").open("a")

    def run(self, *, minutes: float) -> list[Phase]:
        """Repeats the disturbances until the time is up and each has run. Returns the counts of each."""
        disturbances = (self._upgrade_option, self._drain, self._delete_pods, self._upgrade_edge, self._partition)
        lines = self._folder / "requests.jsonl"
        lines.unlink(missing_ok=True)
        self._balance()
        with self._load(lines):
            begun_s = time.time()
            with self._phase("quiet"):
                self._wait_for_requests(lines, count=12)
            with self._phase("helm test"):
                self._say(self._release.test().splitlines()[-1])
            for number, disturb in enumerate(itertools.cycle(disturbances)):
                if number >= len(disturbances) and time.time() >= begun_s + 60 * minutes:
                    break
                with self._phase(disturb.__name__.strip("_").replace("_", " ")):
                    disturb()
                with self._phase("settle"):
                    self._balance()
        return self._evaluate(lines)

    def _upgrade_option(self) -> None:
        self._settings[_OPTION] = {"2048": "1984", "1984": "2048"}[self._settings[_OPTION]]
        self._upgrade()

    def _upgrade_edge(self) -> None:
        auto, grpc = (_EDGES.replace("CONNECTOR", connector) for connector in ("auto", "grpc"))
        self._settings[_EDGE] = grpc if self._settings[_EDGE] == auto else auto
        self._upgrade()

    def _upgrade(self) -> None:
        self._release.upgrade(*(f"{key}={value}" for key, value in self._settings.items()))
        for workload in _WORKLOADS:
            self._kubectl("rollout", "status", f"deployment/{self._release.name}-{workload}", f"--timeout={_READY_S}s")

    def _drain(self) -> None:
        node = self._random.choice(self._cluster.nodes)
        self._say(f"draining {node.name}")
        self._cluster.drain(node, limit_s=_READY_S)
        self._wait_ready()
        self._cluster.uncordon(node)

    def _delete_pods(self) -> None:
        """Deletes pods of two workloads at the same time, three times."""
        for _ in range(3):
            chosen = [self._random.choice(self._pods(each)) for each in self._random.sample(_WORKLOADS, 2)]
            pods = [pod["metadata"]["name"] for pod in chosen]
            force = self._random.random() < 0.5
            self._say(f"deleting {' and '.join(pods)}{' by force' if force else ''}")
            self._kubectl("delete", "pod", *pods, "--wait=false", *(["--grace-period=0", "--force"] if force else []))
            self._wait_ready()

    def _partition(self) -> None:
        node = self._random.choice(self._cluster.nodes)
        self._say(f"disconnecting {node.name}")
        node.cut(connected=False)
        try:
            wait_until(lambda: node.name not in self._cluster.ready_nodes(), 120, f"{node.name} to be NotReady")
            self._say(f"{node.name} is NotReady")
            time.sleep(20)
        finally:
            node.cut(connected=True)
        self._say(f"{node.name} is connected again")
        wait_until(lambda: node.name in self._cluster.ready_nodes(), 120, f"{node.name} to be Ready")
        self._wait_ready()

    def _balance(self) -> None:
        """Has each workload use both nodes again, as a descheduler does."""
        for workload in _WORKLOADS:
            pods = self._pods(workload)
            if len({pod["spec"]["nodeName"] for pod in pods}) == 1:
                self._kubectl("delete", "pod", pods[0]["metadata"]["name"], "--wait=false")
            self._wait_ready()

    def _pods(self, workload: str) -> list[dict[str, Any]]:
        """Returns the pods of a workload that are not being deleted."""
        label = (
            "app.kubernetes.io/component=orchestrator"
            if workload == "orchestrator"
            else f"stagemesh.dev/group={workload}"
        )
        return [pod for pod in self._release.pods(label) if "deletionTimestamp" not in pod["metadata"]]

    def _wait_ready(self) -> None:
        wait_until(lambda: all(map(self._is_ready, _WORKLOADS)), _READY_S, "all pods to be ready")

    def _is_ready(self, workload: str) -> bool:
        ready = [
            pod for pod in self._pods(workload) if any(map(_is_ready_condition, pod["status"].get("conditions", ())))
        ]
        return len(ready) == 2

    @contextmanager
    def _load(self, lines: Path) -> Generator[None]:
        command = ("env", f"--chdir={REPOSITORY}", sys.executable, "-m", "k8s.cluster.load")
        certificate = [str(self._release.certificate)] if self._release.certificate else []
        process = self._cluster.control_plane.host.start_outside(
            "load", *command, self._release.address(), str(lines), str(self._clients), *certificate
        )
        try:
            yield
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(timeout=_READY_S)

    @contextmanager
    def _phase(self, name: str) -> Generator[None]:
        self._say(f"--- {name}")
        begun_s = time.time()
        yield
        self._phases.append((name, begun_s, time.time()))

    def _wait_for_requests(self, lines: Path, *, count: int) -> None:
        wait_until(lambda: len(lines.read_text().splitlines()) >= count, _READY_S, f"{count} requests")

    def _evaluate(self, lines: Path) -> list[Phase]:
        requests = [json.loads(line) for line in lines.read_text().splitlines()]
        quiet_end_s = self._phases[0][2]
        expected: dict[str, str] = {}
        for request in requests:
            if request["ended_s"] <= quiet_end_s and request["digest"]:
                expected.setdefault(request["prompt"], request["digest"])
        for request in requests:
            request["wrong"] = request["digest"] is not None and request["digest"] != expected.get(request["prompt"])
            if request["error"] or request["wrong"]:
                self._say(f"failed: {request}")
        spans = [(name, begun, ended) for name, begun, ended in self._phases]
        # Requests that ran at the end of the last phase belong to it.
        spans[-1] = (*spans[-1][:2], float("inf"))
        found: dict[str, list[Phase]] = {}
        for (name, begun, ended), (_, _, real_end) in zip(spans, self._phases, strict=True):
            ended_then = [request for request in requests if begun <= request["ended_s"] < ended]
            found.setdefault(name, []).append(_phase(name, real_end - begun, ended_then))
        return [_sum(phases) for phases in found.values()]

    def _kubectl(self, *arguments: str) -> str:
        return self._cluster.control_plane.kubectl(*arguments)

    def _say(self, text: str) -> None:
        line = f"{time.strftime('%H:%M:%S')} {text}"
        print(line, flush=True)
        print(line, file=self._log, flush=True)


def report(phases: list[Phase], folder: Path, facts: dict[str, object]) -> bool:
    """Prints a table and writes `campaign.json`. Returns whether no request failed and none was wrong."""
    total = Phase(
        "total",
        sum(phase.seconds for phase in phases),
        sum(phase.requests for phase in phases),
        sum(phase.failed for phase in phases),
        sum(phase.wrong for phase in phases),
        max(phase.slowest_s for phase in phases),
    )
    row: Callable[..., str] = "{:<16} {:>8} {:>8} {:>7} {:>6} {:>9}".format
    print(row("phase", "seconds", "requests", "failed", "wrong", "slowest"))
    for phase in (*phases, total):
        print(
            row(
                phase.name,
                f"{phase.seconds:.0f}",
                phase.requests,
                phase.failed,
                phase.wrong,
                f"{phase.slowest_s:.1f} s",
            )
        )
    document = {**facts, "phases": [asdict(phase) for phase in phases], "total": asdict(total)}
    (folder / "campaign.json").write_text(json.dumps(document, indent=2) + "\n")
    return total.requests > 0 and total.failed == total.wrong == 0


def _phase(name: str, seconds: float, requests: list[dict[str, Any]]) -> Phase:
    return Phase(
        name,
        seconds,
        len(requests),
        sum(request["error"] is not None for request in requests),
        sum(request["wrong"] for request in requests),
        max((request["ended_s"] - request["begun_s"] for request in requests), default=0.0),
    )


def _sum(phases: list[Phase]) -> Phase:
    return Phase(
        phases[0].name,
        sum(phase.seconds for phase in phases),
        sum(phase.requests for phase in phases),
        sum(phase.failed for phase in phases),
        sum(phase.wrong for phase in phases),
        max(phase.slowest_s for phase in phases),
    )


def _is_ready_condition(condition: dict[str, str]) -> bool:
    return condition["type"] == "Ready" and condition["status"] == "True"
