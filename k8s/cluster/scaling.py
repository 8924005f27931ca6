"""Measures each phase until a further replica of a stage answers a request: one that starts, and one that sleeps."""

import json
import re
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from k8s.cluster import nodes
from k8s.cluster.cluster import REPOSITORY
from k8s.cluster.release import Release
from k8s.cluster.shell import wait_until

_STAGE = "thinker"
_LIMIT_S = 400
# The lines of a stage's log that end a phase.
_LINES = {"process": "listening on", "libraries": "loading /", "model": ": ready"}


def measure_cold(release: Release) -> dict[str, float]:
    """Scales the thinker from one to two replicas. Returns the seconds of each phase, in order.

    The second replica starts on a node that does not have the image. The sum of the phases is the time from the command
    to the first output of a request that runs on the new replica.
    """
    control = release.cluster.control_plane
    deployment = f"deployment/{release.name}-{_STAGE}"
    control.kubectl("scale", deployment, "--replicas=1")
    wait_until(lambda: len(_pods(release)) == 1, _LIMIT_S, "the end of a replica")
    (pod,) = _pods(release)
    old = pod["metadata"]["name"]
    (used,) = (node for node in release.cluster.nodes if node.name == pod["spec"]["nodeName"])
    (empty,) = (node for node in release.cluster.nodes if node is not used)
    release.cluster.drain(empty, limit_s=_LIMIT_S)
    nodes.remove_images(empty, limit_s=_LIMIT_S)
    release.cluster.cordon(used)
    release.cluster.uncordon(empty)
    try:
        return _time_phases(release, old)
    finally:
        release.cluster.uncordon(used)


def _time_phases(release: Release, old: str) -> dict[str, float]:
    control = release.cluster.control_plane
    deployment = f"deployment/{release.name}-{_STAGE}"
    ends = {"": time.time()}
    control.kubectl("scale", deployment, "--replicas=2")
    ends["scheduled"] = _first_time(release, old, lambda pod: _is_true(pod, "PodScheduled"))
    ready_s = _first_time(release, old, lambda pod: _is_true(pod, "Ready"))
    pod = _new_pod(release, old)
    name = pod["metadata"]["name"]
    # Kubernetes rounds this time down to a second.
    ends["image"] = datetime.fromisoformat(
        pod["status"]["containerStatuses"][0]["state"]["running"]["startedAt"]
    ).timestamp()
    log = control.kubectl("logs", name)
    ends |= {phase: _time_of(log, line) for phase, line in _LINES.items()}
    ends["ready"] = ready_s
    ends["first request"] = _send_requests(release, name, clients=2)["served_s"]
    times = list(ends.values())
    return {phase: round(end - begun, 2) for phase, begun, end in zip(list(ends)[1:], times, times[1:], strict=False)}


def measure_warm(release: Release) -> dict[str, float]:
    """Sends more requests than the awake replica can serve. Returns the seconds until the sleeping one serves, too.

    The replicas run the engine `fake`.
    """
    (pod,) = release.pods("stagemesh.dev/tier=warm")
    times = _send_requests(release, pod["metadata"]["name"], clients=8)
    return {
        "awake": round(times["ready_s"] - times["begun_s"], 2),
        "first request": round(times["served_s"] - times["ready_s"], 2),
    }


def _send_requests(release: Release, replica: str, *, clients: int) -> dict[str, float]:
    host = release.pods("app.kubernetes.io/component=orchestrator")[0]["status"]["podIP"]
    program = ("env", f"--chdir={REPOSITORY}", sys.executable, "-m", "k8s.cluster.first_request")
    times: dict[str, float] = json.loads(
        release.cluster.control_plane.host.run_outside(*program, host, replica, str(clients))
    )
    return times


def _first_time(release: Release, old: str, condition: Callable[[dict[str, Any]], bool]) -> float:
    """Waits until the new pod meets a condition. Returns the time."""

    def is_met() -> bool:
        try:
            return condition(_new_pod(release, old))
        except (KeyError, StopIteration):
            return False

    wait_until(is_met, _LIMIT_S, "the new replica")
    return time.time()


def _new_pod(release: Release, old: str) -> dict[str, Any]:
    return next(pod for pod in _pods(release) if pod["metadata"]["name"] != old)


def _pods(release: Release) -> list[dict[str, Any]]:
    return release.pods(f"stagemesh.dev/group={_STAGE}")


def _is_true(pod: dict[str, Any], condition: str) -> bool:
    return any(each["type"] == condition and each["status"] == "True" for each in pod["status"]["conditions"])


def _time_of(log: str, text: str) -> float:
    """Returns the time of the first line of a log that contains `text`. Raises ValueError if there is none."""
    for line in log.splitlines():
        if text in line and (found := re.match(r"[\d-]+ [\d:]+,\d{3}", line)):
            return datetime.strptime(found[0], "%Y-%m-%d %H:%M:%S,%f").replace(tzinfo=UTC).timestamp()
    raise ValueError(f"the log has no line with {text!r}")
