"""The pods of the chart without a cluster: rollouts, scaling, partitions and deletions that no client notices."""

import asyncio
import random
import ssl
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from stagemesh.client import AsyncClient
from stagemesh.client.retries import RetryPolicy
from stagemesh.common.errors import UnavailableError
from stagemesh.rpc.authentication import TokenEntry, add_token
from stagemesh.rpc.credentials import CA
from tests.k8s.helm import RELEASE
from tests.k8s.pods.cluster import NODES, Cluster
from tests.k8s.pods.relays import COMPATIBLE, GROUP, INCOMPATIBLE, OLD, OUTPUTS, Generation, release
from tests.soak.delivery import Delivery
from tests.soak.load import Load
from tests.soak.work import Work
from tests.soak.workload import requests

pytestmark = [pytest.mark.timeout(400), pytest.mark.asyncio(loop_scope="module")]

ORCHESTRATOR = f"{RELEASE}-orchestrator"
STAGES = (f"{RELEASE}-source", f"{RELEASE}-{GROUP}")
SPEAKING = replace(OLD, speaks=True)
COMPLETION = {"model": "relays", "prompt": "hello", "seed": 1, "max_tokens": 8}
_CLIENTS = 4
_JOB_S = 60.0
_PARTITION_S = 10.0
_LATCHED_S = 11.0
"""The time after which a ready stage no longer needs the verdict of orchestrators, with a margin of a second."""


@asynccontextmanager
async def _running(folder: Path, *, replicas: int) -> AsyncIterator[Cluster]:
    """Runs a release of the old generation. Asserts at the end that no container has failed."""
    async with Cluster(folder) as cluster:
        with cluster.logged():
            await cluster.apply(release(OLD, replicas=replicas))
            await cluster.until_settled()
            yield cluster
            assert not cluster.failures


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Cluster]:
    """Yields a cluster with two replicas of everything. A test leaves it as it found it."""
    async with _running(tmp_path_factory.mktemp("pods"), replicas=2) as cluster:
        yield cluster


class _Secured:
    """A cluster whose pods have certificates, with a gateway and a job server, and what a user of it has."""

    def __init__(self, cluster: Cluster, folder: Path, jobs: str) -> None:
        self.cluster = cluster
        self.folder = folder
        self._jobs = jobs
        self.user = cluster.authority.issue(folder / "user", ["client/user"])

    async def apply(self, *, tokens: str = "", forward_tokens: bool = False) -> None:
        """Installs or upgrades the release."""
        gateway = {"replicas": 1, "httpsSecret": f"{RELEASE}-gateway-tls", "forwardTokens": forward_tokens}
        jobs = {"endpoint": self._jobs}
        await self.cluster.apply(release(SPEAKING, tls=True, tokens=tokens, gateway=gateway, jobs=jobs))
        await self.cluster.until_settled()

    async def endpoint(self, service: str, port: str) -> str:
        """Returns an endpoint whose host the certificates name."""
        return (await self.cluster.outside(service, port)).replace("127.0.0.1", "localhost")

    async def post(self, headers: Mapping[str, str] | None = None) -> httpx.Response:
        """Asks the gateway for a completion."""
        base_url = f"https://{await self.endpoint(f'{RELEASE}-gateway', 'http')}/v1"
        trusted = ssl.create_default_context(cafile=self.user / CA)
        # An asynchronous client would leave connections that end only with the server.
        with httpx.Client(verify=trusted, timeout=30, base_url=base_url) as client:
            return await asyncio.to_thread(client.post, "/completions", json=COMPLETION, headers=headers)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def secured(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[_Secured]:
    """Yields a cluster with certificates. Only the last of its tests may change the release."""
    folder = tmp_path_factory.mktemp("secured")
    async with Cluster(folder) as cluster:
        with cluster.logged():
            secured = _Secured(cluster, folder, await cluster.outside(f"{RELEASE}-jobs", "grpc"))
            await secured.apply()
            yield secured
            assert not cluster.failures


@asynccontextmanager
async def _load(cluster: Cluster, *generations: Generation) -> AsyncIterator[dict[str, Delivery]]:
    """Keeps a steady load within the block. Yields the ended requests.

    The outputs of each request must be exactly those of one of the generations. No request and no container may fail.
    """
    work = Work(requests(3, count=8, steps=(8, 24)), {}, lambda _: dict.fromkeys(OUTPUTS, ()))
    load, stop = Load(await cluster.outside(ORCHESTRATOR, "grpc"), work), asyncio.Event()
    with cluster.logged():
        async with asyncio.TaskGroup() as group:
            group.create_task(load.until(stop, clients=_CLIENTS))
            yield load.ended
            stop.set()
        failed = {name: each.error for name, each in load.ended.items() if not each.whole()}
        made = {name: [each.made(delivery) for each in generations] for name, delivery in load.ended.items()}
        mixed = [name for name, matches in made.items() if matches.count(True) != 1]
        assert (failed, mixed, cluster.failures) == ({}, [], [])


def _first(cluster: Cluster, pods: set[str], what: str) -> int:
    """Returns the number of the first event of this kind of one of the pods."""
    return next(n for n, event in enumerate(cluster.events) if any(f"{pod}: {what}" in event for pod in pods))


async def _until_more(cluster: Cluster, ended: dict[str, Delivery], count: int = 8) -> None:
    """Waits until `count` more requests have ended."""
    goal = len(ended) + count
    await cluster.until(lambda: len(ended) >= goal, timeout_s=90)


async def test_no_request_of_a_rolling_update_fails_or_pairs_generations(tmp_path: Path) -> None:
    async with _running(tmp_path, replicas=1) as cluster:
        async with _load(cluster, OLD, COMPATIBLE, INCOMPATIBLE) as ended:
            for generation in (COMPATIBLE, INCOMPATIBLE):
                await _until_more(cluster, ended)
                old = {pod.name for stage in STAGES for pod in cluster.pods_of(stage)}
                await cluster.apply(release(generation))
                await cluster.until_settled()
                new = {pod.name for stage in STAGES for pod in cluster.pods_of(stage)}
                stopped, started = _first(cluster, old, "terminating"), _first(cluster, new, "frames has started")
                assert started < stopped, "a stage of the old generation ended before the new one was complete"
                await _until_more(cluster, ended)
                assert generation.made(list(ended.values())[-1])
        assert await cluster.run_hook(f"{RELEASE}-test") == {"generate": 0}


async def test_all_pods_use_the_certificates_of_the_issuer(secured: _Secured) -> None:
    assert await secured.cluster.run_hook(f"{RELEASE}-test") == {"generate": 0}
    endpoint, request = await secured.endpoint(ORCHESTRATOR, "grpc"), requests(3, count=1, steps=(8, 8))[0]
    async with AsyncClient(endpoint, tls=secured.user) as client:
        call = client.generate(request.prompt, outputs=["text"], seed=request.seed, max_tokens=request.steps)
        result = await call.result()
    assert result.text.encode() == SPEAKING.outputs(request)["text"]
    async with AsyncClient(endpoint, retry_policy=RetryPolicy(attempts=1)) as client:
        with pytest.raises(UnavailableError, match="uses TLS"):
            await client.describe()


async def test_a_gateway_answers_with_its_own_certificate(secured: _Secured) -> None:
    assert (await secured.post()).json()["choices"][0]["text"].startswith("Step 0 is ")


async def test_a_job_server_runs_a_job_with_its_own_certificate_and_stores_its_outputs(secured: _Secured) -> None:
    endpoint, request = await secured.endpoint(ORCHESTRATOR, "grpc"), requests(3, count=1, steps=(8, 8))[0]
    async with AsyncClient(endpoint, tls=secured.user) as client:
        job = await client.jobs.submit(
            request.prompt, outputs=["text", "audio"], seed=request.seed, max_tokens=request.steps
        )
        async with asyncio.timeout(_JOB_S):
            job = [each async for each in client.jobs.watch(job.job_id)][-1]
    assert (job.state, job.caller, job.attempts) == ("succeeded", "user", 1)
    outputs = {each.name: each for each in job.outputs}
    assert outputs["text"].text.encode() == SPEAKING.outputs(request)["text"]
    (file,) = outputs["audio"].files
    stored = secured.folder / "claim-media" / file.uri.removeprefix("file:///media/")
    assert stored.stat().st_size == file.size_bytes
    assert (secured.folder / f"claim-{RELEASE}-jobs" / "relays.sqlite3").exists()


async def test_a_gateway_forwards_the_tokens_of_its_callers(secured: _Secured) -> None:
    add_token(secured.folder / "callers" / "tokens.json", "secret", TokenEntry("ada"))
    secured.cluster.add_secret("callers", secured.folder / "callers")
    await secured.apply(tokens="callers", forward_tokens=True)
    given: list[dict[str, str]] = [{"authorization": "Bearer secret"}, {"authorization": "Bearer wrong"}, {}]
    assert [(await secured.post(headers)).status_code for headers in given] == [200, 401, 401]


async def test_no_request_fails_while_stages_grow_to_three_replicas_and_shrink_again(shared: Cluster) -> None:
    async with _load(shared, OLD) as ended:
        for replicas in (1, 3, 1, 2):
            await _until_more(shared, ended)
            for stage in STAGES:
                shared.scale(stage, replicas)
            await shared.until_settled()


async def test_no_request_fails_when_pods_are_deleted(shared: Cluster) -> None:
    async with _load(shared, OLD) as ended:
        for workload in (ORCHESTRATOR, *STAGES):
            await _until_more(shared, ended)
            random.choice(shared.pods_of(workload)).delete()
            await shared.until_settled()


async def test_no_request_fails_when_a_node_is_cut_off(shared: Cluster) -> None:
    async with _load(shared, OLD) as ended:
        for node in range(NODES):
            await _until_more(shared, ended)
            shared.cut(node)
            # The test needs a partition of this length.
            await asyncio.sleep(_PARTITION_S)
            shared.heal(node)
            await shared.until_settled()


async def test_stages_stay_alive_and_ready_without_orchestrators(shared: Cluster) -> None:
    stages = [pod for stage in STAGES for pod in shared.pods_of(stage)]
    await shared.until(lambda: all(pod.ready_s > _LATCHED_S for pod in stages), timeout_s=90)
    shared.scale(ORCHESTRATOR, 0)
    await shared.until_settled()
    probed = {pod: pod.live_probes for pod in stages}
    await shared.until(lambda: all(pod.live_probes > probed[pod] + 1 for pod in stages), timeout_s=90)
    assert {pod for pod in shared.pods.values() if pod.ready} == set(stages)
    shared.scale(ORCHESTRATOR, 2)
    await shared.until_settled()
