"""The harness itself: the facts that a container sees, the reported failures, and the decisions about Deployments."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.k8s.manifests import Manifest
from tests.k8s.pods.cluster import Cluster
from tests.k8s.pods.deployments import Decision, Deployment, decide

_SECURITY = {"runAsNonRoot": True, "runAsUser": 10001, "runAsGroup": 10001, "fsGroup": 10001}
_RESTRICTED = {"readOnlyRootFilesystem": True, "allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
_FACTS = """
import json, os, shutil, socket
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
def writable(folder):
    try:
        open(folder + "/file", "w").close()
    except OSError:
        return False
    return True
facts = {
    "user": [os.getuid(), os.getgid()],
    "capabilities": int(status["CapBnd"], 16),
    "processes": sorted(int(name) for name in os.listdir("/proc") if name.isdigit()),
    "writable": [folder for folder in ("/", "/usr", "/same", "/shared") if writable(folder)],
    "shm_bytes": shutil.disk_usage("/dev/shm").total,
    "annotation": open("/etc/pod/note").read(),
    "host": socket.gethostname(),
    "node": os.environ["NODE"],
    "argument": os.sys.argv[1],
    "addresses": len({info[4] for info in socket.getaddrinfo("peers", 80, type=socket.SOCK_STREAM)}),
    "links": [name for name in os.environ if name.endswith("_SERVICE_HOST")],
}
os.sys.exit(facts != json.loads(os.sys.argv[2]) and repr(facts))
"""


def _deployment(name: str, command: Sequence[str], *, replicas: int = 1) -> Manifest:
    template = {"metadata": {"labels": {"app": name}}, "spec": {"containers": [{"name": name, "command": [*command]}]}}
    return {"kind": "Deployment", "metadata": {"name": name}, "spec": {"replicas": replicas, "template": template}}


def _service(name: str, **spec: object) -> Manifest:
    ports = [{"name": "http", "port": 80, "targetPort": 80}]
    return {"kind": "Service", "metadata": {"name": name}, "spec": {"selector": {"app": name}, "ports": ports, **spec}}


def _hook(expected: Manifest) -> Manifest:
    mounts = [
        {"name": "shared", "mountPath": "/shared"},
        {"name": "shared", "mountPath": "/same", "readOnly": True},
        {"name": "shm", "mountPath": "/dev/shm"},
        {"name": "note", "mountPath": "/etc/pod", "readOnly": True},
    ]
    container = {
        "name": "facts",
        "command": ["python", "-c", _FACTS, "on $(NODE)", json.dumps(expected)],
        "env": [{"name": "NODE", "valueFrom": {"fieldRef": {"fieldPath": "spec.nodeName"}}}],
        "volumeMounts": mounts,
        "securityContext": _RESTRICTED,
    }
    note = {"path": "note", "fieldRef": {"fieldPath": "metadata.annotations['example.com/note']"}}
    volumes = [
        {"name": "shared", "emptyDir": {}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "8Mi"}},
        {"name": "note", "downwardAPI": {"items": [note]}},
    ]
    return {
        "kind": "Pod",
        "metadata": {"name": "facts", "annotations": {"helm.sh/hook": "test", "example.com/note": "two\nlines"}},
        "spec": {
            "securityContext": _SECURITY,
            "enableServiceLinks": False,
            "containers": [container],
            "volumes": volumes,
        },
    }


async def test_a_container_sees_exactly_what_its_manifest_says(tmp_path: Path) -> None:
    expected = {
        "user": [10001, 10001],
        "capabilities": 0,
        "processes": [1],
        "writable": ["/shared"],
        "shm_bytes": 8 << 20,
        "annotation": "two\nlines",
        "host": "facts",
        "node": "node-2",
        "argument": "on node-2",
        "addresses": 2,
        "links": [],
    }
    peers = _deployment("peers", ["sleep", "infinity"], replicas=2)
    headless = _service("peers", clusterIP="None", publishNotReadyAddresses=True)
    async with Cluster(tmp_path) as cluster:
        await cluster.apply([peers, headless, _service("other"), _hook(expected)])
        await cluster.until_settled()
        status = await cluster.run_hook("facts")
        assert status == {"facts": 0}, (tmp_path / "facts.facts.log").read_text()


async def test_a_container_that_ends_is_restarted_and_reported(tmp_path: Path) -> None:
    async with Cluster(tmp_path) as cluster:
        await cluster.apply([_deployment("ends", ["false"])])
        await cluster.until(lambda: len(cluster.failures) >= 2, timeout_s=20)
        assert all("ends ended with 1" in failure for failure in cluster.failures)


@dataclass(frozen=True, eq=False)
class _Pod:
    created_s: float
    ready: bool = True


def _decide(replicas: int, new: Sequence[_Pod], old: Sequence[_Pod] = ()) -> Decision[_Pod]:
    strategy = {"rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}
    deployment = Deployment({"spec": {"strategy": strategy}}, replicas)
    return decide(deployment, new=new, old=old, available=[pod for pod in (*new, *old) if pod.ready])


def test_a_rolling_update_replaces_an_available_pod_only_by_an_available_one() -> None:
    old = [_Pod(0), _Pod(1)]
    loading, ready = _Pod(2, ready=False), _Pod(2)
    assert _decide(2, [], old) == Decision(1, [])
    assert _decide(2, [loading], old) == Decision(0, [])
    assert _decide(2, [ready], old) == Decision(0, [old[1]])
    assert _decide(2, [ready], old[:1]) == Decision(1, [])


def test_a_rolling_update_keeps_an_unready_pod_while_the_new_one_loads() -> None:
    loading, ready, broken = _Pod(2, ready=False), _Pod(2), _Pod(0, ready=False)
    assert _decide(1, [loading], [broken]) == Decision(0, [])
    assert _decide(1, [ready], [broken]) == Decision(0, [broken])


@pytest.mark.parametrize("ready", [False, True])
def test_scaling_down_deletes_unready_pods_first_and_then_the_youngest(*, ready: bool) -> None:
    pods = [_Pod(0), _Pod(1, ready=ready), _Pod(2)]
    assert _decide(2, pods).delete == [pods[2] if ready else pods[1]]
