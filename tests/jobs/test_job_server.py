import hashlib
import io
import wave
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from stagemesh.client import Client
from stagemesh.common.errors import ExistsError, InvalidRequestError, NotFoundError
from stagemesh.v1 import jobs_pb2, request_pb2
from tests.deployment import Deployment, deployed, eventually
from tests.jobs.servers import (
    CANCELLED,
    FAILED,
    QUEUED,
    RUNNING,
    SUCCEEDED,
    JobServer,
    error_of,
    files_of,
    job_server,
    make_server,
    stored_names,
    write_pipeline,
)
from tests.module_fixtures import made_for_module

pytestmark = pytest.mark.timeout(180)


folder = made_for_module(Path)


@pytest.fixture(scope="module")
def jobs(jobs_up: Deployment, folder: Path) -> Iterator[JobServer]:
    """A job server for all tests whose jobs do not disturb each other. Their files are in `folder`."""
    with job_server(folder, jobs_up.endpoint, max_request_bytes=1000) as server:
        yield server


@pytest.fixture(scope="module")
def busy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[JobServer]:
    """A job server whose only worker waits for an orchestrator that does not exist."""
    with job_server(tmp_path_factory.mktemp("busy"), "127.0.0.1:1", max_running=1) as server:
        yield server


def test_a_job_has_the_outputs_of_its_request(jobs_up: Deployment, jobs: JobServer, folder: Path) -> None:
    before = stored_names(folder)
    job = jobs.wait(jobs.submit(parameters=request_pb2.Parameters(seed=3)).job_id)
    with Client(jobs_up.endpoint) as client:
        expected = client.generate("hello", seed=3, max_tokens=5).result()
    assert (job.state, job.attempts, job.seed) == (SUCCEEDED, 1, 3)
    (text,) = (output for output in job.outputs if output.name == "text")
    (song,) = (output for output in job.outputs if output.name == "song")
    assert text.text == expected.text
    (content,) = files_of(job, "song")
    with wave.open(io.BytesIO(content)) as file:
        samples = np.frombuffer(file.readframes(file.getnframes()), "<i2")
        assert file.getframerate() == expected.sample_rate_hz
    assert len(samples) == len(expected.audio)
    assert np.abs(samples / 32768 - expected.audio).max() < 1e-3
    assert (song.files[0].media_type, song.files[0].size_bytes) == ("audio/wav", len(content))
    assert song.files[0].sha256 == hashlib.sha256(content).digest()
    assert job.usage["writer"].output_tokens == expected.finished.stages["writer"].usage.output_tokens
    assert job.created_s <= job.started_s <= job.ended_s < job.expires_s
    assert len(stored_names(folder)) == len(before) + 1


def test_a_repeated_submission_returns_the_same_job(jobs: JobServer) -> None:
    first = jobs.submit(job_id="once")
    assert jobs.wait("once").state == SUCCEEDED
    again = jobs.submit(job_id="once")
    assert (again.created_s, again.seed, again.state) == (first.created_s, first.seed, SUCCEEDED)
    error = error_of(lambda: jobs.submit("other", job_id="once"))
    assert (type(error), error.reason) == (ExistsError, "JOB_EXISTS")


def test_a_caller_sees_only_its_own_jobs(jobs: JobServer) -> None:
    jobs.submit(job_id="mine", caller="alice")
    calls = [
        lambda: jobs.get("mine", caller="bob"),
        lambda: jobs.stub.CancelJob(jobs_pb2.CancelJobRequest(job_id="mine", caller="bob"), timeout=10),
        lambda: jobs.stub.DeleteJob(jobs_pb2.DeleteJobRequest(job_id="mine", caller="bob"), timeout=10),
        lambda: list(jobs.stub.WatchJob(jobs_pb2.WatchJobRequest(job_id="mine", caller="bob"), timeout=10)),
    ]
    for error in map(error_of, calls):
        assert (type(error), error.reason) == (NotFoundError, "UNKNOWN_JOB")
    assert jobs.list(caller="bob") == []
    assert jobs.submit("other", job_id="mine", caller="bob").caller == "bob"
    assert [job.job_id for job in jobs.list(caller="alice")] == ["mine"]


def test_jobs_are_listed_in_pages_the_newest_first(busy: JobServer) -> None:
    for name in "abc":
        busy.submit(job_id=name, caller="pages")
    first = busy.stub.ListJobs(jobs_pb2.ListJobsRequest(caller="pages", page_size=2), timeout=10)
    assert [job.job_id for job in first.jobs] == ["c", "b"]
    second = jobs_pb2.ListJobsRequest(caller="pages", page_size=2, page_token=first.next_page_token)
    rest = busy.stub.ListJobs(second, timeout=10)
    assert ([job.job_id for job in rest.jobs], rest.next_page_token) == (["a"], "")
    for token in ("x", "-1", "9" * 19):
        wrong = jobs_pb2.ListJobsRequest(page_token=token)
        assert error_of(partial(busy.stub.ListJobs, wrong, timeout=10)).reason == "INVALID_PAGE_TOKEN"


def test_a_queued_job_is_cancelled_at_once(busy: JobServer) -> None:
    busy.submit(job_id="first")
    eventually(lambda: busy.get("first").attempts > 0, timeout_s=20)
    busy.submit(job_id="second")
    answer = busy.stub.CancelJob(jobs_pb2.CancelJobRequest(job_id="second"), timeout=10)
    assert answer.job.state in (CANCELLED, RUNNING)
    assert busy.wait("second").state == CANCELLED
    assert [job.job_id for job in busy.list(states=[CANCELLED])] == ["second"]


def test_a_running_job_is_cancelled_and_leaves_no_files(jobs_up: Deployment, jobs: JobServer, folder: Path) -> None:
    before = stored_names(folder)
    jobs.submit(job_id="long", steps=1500)
    jobs.wait("long", RUNNING)
    jobs.stub.CancelJob(jobs_pb2.CancelJobRequest(job_id="long"), timeout=10)
    job = jobs.wait("long", timeout_s=20)
    assert (job.state, job.cancel_requested) == (CANCELLED, True)
    assert stored_names(folder) == before
    eventually(jobs_up.idle, timeout_s=20)


def test_progress_is_reported_while_a_job_runs(jobs: JobServer) -> None:
    jobs.submit(job_id="seen", steps=200)
    responses = list(jobs.stub.WatchJob(jobs_pb2.WatchJobRequest(job_id="seen"), timeout=40))
    assert responses[-1].job.state == SUCCEEDED
    steps = [
        each.progress.engine_steps for response in responses for each in response.job.progress if each.stage == "writer"
    ]
    assert steps == sorted(steps)
    assert len(set(steps)) > 1


def test_an_invalid_request_fails_its_job_without_a_retry(jobs: JobServer) -> None:
    jobs.submit(job_id="wrong", outputs=["nothing"])
    job = jobs.wait("wrong")
    assert (job.state, job.attempts, job.error.reason) == (FAILED, 1, "UNKNOWN_OUTPUT")


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"job_id": "a b"}, "INVALID_ID"),
        ({"caller": "a b"}, "INVALID_CALLER"),
        ({"pipeline": "other"}, "UNKNOWN_PIPELINE"),
        ({"prompt": "x" * 2000}, "MESSAGE_TOO_LARGE"),
    ],
)
def test_an_invalid_submission_is_rejected(jobs: JobServer, fields: dict[str, Any], reason: str) -> None:
    error = error_of(lambda: jobs.submit(**fields))
    assert error.reason == reason
    assert isinstance(error, InvalidRequestError | NotFoundError)


@pytest.mark.parametrize("size_bytes", [0, 9 << 20], ids=["not UTF-8", "too large"])
def test_a_message_that_cannot_be_received_is_rejected_with_the_cause(jobs: JobServer, size_bytes: int) -> None:
    request = jobs_pb2.SubmitJobRequest(labels={"BAD": "x"})
    data = request.SerializeToString().replace(b"BAD", b"\xff\xfe\xfd") + bytes(size_bytes)
    options = [("grpc.max_send_message_length", -1)]
    with grpc.insecure_channel(jobs.config.listen, options=options) as channel:
        submit: Any = channel.unary_unary("/stagemesh.v1.JobService/SubmitJob")
        error = error_of(lambda: submit(data, timeout=10))
    assert isinstance(error, InvalidRequestError)
    assert error.reason == ("MESSAGE_TOO_LARGE" if size_bytes else "MALFORMED_MESSAGE")


def test_too_many_labels_are_rejected(jobs: JobServer) -> None:
    request = jobs_pb2.SubmitJobRequest(labels={str(number): "" for number in range(17)})
    request.request.input.text = "hello"
    error = error_of(lambda: jobs.stub.SubmitJob(request, timeout=10))
    assert error.reason == "INVALID_REQUEST"
    assert "labels" in error.message


def test_expired_jobs_are_removed_with_their_files(jobs_up: Deployment, tmp_path: Path) -> None:
    with job_server(tmp_path, jobs_up.endpoint, keep_s=1) as server:
        server.submit(job_id="brief")
        assert server.wait("brief").state == SUCCEEDED
        assert stored_names(tmp_path)
        eventually(lambda: not server.list(), timeout_s=30)
    assert stored_names(tmp_path) == []


@pytest.mark.parametrize(("steps", "state"), [(5, SUCCEEDED), (1500, RUNNING)], ids=["ended", "running"])
def test_a_deleted_job_leaves_nothing(jobs: JobServer, folder: Path, steps: int, state: int) -> None:
    before = stored_names(folder)
    jobs.submit(job_id="deleted", steps=steps)
    jobs.wait("deleted", state)
    jobs.stub.DeleteJob(jobs_pb2.DeleteJobRequest(job_id="deleted"), timeout=10)
    assert error_of(lambda: jobs.get("deleted")).reason == "UNKNOWN_JOB"
    assert "deleted" not in {job.job_id for job in jobs.list()}
    eventually(lambda: stored_names(folder) == before, timeout_s=20)


def test_a_job_survives_the_death_of_its_server(jobs_up: Deployment, tmp_path: Path) -> None:
    with make_server(tmp_path, jobs_up.endpoint) as server:
        server.start()
        server.submit(job_id="survivor", steps=150)
        server.wait("survivor", RUNNING)
        server.kill()
        server.start()
        job = server.wait("survivor")
    assert (job.state, job.attempts) == (SUCCEEDED, 2)
    assert len(stored_names(tmp_path)) == 1


def test_a_stopping_server_releases_its_jobs(jobs_up: Deployment, tmp_path: Path) -> None:
    endpoint = jobs_up.endpoint
    with make_server(tmp_path, endpoint) as server, make_server(tmp_path, endpoint, name="second") as second:
        server.start()
        server.submit(job_id="released", steps=150)
        server.wait("released", RUNNING)
        assert server.stop() == 0
        second.start()
        job = second.wait("released", timeout_s=12)
    assert job.state == SUCCEEDED


def test_jobs_wait_for_an_orchestrator_that_is_not_running(jobs_up: Deployment, tmp_path: Path) -> None:
    with job_server(tmp_path, "127.0.0.1:1") as server:
        server.submit(job_id="patient")
        eventually(lambda: server.get("patient").error.reason == "UNAVAILABLE", timeout_s=30)
        assert server.get("patient").state in (QUEUED, RUNNING)
    with job_server(tmp_path, jobs_up.endpoint) as server:
        job = server.wait("patient")
    assert (job.state, job.error.reason) == (SUCCEEDED, "")


def test_stored_outputs_of_a_stage_belong_to_the_job(tmp_path: Path) -> None:
    path = write_pipeline(tmp_path, song="{from: singer, media_type: audio/wav, stored: true}")
    with deployed(path) as up, job_server(tmp_path, up.endpoint) as server:
        server.submit(job_id="film")
        job = server.wait("film")
        assert job.state == SUCCEEDED
        (content,) = files_of(job, "song")
        assert content.startswith(b"RIFF")
        server.stub.DeleteJob(jobs_pb2.DeleteJobRequest(job_id="film"), timeout=10)
        assert stored_names(tmp_path) == []
