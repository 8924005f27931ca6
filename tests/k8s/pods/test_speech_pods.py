"""The speech pipeline in the pods of the chart, compared with the same pipeline under `stagemesh up`."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from stagemesh.client import AsyncClient, Result
from stagemesh.common.process.settings import models_dir
from tests.deployment import deployed
from tests.k8s.helm import CHART, RELEASE, read_values, render
from tests.k8s.manifests import Manifest
from tests.k8s.pods.cluster import Cluster

pytestmark = [pytest.mark.speech, pytest.mark.timeout(600)]

_READY_S = 300.0
_PROMPT, _SEED, _MAX_TOKENS = "Why is the sea salty? Answer in two short sentences.", 7, 40


@pytest.fixture
def readable_models() -> Iterator[Path]:
    """Yields a copy of the models that the user of the pods may read."""
    with TemporaryDirectory() as folder:
        copy = Path(folder, "models")
        shutil.copytree(models_dir(), copy, copy_function=shutil.copyfile)
        yield copy


def _release(models: Path) -> list[Manifest]:
    values = read_values(CHART / "ci" / "speech-cpu-values.yaml")
    values["stageDefaults"] |= {
        "modelCache": {"hostPath": str(models)},
        "env": [{"name": "OMP_NUM_THREADS", "value": "1"}],
        "ucx": {"UCX_TLS": "tcp"},
    }
    values["orchestrator"] = {"replicas": 1}
    return render(values)


async def _answer(endpoint: str) -> Result:
    async with AsyncClient(endpoint) as client:
        return await client.generate(_PROMPT, seed=_SEED, max_tokens=_MAX_TOKENS).result()


async def test_pods_speak_like_the_launcher(tmp_path: Path, readable_models: Path) -> None:
    async with Cluster(tmp_path) as cluster:
        with cluster.logged():
            await cluster.apply(_release(readable_models))
            await cluster.until_settled()
            in_pods = await _answer(await cluster.outside(f"{RELEASE}-orchestrator", "grpc"))
            assert not cluster.failures
    connectors = {edge.edge: edge.connector for edge in in_pods.finished.edges}
    assert connectors.pop("acoustic->vocoder") == "shm"
    assert set(connectors.values()) <= {"nixl", "grpc"}
    with deployed("speech", ready_s=_READY_S) as up:
        by_launcher = await _answer(up.endpoint)
    assert in_pods.text == by_launcher.text
    assert in_pods.audio.tobytes() == by_launcher.audio.tobytes()
