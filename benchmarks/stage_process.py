"""Runs a stage in a separate process, for a benchmark to call."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Self

import grpc

from benchmarks.edge_ways.worker import WorkerError
from stagemesh.common.process.config import dump_config
from stagemesh.common.process.stage_process import StageConfig
from stagemesh.v1 import stage_pb2, stage_pb2_grpc

READY_S = 180.0
"""The time limit of an engine's start on a loaded machine."""
_POLL_S = 0.02


class StageProcess:
    """A stage process. The constructor starts it, and `with` waits until it is READY."""

    def __init__(
        self,
        folder: Path,
        config: StageConfig,
        *,
        command: Sequence[str] = ("stagemesh.services.stage",),
        pass_fds: Sequence[int] = (),
    ) -> None:
        """Replaces `config.listen`. `command` is a module and its arguments, in addition to `--config`."""
        self.endpoint = f"127.0.0.1:{_free_port()}"
        self._log = folder / f"{config.stage}.log"
        file = folder / f"{config.stage}.json"
        file.write_bytes(dump_config(replace(config, listen=self.endpoint, parent_pid=os.getpid())))
        module, *arguments = command
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, "--config", str(file), *arguments],
                pass_fds=pass_fds,
                stdout=log,
                stderr=log,
            )

    def __enter__(self) -> Self:
        try:
            self._wait_ready()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(30)
        finally:
            self._process.kill()

    @property
    def process_id(self) -> int:
        """The id of the service process. The engine's processes are its children."""
        return self._process.pid

    def _wait_ready(self) -> None:
        end_s = time.monotonic() + READY_S
        with grpc.insecure_channel(self.endpoint) as channel:
            stub = stage_pb2_grpc.StageServiceStub(channel)
            while self._state(stub) != stage_pb2.REPLICA_STATE_READY:
                if self._process.poll() is not None or time.monotonic() > end_s:
                    raise WorkerError(f"the stage does not become ready; its log says why:\n{self._log.read_text()}")
                time.sleep(_POLL_S)

    def _state(self, stub: stage_pb2_grpc.StageServiceStub) -> int:
        try:
            return stub.Describe(stage_pb2.DescribeRequest(), timeout=5, wait_for_ready=True).state
        except grpc.RpcError:
            return stage_pb2.REPLICA_STATE_UNSPECIFIED


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port
