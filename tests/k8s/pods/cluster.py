"""A cluster without Kubernetes: runs the pods of rendered manifests as processes in namespaces.

It stands for the controllers of Deployments and Services, the scheduler, the kubelets and the cluster's DNS. The pods
have the variables, arguments, volumes, users and probes of the manifests. Intervals of probes and of controllers are
shorter (`FASTER`). Limits of processors and memory, network policies and autoscalers have no effect.
"""

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Self
from uuid import uuid4

from stagemesh.cli.launcher.certificates import Authority
from stagemesh.rpc.callers import SCHEME
from tests.k8s.helm import NAMESPACE
from tests.k8s.manifests import Manifest
from tests.k8s.pods.container import FASTER
from tests.k8s.pods.deployments import Deployment, decide
from tests.k8s.pods.fields import port_number
from tests.k8s.pods.network import Address, Choose, Network
from tests.k8s.pods.pod import CLUSTER_DOMAIN, Pod

NODES = 3
_INTERVAL_S = 0.05
_NODE_NOT_READY_S = 40.0 / FASTER
"""The time after which the pods of an unreachable node are no longer endpoints of Services."""
_ENDPOINTS_DELAY_S = 0.2
"""The time after which new connections know that a pod is ready or terminating."""
_SETTLED_S = 300.0
_HOOK = "helm.sh/hook"


class Cluster:
    """A running cluster. `with` ends its processes and removes its namespaces."""

    def __init__(self, folder: Path) -> None:
        self.authority = Authority(folder / "authority")
        """The authority that signs all certificates."""
        self.pods: dict[str, Pod] = {}
        self.events: list[str] = []
        """Everything that happened, in order."""
        self.failures: list[str] = []
        """Failed probes, and processes that ended by themselves, with a status other than 0 or by SIGKILL."""
        self._folder = folder
        self._network = Network(nodes=NODES, resolve=self._resolve)
        self._deployments: dict[str, Deployment] = {}
        self._services: dict[str, Manifest] = {}
        self._cluster_ips: dict[str, str] = {}
        self._endpoints: dict[str, Sequence[Pod]] = {}
        self._hooks: dict[str, Manifest] = {}
        self._secrets: dict[str, Path] = {}
        self._owners: dict[str, tuple[str, str]] = {}
        """The Deployment and the revision of each pod."""
        self._running = set[asyncio.Task[None]]()
        self._cut_since_s: dict[int, float] = {}
        self._began_s = time.monotonic()

    async def __aenter__(self) -> Self:
        await self._network.__aenter__()
        self._start(self._control())
        return self

    async def __aexit__(self, *_: object) -> None:
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
        await self._network.__aexit__()

    async def apply(self, manifests: Iterable[Manifest]) -> None:
        """Makes `manifests` the desired state, as `helm upgrade` does. Deletes the objects that they do not contain.

        A Deployment without `replicas` keeps its present number, or starts with one.
        """
        objects = list(manifests)
        named = {(each["kind"], each["metadata"]["name"]): each for each in objects if not _is_hook(each)}
        self._hooks = {each["metadata"]["name"]: each for each in objects if _is_hook(each)}
        self._services = {name: each for (kind, name), each in named.items() if kind == "Service"}
        for name, service in self._services.items():
            if name not in self._cluster_ips and service["spec"].get("clusterIP") != "None":
                self._cluster_ips[name] = await self._network.relay_in_cluster(self._choices(service))
        for certificate in (each for (kind, _), each in named.items() if kind == "Certificate"):
            self._issue(certificate["spec"])
        deployments = {name: each for (kind, name), each in named.items() if kind == "Deployment"}
        for name, manifest in deployments.items():
            present = self._deployments[name].replicas if name in self._deployments else 1
            self._deployments[name] = Deployment(manifest, manifest["spec"].get("replicas", present))
        for name in self._deployments.keys() - deployments.keys():
            del self._deployments[name]

    def add_secret(self, name: str, folder: Path) -> None:
        """Makes a Secret with the files of a folder."""
        self._secrets[name] = folder

    def _issue(self, spec: Manifest) -> None:
        """Makes the Secret of a Certificate, as cert-manager does."""
        names = [uri.removeprefix(SCHEME) for uri in spec.get("uris", [])]
        secret = spec["secretName"]
        folder = self._folder / "secrets" / secret
        self._secrets[secret] = self.authority.issue(folder, names, hosts=spec.get("dnsNames", []))

    def scale(self, deployment: str, replicas: int) -> None:
        """Sets the number of replicas of a Deployment, as an autoscaler does."""
        self._deployments[deployment].replicas = replicas

    def cut(self, node: int) -> None:
        """Disconnects a node from the other nodes and from clients."""
        self._cut_since_s[node] = time.monotonic()
        self._note(f"node-{node}: cut off")
        self._network.cut(node)

    def heal(self, node: int) -> None:
        """Connects a node again."""
        del self._cut_since_s[node]
        self._note(f"node-{node}: connected again")
        self._network.heal(node)

    async def run_hook(self, name: str) -> Mapping[str, int]:
        """Runs the pod of a Helm hook. Returns the exit statuses of its containers."""
        return await self._create(name, self._hooks[name]).complete()

    async def outside(self, service: str, port: str) -> str:
        """Returns an address at which clients outside the cluster reach a port of a Service."""
        return await self._network.relay_from_test(lambda: self._choose(service, port))

    # The present state

    def pods_of(self, deployment: str) -> list[Pod]:
        """Returns the pods of a Deployment that are not terminating."""
        return [pod for pod in self.pods.values() if not pod.terminating and self._owners[pod.name][0] == deployment]

    def settled(self) -> bool:
        """Returns whether each Deployment has its replicas, available and of its template, and no other pods."""
        available = [_available(each, self._members(each, new=True)) for each in self._deployments.values()]
        wanted = [each.replicas for each in self._deployments.values()]
        return [len(pods) for pods in available] == wanted and len(self.pods) == sum(wanted)

    async def until_settled(self) -> None:
        """Waits until the cluster is in its desired state."""
        await self.until(self.settled, timeout_s=_SETTLED_S)

    async def until(self, condition: Callable[[], bool], *, timeout_s: float) -> None:
        """Waits until the condition holds. Fails after `timeout_s`."""
        end_s = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < end_s, f"the condition does not hold after {timeout_s:g} s"
            await asyncio.sleep(_INTERVAL_S)

    # Controllers

    async def _control(self) -> None:
        while True:
            for deployment in list(self._deployments.values()):
                self._step(deployment)
            for pod in list(self.pods.values()):
                if self._owners[pod.name][0] not in self._deployments:
                    pod.delete()
            for name, service in self._services.items():
                self._publish(name, service)
            await asyncio.sleep(_INTERVAL_S)

    def _step(self, deployment: Deployment) -> None:
        new, old = self._members(deployment, new=True), self._members(deployment, new=False)
        decision = decide(deployment, new=new, old=old, available=_available(deployment, [*new, *old]))
        for pod in decision.delete:
            pod.delete()
        for _ in range(decision.create):
            name = f"{deployment.name}-{deployment.revision}-{uuid4().hex[:5]}"
            pod = self._create(name, deployment.template)
            self.pods[name], self._owners[name] = pod, (deployment.name, deployment.revision)
            self._start(self._run(pod))

    def _members(self, deployment: Deployment, *, new: bool) -> list[Pod]:
        """Returns the pods of the present template, or those of earlier ones."""
        pods = self.pods_of(deployment.name)
        return [pod for pod in pods if (self._owners[pod.name][1] == deployment.revision) is new]

    def _create(self, name: str, template: Manifest) -> Pod:
        folder = self._folder / name
        folder.mkdir()
        return Pod(
            template,
            name=name,
            node=self._node_for(name),
            network=self._network,
            folder=folder,
            links=self._links(),
            secrets=self._secrets,
            report=self._note,
        )

    async def _run(self, pod: Pod) -> None:
        try:
            await pod.run()
        finally:
            del self.pods[pod.name]
            self._note(f"{pod.name}: gone")

    def _node_for(self, name: str) -> int:
        """Returns the connected node with the fewest pods of the same Deployment, and of those with the fewest pods."""
        owner = name.rsplit("-", 2)[0]
        siblings = Counter(pod.node for pod in self.pods_of(owner))
        pods = Counter(pod.node for pod in self.pods.values())
        nodes = [node for node in range(NODES) if node not in self._cut_since_s]
        return min(nodes, key=lambda node: (siblings[node], pods[node]))

    def _start(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._note(f"the harness failed: {error!r}", is_failure=True)

    # Services

    def _resolve(self, name: str) -> Sequence[str] | None:
        service = name.removesuffix(f".{NAMESPACE}.svc.{CLUSTER_DOMAIN}")
        if service not in self._services:
            return None
        if service in self._cluster_ips:
            return [self._cluster_ips[service]]
        unready = bool(self._services[service]["spec"].get("publishNotReadyAddresses"))
        return [pod.ip for pod in self._selected(self._services[service]) if unready or pod.ready]

    def _selected(self, service: Manifest) -> list[Pod]:
        return [pod for pod in self.pods.values() if service["spec"]["selector"].items() <= pod.labels.items()]

    def _publish(self, name: str, service: Manifest) -> None:
        """Lets new connections know the endpoints of a Service after a moment."""
        ready = [pod for pod in self._selected(service) if pod.ready and not self._is_lost(pod)]
        asyncio.get_running_loop().call_later(_ENDPOINTS_DELAY_S, self._endpoints.__setitem__, name, ready)

    def _is_lost(self, pod: Pod) -> bool:
        since_s = self._cut_since_s.get(pod.node)
        return since_s is not None and time.monotonic() - since_s > _NODE_NOT_READY_S

    def _choices(self, service: Manifest) -> dict[int, Choose]:
        name = service["metadata"]["name"]
        return {each["port"]: partial(self._choose, name, each["name"]) for each in service["spec"]["ports"]}

    def _choose(self, service: str, port: str) -> Address | None:
        endpoints = self._endpoints.get(service)
        if not endpoints:
            return None
        pod = random.choice(endpoints)
        target = next(each["targetPort"] for each in self._services[service]["spec"]["ports"] if each["name"] == port)
        return pod.ip, port_number(pod.spec["containers"], target)

    def _links(self) -> dict[str, str]:
        """Returns the variables by which containers find Services, unless a pod disables them."""
        made = dict[str, str]()
        for name, address in self._cluster_ips.items():
            prefix, port = name.upper().replace("-", "_"), self._services[name]["spec"]["ports"][0]["port"]
            made |= {f"{prefix}_SERVICE_HOST": address, f"{prefix}_SERVICE_PORT": str(port)}
            made |= {f"{prefix}_PORT": f"tcp://{address}:{port}"}
        return made

    # Reports

    def _note(self, what: str, *, is_failure: bool = False) -> None:
        event = f"{time.monotonic() - self._began_s:7.2f} {what}"
        self.events.append(event)
        if is_failure:
            self.failures.append(event)

    @contextmanager
    def logged(self) -> Iterator[None]:
        """Prints all events and the last lines of the log of each container if the block fails."""
        try:
            yield
        except BaseException:
            print("\n".join(self.events))
            for log in sorted(self._folder.glob("*.log")):
                print(f"--- {log.name}", *log.read_text(errors="replace").splitlines()[-15:], sep="\n")
            raise


def _available(deployment: Deployment, pods: Sequence[Pod]) -> list[Pod]:
    """Returns the pods that have been ready for long enough."""
    return [pod for pod in pods if pod.ready_s >= deployment.min_ready_s / FASTER]


def _is_hook(manifest: Manifest) -> bool:
    return _HOOK in manifest["metadata"].get("annotations", {})
