"""The whole cluster: a control plane and two nodes, with its files in one folder."""

import shutil
import subprocess
import sys
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from k8s.cluster import nodes
from k8s.cluster.control_plane import CLUSTER_DOMAIN, ControlPlane
from k8s.cluster.hosts import Host, connect, disconnect
from k8s.cluster.shell import run, wait_until

REPOSITORY = Path(__file__).parents[2]
_SOURCES = Path(__file__).parent
_NODES = {"alpha": 11, "beta": 12}


@dataclass(frozen=True)
class Cluster:
    """A cluster in `folder`, which also caches the programs of Kubernetes."""

    folder: Path

    @property
    def binaries(self) -> Path:
        return self.folder / "bin"

    @cached_property
    def control_plane(self) -> ControlPlane:
        return ControlPlane(Host(name="control", number=10, folder=self.folder / "hosts/control"), self.binaries)

    @cached_property
    def nodes(self) -> tuple[Host, ...]:
        return tuple(
            Host(name=name, number=number, folder=self.folder / "hosts" / name) for name, number in _NODES.items()
        )

    @property
    def hosts(self) -> tuple[Host, ...]:
        return (self.control_plane.host, *self.nodes)

    def build(self) -> None:
        """Builds the programs of Kubernetes, unless an earlier run has built them."""
        if not (self.binaries / "probe").exists():
            subprocess.run([_SOURCES / "build.sh", self.folder], check=True)

    def up(self) -> None:
        """Starts the cluster, and waits until all nodes are Ready."""
        self.down()
        for host in self.hosts:
            host.folder.mkdir(parents=True, exist_ok=True)
        connect(self.hosts, init=self.binaries / "pause")
        self.control_plane.start()
        control = self.control_plane.host
        control.start(
            "names",
            *("env", f"--chdir={REPOSITORY}", sys.executable, "-m", "k8s.cluster.names"),
            *(str(self.control_plane.kubeconfig), str(control.folder / "names"), str(control.folder / "dnsmasq.pid")),
            CLUSTER_DOMAIN,
        )
        archive = self.folder / "pause.tar"
        archive.unlink(missing_ok=True)
        run("buildah", "push", "localhost/pause:latest", f"docker-archive:{archive}:localhost/pause:latest")
        for node in self.nodes:
            nodes.start(node, self.control_plane, pause_archive=archive)
        wait_until(lambda: self.ready_nodes() == {node.name for node in self.nodes}, 60, "the nodes")

    def ready_nodes(self) -> set[str]:
        """Returns the names of the nodes that are Ready."""
        line = '{range .items[*]}{.metadata.name}={.status.conditions[?(@.type=="Ready")].status} {end}'
        found = self.control_plane.kubectl("get", "nodes", f"--output=jsonpath={line}").split()
        return {item.removesuffix("=True") for item in found if item.endswith("=True")}

    def drain(self, node: Host, *, limit_s: int) -> None:
        """Ends all pods of a node and lets no others start there, until `uncordon`."""
        self.control_plane.kubectl(
            "drain", node.name, "--ignore-daemonsets", "--delete-emptydir-data", "--force", f"--timeout={limit_s}s"
        )

    def cordon(self, node: Host) -> None:
        """Lets no further pods start on a node, until `uncordon`."""
        self.control_plane.kubectl("cordon", node.name)

    def uncordon(self, node: Host) -> None:
        """Lets pods start on a node again."""
        self.control_plane.kubectl("uncordon", node.name)

    def down(self) -> None:
        """Removes the cluster, but neither its programs nor the images in buildah's store."""
        disconnect(self.hosts)
        for host in self.hosts:
            nodes.remove_cgroups(host)
        shutil.rmtree(self.folder / "hosts", ignore_errors=True)
