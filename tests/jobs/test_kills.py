"""Jobs of a whole deployment whose processes are killed."""

import random
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from stagemesh.client import Client, Job, RetryPolicy, read_wav
from stagemesh.common.errors import StagemeshError
from tests.deployment import Deployment, deployed, eventually
from tests.jobs.postgres import Postgres, postgres
from tests.jobs.servers import SUCCEEDED, JobServer, job_server, stored_names, write_pipeline
from tests.module_fixtures import made_for_module

pytestmark = pytest.mark.timeout(420)

JOBS = 50
VICTIMS = ("jobs", "orchestrator", "gateway", "writer-0", "tuner-0", "singer-0")
KILLS = 10
STEPS = 60
"""The steps of a job, each of which takes 20 ms."""


folder = made_for_module(Path)


@pytest.fixture(scope="module")
def up(folder: Path) -> Iterator[Deployment]:
    with deployed(write_pipeline(folder), "--jobs", "--gateway", "127.0.0.1:0", home=folder / "home") as up:
        yield up


def patient_client(up: Deployment) -> Client:
    return Client(up.endpoint, retry_policy=RetryPolicy(reach_s=60, reattach_s=60))


def kill_and_wait(up: Deployment, name: str) -> None:
    """Kills a process, and waits until another one has its name."""
    former = up.process_id(name)
    up.kill(name)
    up.wait(lambda up: up.statuses[name]["state"] == "ready" and not up.runs(name, former), timeout_s=60)


def test_killed_processes_neither_lose_nor_repeat_a_job(up: Deployment, folder: Path, tmp_path: Path) -> None:
    rng = random.Random(7)
    prompts = {f"job-{number}": f"prompt {number}" for number in range(JOBS)}
    with patient_client(up) as client:
        for name, prompt in prompts.items():
            assert client.jobs.submit(prompt, request_id=name, max_tokens=STEPS).job_id == name
        for _ in range(KILLS):
            kill_and_wait(up, rng.choice(VICTIMS))
        jobs = {name: _ended(client, name) for name in prompts}
        assert {name: job.error for name, job in jobs.items() if job.state != "succeeded"} == {}
        # Each job has exactly one file, and no attempt has left another one.
        eventually(lambda: len(stored_names(folder)) == JOBS, timeout_s=30)
        for name in rng.sample(sorted(prompts), 10):
            _check_result(client, jobs[name], prompts[name], tmp_path / name)
    assert max(job.attempts for job in jobs.values()) > 1


def test_killed_processes_neither_lose_nor_repeat_a_job_in_postgresql(tmp_path: Path) -> None:
    rng = random.Random(8)
    names = [f"job-{number}" for number in range(JOBS)]
    with (
        deployed(write_pipeline(tmp_path)) as up,
        postgres() as database,
        job_server(tmp_path, up.endpoint, database=database.url, max_running=8) as server,
    ):
        for name in names:
            server.submit(job_id=name, steps=STEPS)
        victims: list[Callable[[], None]] = [
            *(partial(kill_and_wait, up, name) for name in ("orchestrator", "writer-0", "singer-0")),
            partial(_restart, server),
            partial(_restart, database),
        ]
        for kill in rng.sample(victims, len(victims)):
            kill()
        jobs = [server.wait(name) for name in names]
        assert {job.state for job in jobs} == {SUCCEEDED}
        assert max(job.attempts for job in jobs) > 1
        eventually(lambda: len(stored_names(tmp_path)) == JOBS, timeout_s=30)


def _restart(server: JobServer | Postgres) -> None:
    """Ends a process as a crash does, and starts it again."""
    server.kill()
    server.start()


def _ended(client: Client, name: str) -> Job:
    return list(client.jobs.watch(name))[-1]


def _check_result(client: Client, job: Job, prompt: str, folder: Path) -> None:
    expected = client.generate(prompt, seed=job.seed, max_tokens=STEPS).result()
    (path,) = client.jobs.download(job, folder)
    assert path.name == "song.wav"
    samples = read_wav(path).samples
    assert len(samples) == len(expected.audio)
    assert np.abs(samples - expected.audio).max() < 1e-3
    assert next(output.text for output in job.outputs if output.name == "text") == expected.text


def test_a_watch_resumes_after_a_restart_of_the_job_server(up: Deployment) -> None:
    states: list[str] = []
    with patient_client(up) as client:
        client.jobs.submit("hello", request_id="watched", max_tokens=200)
        begun = threading.Event()

        def watch() -> None:
            for job in client.jobs.watch("watched"):
                states.append(job.state)
                if job.state == "running":
                    begun.set()

        watching = threading.Thread(target=watch)
        watching.start()
        assert begun.wait(30)
        kill_and_wait(up, "jobs")
        watching.join(timeout=50)
        assert not watching.is_alive()
    assert states[-1] == "succeeded"


def test_a_pipeline_without_a_job_server_names_the_remedy(folder: Path) -> None:
    path = write_pipeline(folder)
    with deployed(path) as up, up.client() as client, pytest.raises(StagemeshError, match="has no job server"):
        client.jobs.submit("hello")
