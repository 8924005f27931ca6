"""The release of the chart in the cluster: installed, upgraded and tested by helm."""

import json
import re
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from k8s.cluster.cluster import REPOSITORY, Cluster
from k8s.cluster.control_plane import CLUSTER_DOMAIN
from stagemesh.cli.launcher.certificates import Authority

# Helm 4 takes no program as a post-renderer, only a plug-in.
_HELM = Path(sys.executable).with_name("helm3")
_CHART = REPOSITORY / "k8s/chart"
_OWN_VALUES = Path(__file__).parent
VALUES = {
    "speech": (_CHART / "ci/speech-cpu-values.yaml", _OWN_VALUES / "values.yaml"),
    "warm": (_OWN_VALUES / "warm-values.yaml",),
}


_CERTIFICATES: Mapping[str, tuple[Sequence[str], Sequence[str]]] = {
    "orchestrator": (("orchestrator/speech",), ("orchestrator", "admin")),
    "stages": (
        (
            "stage/thinker/speech-thinker-*-*",
            "stage/acoustic/speech-voice-*-*-acoustic",
            "stage/vocoder/speech-voice-*-*-vocoder",
        ),
        ("thinker", "acoustic", "vocoder"),
    ),
    "test": (("client/speech",), ()),
}
"""The names and the Services in the certificates of the release `speech`, by the keys of the chart's `tls.secrets`."""
_DOMAINS = ("", ".default.svc", f".default.svc.{CLUSTER_DOMAIN}")


@dataclass(frozen=True, kw_only=True)
class Release:
    """A release of the chart with the values that `VALUES` has for its name, and with the images that have this tag."""

    cluster: Cluster
    name: str
    tag: str

    def upgrade(self, *settings: str, limit_s: int = 600) -> None:
        """Installs or upgrades the release with these values, KEY=VALUE, and waits until all pods are ready."""
        registry = self.cluster.control_plane.registry
        defaults = [
            f"images.orchestrator.repository={registry}/stagemesh/orchestrator",
            f"images.orchestrator.tag={self.tag}",
            f"images.stage.repository={registry}/stagemesh/stage-cpu",
            f"images.stage.tag={self.tag}",
            f"stageDefaults.modelCache.hostPath={self.cluster.folder / 'models'}",
        ]
        if self.certificate is not None:
            defaults.append("tls.enabled=true")
            defaults += [f"tls.secrets.{owner}={self.name}-{owner}-tls" for owner in _CERTIFICATES]
        post_renderer = [sys.executable, str(Path(__file__).parent / "downlevel.py"), str(self.cluster.binaries)]
        self._helm(
            *("upgrade", self.name, str(self._chart()), "--install", "--wait", f"--timeout={limit_s}s"),
            *(f"--values={path}" for path in VALUES[self.name]),
            *(
                f"--set-json={item}" if item.partition("=")[2][:1] in {"{", "["} else f"--set={item}"
                for item in (*defaults, *settings)
            ),
            *(f"--post-renderer={post_renderer[0]}", *(f"--post-renderer-args={word}" for word in post_renderer[1:])),
        )

    @property
    def certificate(self) -> Path | None:
        """The folder of the certificate with which clients call the release, or None if the release has none."""
        folder = self._certificates / "test"
        return folder if self.name == "speech" and folder.exists() else None

    def issue_certificates(self) -> None:
        """Creates certificates, and their Secrets, with which the next upgrade installs the release.

        The release must be installed, because the orchestrator's certificate has the address of its Service.
        """
        kubectl, authority = self.cluster.control_plane.kubectl, Authority(self._certificates)
        for owner, (names, services) in _CERTIFICATES.items():
            hosts = [f"{self.name}-{service}{domain}" for service in services for domain in _DOMAINS]
            if owner == "orchestrator":
                hosts.append(self.address().partition(":")[0])
            folder = authority.issue(self._certificates / owner, names, hosts=hosts)
            secret = f"{self.name}-{owner}-tls"
            kubectl("delete", "secret", secret, "--ignore-not-found")
            kubectl("create", "secret", "generic", secret, f"--from-file={folder}")

    def remove_certificates(self) -> None:
        """Removes the certificates. The next upgrade installs the release without them."""
        shutil.rmtree(self._certificates, ignore_errors=True)

    @property
    def _certificates(self) -> Path:
        return self.cluster.folder / "certificates"

    def test(self) -> str:
        """Runs `helm test` and returns its output. Raises CalledProcessError if the test fails."""
        return self._helm("test", self.name, "--logs")

    def remove(self) -> None:
        """Removes the release."""
        self._helm("uninstall", self.name, "--wait")

    def pods(self, *selectors: str) -> list[dict[str, Any]]:
        """Returns the release's pods with these labels."""
        labels = ",".join((f"app.kubernetes.io/instance={self.name}", *selectors))
        return self.cluster.control_plane.objects("pods", f"--selector={labels}")

    def address(self) -> str:
        """Returns the address of the Service for clients."""
        service = json.loads(
            self.cluster.control_plane.kubectl("get", "service", f"{self.name}-orchestrator", "--output=json")
        )
        return f"{service['spec']['clusterIP']}:7780"

    def _helm(self, *arguments: str) -> str:
        control = self.cluster.control_plane
        return control.host.run(str(_HELM), f"--kubeconfig={control.kubeconfig}", *arguments)

    def _chart(self) -> Path:
        """Returns a copy of the chart that accepts Kubernetes 1.20."""
        copy = self.cluster.folder / "chart"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(_CHART, copy)
        file = copy / "Chart.yaml"
        file.write_text(re.sub(r"^kubeVersion:.*\n", "", file.read_text(), flags=re.MULTILINE))
        return copy


def push(cluster: Cluster, images: Sequence[str]) -> None:
    """Pushes images from buildah's store to the cluster's registry, under their names without `localhost`."""
    for image in images:
        name = image.removeprefix("localhost/")
        target = f"docker://{cluster.control_plane.registry}/{name}"
        # The network of the host, but not its mounts: buildah's store is outside of it.
        cluster.control_plane.host.run_outside(
            "buildah", "push", "--tls-verify=false", "--compression-format=zstd", image, target
        )
