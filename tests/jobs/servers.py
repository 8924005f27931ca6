"""A pipeline with an object store, and job servers in processes of their own."""

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

import grpc

from stagemesh.cli.launcher.ports import PortPicker
from stagemesh.common.errors import StagemeshError
from stagemesh.common.process.config import dump_config
from stagemesh.common.process.media_config import MediaConfig
from stagemesh.jobs.config import JobServerConfig
from stagemesh.rpc.error_mapping import from_rpc_error
from stagemesh.v1 import jobs_pb2, jobs_pb2_grpc, orchestrator_pb2
from tests.deployment import eventually
from tests.rpc.health_calls import Response, read_status
from tests.system.pipelines import pipeline_file

PIPELINE = """\
pipeline: spoken
stages:
  writer: {{engine: fake, function: source, options: {{steps: 5, step_s: 0.02}}}}
  tuner: {{engine: fake, function: frames}}
  singer: {{engine: fake, function: sound}}
edges: [{{from: writer, to: tuner}}, {{from: tuner, to: singer}}]
outputs: {{text: writer, song: {song}}}
media: {{store: {store}}}
"""
QUEUED, RUNNING = jobs_pb2.JOB_STATE_QUEUED, jobs_pb2.JOB_STATE_RUNNING
SUCCEEDED, FAILED, CANCELLED = jobs_pb2.JOB_STATE_SUCCEEDED, jobs_pb2.JOB_STATE_FAILED, jobs_pb2.JOB_STATE_CANCELLED
ENDED = (SUCCEEDED, FAILED, CANCELLED)


def write_pipeline(folder: Path, *, song: str = "singer") -> Path:
    """Writes a pipeline whose store is a folder next to the file. Returns the file's path."""
    (folder / "store").mkdir(exist_ok=True)
    return pipeline_file(folder, PIPELINE.format(song=song, store=folder / "store"))


class JobServer:
    """A job server in a process of its own, and a stub for it."""

    def __init__(self, config: JobServerConfig, folder: Path) -> None:
        self.config = config
        self._path = folder / f"{config.name}-{config.listen.rpartition(':')[2]}.json"
        self._path.write_bytes(dump_config(config))
        self.log = self._path.with_suffix(".log")
        self.process: subprocess.Popen[bytes] | None = None
        self._channel = grpc.insecure_channel(config.listen, options=[("grpc.max_reconnect_backoff_ms", 200)])
        self.stub = jobs_pb2_grpc.JobServiceStub(self._channel)

    def start(self) -> None:
        """Starts the process, and waits until it serves."""
        self.launch()
        eventually(self.is_serving, timeout_s=90)

    def launch(self) -> None:
        """Starts the process."""
        with self.log.open("ab") as log:
            command = [sys.executable, "-m", "stagemesh.jobs", "--config", str(self._path)]
            self.process = subprocess.Popen(command, stderr=log)

    def kill(self) -> None:
        """Kills the process."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        """Stops the process by SIGTERM, and returns its exit status."""
        assert self.process is not None
        self.process.terminate()
        return self.process.wait(timeout=30)

    def submit(
        self, prompt: str = "hello", *, job_id: str = "", caller: str = "", steps: int = 5, **fields: Any
    ) -> jobs_pb2.Job:
        """Submits a job. It runs for the number of steps, each of which takes 20 ms."""
        request = orchestrator_pb2.GenerateRequest(request_id=job_id, caller=caller, **fields)
        request.parameters.sampling.max_tokens = steps
        request.input.text = prompt
        return self.stub.SubmitJob(jobs_pb2.SubmitJobRequest(request=request), timeout=10).job

    def get(self, job_id: str, *, caller: str = "") -> jobs_pb2.Job:
        """Returns a job."""
        return self.stub.GetJob(jobs_pb2.GetJobRequest(job_id=job_id, caller=caller), timeout=10).job

    def wait(self, job_id: str, *states: int, timeout_s: float = 90) -> jobs_pb2.Job:
        """Waits until a job has one of these states, by default a final one. Returns the job."""
        found: list[jobs_pb2.Job] = []

        def has_state() -> bool:
            with suppress(grpc.RpcError):
                found.append(self.get(job_id))
            return bool(found) and found[-1].state in (states or ENDED)

        eventually(has_state, timeout_s=timeout_s)
        return found[-1]

    def list(self, *, caller: str = "", states: Sequence[Any] = ()) -> Sequence[jobs_pb2.Job]:
        """Returns the first page of jobs."""
        return self.stub.ListJobs(jobs_pb2.ListJobsRequest(caller=caller, states=states), timeout=10).jobs

    def is_serving(self, name: str = "") -> bool:
        """Returns whether the status of a health name is SERVING. Fails if the process has ended."""
        assert self.process is not None
        assert self.process.poll() is None, self.log.read_text()
        with suppress(grpc.RpcError):
            return read_status(self._channel, name, timeout_s=1) == Response.SERVING
        return False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._channel.close()
        if self.process is not None:
            self.process.kill()
            self.process.wait()


def make_server(folder: Path, server: str, **settings: Any) -> JobServer:
    """Returns a job server that has not been started. Its database is in `folder` unless a setting says otherwise."""
    given = {"database": f"sqlite:///{folder / 'jobs.sqlite3'}", **settings}
    listen = f"127.0.0.1:{PortPicker().pick()}"
    return JobServer(JobServerConfig("spoken", listen, [server], MediaConfig(str(folder / "store")), **given), folder)


@contextmanager
def job_server(folder: Path, server: str, **settings: Any) -> Iterator[JobServer]:
    """Runs a job server."""
    with make_server(folder, server, **settings) as made:
        made.start()
        yield made


def error_of(call: Any) -> StagemeshError:
    """Returns the error with which a call fails."""
    try:
        call()
    except grpc.RpcError as exc:
        return from_rpc_error(exc, peer="jobs")
    raise AssertionError("the call has succeeded")


def files_of(job: jobs_pb2.Job, output: str) -> list[bytes]:
    """Returns the contents of the files of an output."""
    found = next(each for each in job.outputs if each.name == output)
    return [Path(file.uri.removeprefix("file://")).read_bytes() for file in found.files]


def stored_names(folder: Path) -> list[str]:
    """Returns the paths of the finished files in the store, relative to it."""
    store = folder / "store"
    names = (str(path.relative_to(store)) for path in store.rglob("*") if path.is_file())
    return sorted(name for name in names if not name.startswith(".partial/"))
