"""A node of the cluster: containerd, a kubelet and kube-proxy on one host."""

import json
import shutil
from pathlib import Path

from k8s.cluster.control_plane import CLUSTER_DOMAIN, ControlPlane, start_proxy
from k8s.cluster.hosts import Host
from k8s.cluster.shell import wait_until

_CGROUPS = Path("/sys/fs/cgroup")
_CPU_SHARES = 8 * 1024
_PAUSE = "localhost/pause:latest"

_CONTAINERD = """\
version = 2
oom_score = 0
[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "{pause}"
restrict_oom_score_adj = true
[plugins."io.containerd.grpc.v1.cri".containerd]
discard_unpacked_layers = true
[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "/usr/lib/cni"
[plugins."io.containerd.grpc.v1.cri".registry.mirrors."{registry}"]
endpoint = ["http://{registry}"]
"""


_CTR = ("ctr", "--namespace=k8s.io")


def start(host: Host, control_plane: ControlPlane, *, pause_archive: Path) -> None:
    """Starts a node on `host`. It becomes Ready within seconds."""
    _make_cgroups(host)
    network = {
        "cniVersion": "0.4.0",
        "name": "pods",
        "plugins": [
            {
                "type": "bridge",
                "bridge": "pods",
                "isGateway": True,
                "hairpinMode": True,
                "ipam": {
                    "type": "host-local",
                    "ranges": [[{"subnet": host.pod_network}]],
                    "routes": [{"dst": "0.0.0.0/0"}],
                },
            },
            {"type": "portmap", "capabilities": {"portMappings": True}},
        ],
    }
    (host.folder / "root/etc/cni/net.d/pods.conflist").write_text(json.dumps(network))
    containerd = host.folder / "containerd.toml"
    containerd.write_text(_CONTAINERD.format(pause=_PAUSE, registry=control_plane.registry))
    host.start("containerd", "containerd", f"--config={containerd}")
    wait_until(lambda: "Server" in host.run(*_CTR, "version"), 20, f"containerd on {host.name}")
    host.run(*_CTR, "images", "import", str(pause_archive))

    kubelet = host.folder / "kubelet.json"
    kubelet.write_text(
        json.dumps(
            {
                "apiVersion": "kubelet.config.k8s.io/v1beta1",
                "kind": "KubeletConfiguration",
                "authentication": {"anonymous": {"enabled": True}, "webhook": {"enabled": False}},
                "authorization": {"mode": "AlwaysAllow"},
                "cgroupDriver": "cgroupfs",
                "cgroupRoot": f"/{host.namespace}",
                "clusterDNS": [control_plane.host.address],
                "clusterDomain": CLUSTER_DOMAIN,
                "enforceNodeAllocatable": ["none"],
                # The disk belongs to the machine, and is nearly full for other reasons.
                "evictionHard": {"memory.available": "200Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
                "imageGCHighThresholdPercent": 100,
                "failSwapOn": False,
                "maxOpenFiles": 16384,
                "oomScoreAdj": 0,
                "readOnlyPort": 0,
                "serializeImagePulls": False,
                "featureGates": {"SizeMemoryBackedVolumes": True},
                "resolvConf": "",
                "volumePluginDir": "/var/lib/kubelet/volume-plugins",
            }
        )
    )
    host.start(
        "kubelet",
        str(control_plane.binaries / "kubelet"),
        f"--config={kubelet}",
        f"--kubeconfig={control_plane.kubeconfig}",
        f"--hostname-override={host.name}",
        f"--node-ip={host.address}",
        "--container-runtime=remote",
        "--container-runtime-endpoint=unix:///run/containerd/containerd.sock",
        f"--node-labels=topology.kubernetes.io/zone={host.name}",
    )
    start_proxy(host, control_plane)


def remove_images(host: Host, *, limit_s: float) -> None:
    """Removes all images of a drained node except the one of pause containers, as soon as no container uses them."""

    def is_unused() -> bool:
        return not host.run(*_CTR, "containers", "list", "--quiet")

    wait_until(is_unused, limit_s, f"the end of the containers on {host.name}")
    images = [line.split() for line in host.run(*_CTR, "images", "list").splitlines()[1:]]
    (pause,) = {digest for name, _, digest, *_ in images if name == _PAUSE}
    host.run(*_CTR, "images", "remove", "--sync", *(name for name, _, digest, *_ in images if digest != pause))


def remove_cgroups(host: Host) -> None:
    """Removes the control groups of a node that is down."""
    for controller in _controllers():
        root = controller / host.namespace
        for folder in sorted(root.rglob("*/"), reverse=True) if root.exists() else ():
            folder.rmdir()
        if root.exists():
            root.rmdir()


def remove_files(host: Host) -> None:
    """Removes the images, containers and logs of a host that is down."""
    shutil.rmtree(host.folder, ignore_errors=True)


def _make_cgroups(host: Host) -> None:
    for controller in _controllers():
        folder = controller / host.namespace
        folder.mkdir(exist_ok=True)
        for name in ("cpuset.cpus", "cpuset.mems"):
            if (folder / name).exists():
                (folder / name).write_text((controller / name).read_text())
        # To the scheduler, all pods of a node together are one competitor of each other process on the machine.
        if (folder / "cpu.shares").exists():
            (folder / "cpu.shares").write_text(str(_CPU_SHARES))


def _controllers() -> list[Path]:
    return [folder for folder in _CGROUPS.iterdir() if folder.is_dir() and not folder.is_symlink()]
