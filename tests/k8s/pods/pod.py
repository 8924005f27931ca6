"""One pod: its namespaces, its volumes and its containers."""

import asyncio
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from uuid import uuid4

from tests.connectors.namespaces import HeldNamespaces
from tests.k8s.checks.scalars import parse_quantity
from tests.k8s.helm import NAMESPACE
from tests.k8s.manifests import Manifest
from tests.k8s.pods.container import Container, Report
from tests.k8s.pods.fields import PodFacts, downward_files, environment, expand, port_number
from tests.k8s.pods.network import DNS_ADDRESS, Network
from tests.k8s.pods.sandbox import PATH, Identity, Mount, container_script

CLUSTER_DOMAIN = "cluster.local"
_POD_FIELDS = {"containers", "initContainers", "volumes", "securityContext", "terminationGracePeriodSeconds"}
_POD_FIELDS |= {"restartPolicy", "enableServiceLinks", "activeDeadlineSeconds"}
# These fields have no effect here: there is no scheduler, no API server, no registry and no other runtime.
_POD_FIELDS |= {"automountServiceAccountToken", "serviceAccountName", "imagePullSecrets", "affinity", "nodeSelector"}
_POD_FIELDS |= {"tolerations", "topologySpreadConstraints", "priorityClassName", "schedulerName", "runtimeClassName"}
_CONTAINER_FIELDS = {"name", "args", "command", "env", "ports", "volumeMounts", "securityContext"}
_CONTAINER_FIELDS |= {"startupProbe", "livenessProbe", "readinessProbe"}
_CONTAINER_FIELDS |= {"image", "imagePullPolicy", "resources", "terminationMessagePolicy"}
_ENTRYPOINT = ["stagemesh"]


class Pod:
    """A running pod. It exists until `run` returns."""

    def __init__(
        self,
        template: Manifest,
        *,
        name: str,
        node: int,
        network: Network,
        folder: Path,
        links: Mapping[str, str],
        secrets: Mapping[str, Path],
        report: Report,
    ) -> None:
        """Creates a pod from a pod template.

        - `links` are the variables that name the cluster's Services.
        - `secrets` are the folders with the content of Secrets, by name.
        """
        self.name, self.node = name, node
        self.labels: Mapping[str, str] = template["metadata"].get("labels", {})
        self.spec: Manifest = template["spec"]
        self.created_s = time.monotonic()
        self._ready_since_s: float | None = None
        self.terminating = False
        self._network, self._folder, self._links, self._report = network, folder, links, report
        self._secrets = secrets
        self._stop = asyncio.Event()
        self._grace_s = float(self.spec.get("terminationGracePeriodSeconds", 30))
        self._containers: list[Container] = []
        self._endpoints: dict[int, str] = {}
        _check_fields(self.spec)
        self.namespaces = HeldNamespaces()
        self.ip = network.plug_in(self.namespaces, node=node)
        self._facts = PodFacts(name, NAMESPACE, str(uuid4()), self.ip, f"node-{node}", template["metadata"])

    @property
    def ready(self) -> bool:
        """Whether all containers are ready and the pod is not terminating."""
        return self._ready_since_s is not None and not self.terminating

    @property
    def live_probes(self) -> int:
        """The number of liveness probes that have passed in every container."""
        return min(container.live_probes for container in self._containers)

    @property
    def ready_s(self) -> float:
        """The number of seconds for which the pod has been ready. Negative if it is not."""
        return time.monotonic() - self._ready_since_s if self._ready_since_s is not None and self.ready else -1.0

    def delete(self) -> None:
        """Begins to terminate the pod."""
        if not self.terminating:
            self.terminating = True
            self._stop.set()
            self._report(f"{self.name}: terminating")

    async def run(self) -> None:
        """Runs the pod's containers until the pod is deleted."""
        try:
            await self._prepare()
            async with asyncio.TaskGroup() as group:
                for container in self._containers:
                    group.create_task(container.run(grace_s=self._grace_s))
                await self._stop.wait()
                for container in self._containers:
                    group.create_task(container.stop(grace_s=self._grace_s))
        finally:
            self._remove()

    async def complete(self) -> Mapping[str, int]:
        """Runs each container once. Returns their exit statuses."""
        try:
            await self._prepare()
            return {each.name: await each.complete() for each in self._containers}
        finally:
            self._remove()

    async def endpoint(self, port: int) -> str:
        """Returns an address at which the test reaches a port of the pod. The connections begin in the pod."""
        if port not in self._endpoints:
            self._endpoints[port] = await self._network.relay_from_test(lambda: (self.ip, port), at=self.namespaces)
        return self._endpoints[port]

    async def _prepare(self) -> None:
        volumes = {volume["name"]: self._volume(volume) for volume in self.spec.get("volumes", [])}
        self.namespaces.run(f"hostname {self.name}; mkdir -p {self._folder}/root", "mount", "uts")
        self._write_etc()
        for manifest in self.spec.get("initContainers", []):
            container = await self._container(manifest, volumes)
            status = await container.complete()
            assert status == 0, f"{self.name}: init container {container.name} ended with {status}"
        self._containers = [await self._container(each, volumes) for each in self.spec["containers"]]

    def _remove(self) -> None:
        self.namespaces.close()
        shutil.rmtree(self._folder)

    async def _container(self, manifest: Manifest, volumes: Mapping[str, str]) -> Container:
        links = self._links if self.spec.get("enableServiceLinks", True) else {}
        variables = {"PATH": PATH, "HOSTNAME": self.name, **links, **environment(manifest, self._facts)}
        command = [*manifest.get("command", _ENTRYPOINT), *manifest.get("args", [])]
        mounts = [
            Mount(
                f"{volumes[each['name']]}/{each.get('subPath', '')}",
                each["mountPath"],
                read_only=bool(each.get("readOnly")),
            )
            for each in manifest.get("volumeMounts", [])
        ]
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            if probe in manifest:
                handler = manifest[probe].get("grpc") or manifest[probe]["httpGet"]
                await self.endpoint(port_number([manifest], handler["port"]))
        script = container_script(
            self._folder / "root",
            self._folder / "etc",
            mounts,
            read_only=bool(manifest.get("securityContext", {}).get("readOnlyRootFilesystem")),
            identity=Identity.of(self.spec, manifest),
            variables=variables,
            arguments=[expand(each, variables) for each in command],
        )
        return Container(
            manifest,
            enter=self.namespaces.enter("net", "uts", "ipc", "mount"),
            script=script,
            log=self._folder.parent / f"{self.name}.{manifest['name']}.log",
            endpoint=self._endpoints.__getitem__,
            report=self._changed,
        )

    def _changed(self, what: str, *, is_failure: bool = False) -> None:
        ready = all(container.ready for container in self._containers)
        self._ready_since_s = (self._ready_since_s or time.monotonic()) if ready else None
        self._report(f"{self.name}: {what}", is_failure=is_failure)

    def _volume(self, volume: Manifest) -> str:
        """Creates a volume in the pod's mount namespace. Returns its folder."""
        if "hostPath" in volume:
            return str(volume["hostPath"]["path"])
        if "persistentVolumeClaim" in volume:
            claim = self._folder.parent / f"claim-{volume['persistentVolumeClaim']['claimName']}"
            claim.mkdir(exist_ok=True)
            claim.chmod(0o777)
            return str(claim)
        folder = f"{self._folder}/volumes/{volume['name']}"
        if "emptyDir" in volume:
            limit = volume["emptyDir"].get("sizeLimit")
            size = f",size={int(parse_quantity(limit) or 0)}" if limit else ""
            self.namespaces.run(f"mkdir -p {folder}; mount -t tmpfs -o mode=0777{size} tmpfs {folder}", "mount")
            return folder
        for source in volume.get("projected", {"sources": [volume]})["sources"]:
            for path, content in self._files(source).items():
                file = Path(folder, path)
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(content)
        return folder

    def _files(self, source: Manifest) -> Mapping[str, str]:
        """Returns the files of a source of a volume by their paths."""
        if "downwardAPI" in source:
            return downward_files(source["downwardAPI"]["items"], self._facts)
        assert "secret" in source, f"volumes like {source} are not supported here"
        folder = self._secrets[source["secret"]["name"]]
        return {item["path"]: (folder / item["key"]).read_text() for item in source["secret"]["items"]}

    def _write_etc(self) -> None:
        domain = f"svc.{CLUSTER_DOMAIN}"
        files = {
            "hostname": f"{self.name}\n",
            "hosts": f"127.0.0.1 localhost\n{self.ip} {self.name}\n",
            "nsswitch.conf": "hosts: files dns\n",
            "passwd": "root:x:0:0::/root:/bin/sh\nstagemesh:x:10001:10001::/var/lib/stagemesh:/bin/sh\n",
            "group": "root:x:0:\nstagemesh:x:10001:\n",
            "resolv.conf": f"nameserver {DNS_ADDRESS}\nsearch {NAMESPACE}.{domain} {domain} {CLUSTER_DOMAIN}\n"
            "options ndots:5\n",
        }
        folder = self._folder / "etc"
        folder.mkdir()
        for name, content in files.items():
            (folder / name).write_text(content)


def _check_fields(spec: Manifest) -> None:
    """Fails if the pod has a field that would have no effect here without that being known."""
    assert set(spec) <= _POD_FIELDS, f"unknown fields of a pod: {set(spec) - _POD_FIELDS}"
    for container in (*spec["containers"], *spec.get("initContainers", [])):
        unknown = set(container) - _CONTAINER_FIELDS
        assert not unknown, f"unknown fields of container {container['name']}: {unknown}"
