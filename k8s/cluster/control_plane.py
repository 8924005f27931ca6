"""The control plane of the cluster: etcd, Kubernetes' own servers, DNS and a registry of images, all on one host."""

import json
from dataclasses import dataclass
from pathlib import Path

from k8s.cluster.hosts import Host
from k8s.cluster.shell import run, wait_until

SERVICE_NETWORK = "10.96.0.0/16"
POD_NETWORK = "10.244.0.0/16"
CLUSTER_DOMAIN = "cluster.local"
REGISTRY_PORT = 5000
_API_PORT = 6443
# The cluster is reachable from this machine only, and ends with the campaign.
_TOKEN = "stagemesh"  # noqa: S105


@dataclass(frozen=True)
class ControlPlane:
    """The control plane on `host`. `binaries` is the folder of Kubernetes' programs."""

    host: Host
    binaries: Path

    @property
    def kubeconfig(self) -> Path:
        return self.host.folder / "kubeconfig"

    @property
    def registry(self) -> str:
        """The address of the registry of images."""
        return f"{self.host.address}:{REGISTRY_PORT}"

    def start(self) -> None:
        """Starts everything, and waits until the API server is ready."""
        folder = self.host.folder
        self._write_files()
        etcd = f"http://{self.host.address}:2379"
        self.host.start(
            "etcd",
            "etcd",
            f"--data-dir={folder / 'etcd'}",
            f"--listen-client-urls={etcd}",
            f"--advertise-client-urls={etcd}",
        )
        self.host.start(
            "kube-apiserver",
            str(self.binaries / "kube-apiserver"),
            f"--etcd-servers={etcd}",
            f"--bind-address={self.host.address}",
            f"--advertise-address={self.host.address}",
            f"--secure-port={_API_PORT}",
            f"--cert-dir={folder / 'certificates'}",
            f"--token-auth-file={folder / 'tokens.csv'}",
            "--authorization-mode=RBAC",
            f"--service-cluster-ip-range={SERVICE_NETWORK}",
            f"--service-account-issuer=https://kubernetes.default.svc.{CLUSTER_DOMAIN}",
            f"--service-account-key-file={folder / 'accounts.key'}",
            f"--service-account-signing-key-file={folder / 'accounts.key'}",
            "--kubelet-preferred-address-types=InternalIP",
            "--event-ttl=6h",
        )
        wait_until(lambda: self.kubectl("get", "--raw=/readyz") == "ok", 60, "the API server")
        self.host.start(
            "kube-controller-manager",
            str(self.binaries / "kube-controller-manager"),
            f"--kubeconfig={self.kubeconfig}",
            f"--service-account-private-key-file={folder / 'accounts.key'}",
            "--use-service-account-credentials=false",
            "--leader-elect=false",
        )
        self.host.start(
            "kube-scheduler",
            str(self.binaries / "kube-scheduler"),
            f"--kubeconfig={self.kubeconfig}",
            "--leader-elect=false",
        )
        start_proxy(self.host, self)
        self.host.start("registry", "docker-registry", "serve", str(folder / "registry.yaml"))
        self.host.start(
            "dnsmasq",
            "dnsmasq",
            "--keep-in-foreground",
            f"--listen-address={self.host.address}",
            "--bind-interfaces",
            "--no-resolv",
            "--no-hosts",
            f"--local=/{CLUSTER_DOMAIN}/",
            f"--addn-hosts={folder / 'names'}",
            f"--pid-file={folder / 'dnsmasq.pid'}",
            "--user=root",
        )

    def kubectl(self, *arguments: str, stdin: str | None = None) -> str:
        """Runs kubectl on the host of the control plane, and returns its output."""
        command = (str(self.binaries / "kubectl"), f"--kubeconfig={self.kubeconfig}", *arguments)
        return self.host.run(*command, stdin=stdin)

    def objects(self, kind: str, *arguments: str) -> list[dict[str, object]]:
        """Returns objects of the API server."""
        items: list[dict[str, object]] = json.loads(self.kubectl("get", kind, "--output=json", *arguments))["items"]
        return items

    def _write_files(self) -> None:
        folder = self.host.folder
        (folder / "tokens.csv").write_text(f"{_TOKEN},admin,admin,system:masters\n")
        run("openssl", "genrsa", "-out", str(folder / "accounts.key"), "2048")
        (folder / "names").touch()
        self.kubeconfig.write_text(
            json.dumps(
                {
                    "apiVersion": "v1",
                    "kind": "Config",
                    "clusters": [
                        {
                            "name": "cluster",
                            "cluster": {
                                "server": f"https://{self.host.address}:{_API_PORT}",
                                "insecure-skip-tls-verify": True,
                            },
                        }
                    ],
                    "users": [{"name": "admin", "user": {"token": _TOKEN}}],
                    "contexts": [{"name": "cluster", "context": {"cluster": "cluster", "user": "admin"}}],
                    "current-context": "cluster",
                }
            )
        )
        (folder / "registry.yaml").write_text(
            json.dumps(
                {
                    "version": "0.1",
                    "storage": {"filesystem": {"rootdirectory": str(folder / "registry")}},
                    "http": {"addr": self.registry},
                    "log": {"level": "warn"},
                }
            )
        )


def start_proxy(host: Host, control_plane: ControlPlane) -> None:
    """Starts kube-proxy on a host, so that its programs reach the cluster's services."""
    host.start(
        "kube-proxy",
        str(control_plane.binaries / "kube-proxy"),
        f"--kubeconfig={control_plane.kubeconfig}",
        f"--hostname-override={host.name}",
        f"--cluster-cidr={POD_NETWORK}",
        "--proxy-mode=iptables",
        # These settings of the kernel belong to the whole machine.
        "--conntrack-max-per-core=0",
        "--conntrack-tcp-timeout-established=0",
        "--conntrack-tcp-timeout-close-wait=0",
        "--oom-score-adj=0",
    )
