"""Stock clients with their defaults call a gateway.

Those that are sampled run by default. `make clients` runs all of them, and writes their results for the matrix.
"""

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.clients.environments import CLIENTS, HERE, RESULTS, Environment
from tests.clients.models import Models
from tests.gateway.making import gateway

pytestmark = pytest.mark.timeout(900)

CHOSEN = os.environ.get("STAGEMESH_CLIENTS", "").split()
"""The names of the clients. Empty for the sampled ones."""
NEWEST = bool(os.environ.get("STAGEMESH_CLIENTS_NEWEST"))
LIMIT_S = 300


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Models]:
    with ExitStack() as stack:
        yield Models(tmp_path_factory.mktemp("models"), stack)


@pytest.mark.parametrize("name", CHOSEN or [name for name, each in CLIENTS.items() if each.sampled])
def test_a_client_works_unchanged(name: str, models: Models, tmp_path: Path) -> None:
    client = CLIENTS[name]
    environment = Environment(client, newest=NEWEST)
    with gateway(*map(models.endpoint_of, client.models)) as url:
        variables = {
            **{key: os.environ[key] for key in ("PATH", "OMP_NUM_THREADS") if key in os.environ},
            "OPENAI_BASE_URL": f"{url}/v1",
            "OPENAI_API_KEY": "none",
            "HOME": str(tmp_path),
            "PYTHONPATH": str(HERE / "shared"),
        }
        command = environment.command()
        ran = subprocess.run(
            command, cwd=tmp_path, env=variables, stdout=subprocess.PIPE, text=True, timeout=LIMIT_S, check=False
        )
    assert ran.returncode == 0, ran.stdout
    problems = json.loads(ran.stdout.splitlines()[-1])
    result = {"digest": client.digest, "versions": environment.versions(), "problems": problems}
    print(json.dumps(result, indent=1))
    if CHOSEN and not NEWEST:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    failed = {feature: problem for feature, problem in problems.items() if problem}
    assert failed.keys() == client.gaps.keys(), failed
