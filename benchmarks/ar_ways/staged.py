"""A stage on the vllm engine, in a process of its own."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Self

import grpc
from pydantic import JsonValue

from benchmarks.ar_ways.models import options_of
from benchmarks.ar_ways.probed_stage import Stalls
from benchmarks.ar_ways.taker import GENERATION, PIPELINE, PRODUCER
from benchmarks.edge_ways.worker import WorkerError
from stagemesh.services.serving.config import DataPlaneConfig, StageConfig, dump_stage_config
from stagemesh.v1 import stage_pb2, stage_pb2_grpc

ARENA_BYTES = 32 << 20
"""All of an arena is in memory from the start; the default has twice as much."""
EMITS_STATES: Mapping[str, JsonValue] = {"hidden_states": {"layers": ["last"], "dtype": "bfloat16"}}
READY_S = 180.0
"""For an engine to start in, on a machine that has much else to do."""
_POLL_S = 0.02


class StagedEngine:
    """Started by the constructor, READY within `with`."""

    def __init__(self, folder: Path, *, model: Path, name: str, options: Mapping[str, JsonValue] | None = None) -> None:
        port = _free_port()
        self.endpoint = f"127.0.0.1:{port}"
        self._log = folder / f"{name}.log"
        config = StageConfig(
            pipeline=PIPELINE,
            generation=GENERATION,
            stage="ar",
            replica=PRODUCER,
            engine="vllm",
            listen=self.endpoint,
            model=str(model),
            data_plane=DataPlaneConfig(arena_bytes=ARENA_BYTES),
            options={**options_of(model), **(options or {})},
            parent_pid=os.getpid(),
        )
        file = folder / f"{name}.json"
        file.write_bytes(dump_stage_config(config))
        self._probe, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-m", "benchmarks.ar_ways.probed_stage", "--config", str(file)]
        with theirs, self._log.open("w") as log:
            number = theirs.fileno()
            self._process = subprocess.Popen(
                [*command, "--probe", str(number)], pass_fds=[number], stdout=log, stderr=log
            )

    def __enter__(self) -> Self:
        try:
            self._wait_ready()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._probe.close()
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(30)
        finally:
            self._process.kill()

    @property
    def process_id(self) -> int:
        """The service; the engine's processes are its children."""
        return self._process.pid

    def begin_probe(self) -> None:
        """From now on."""
        self._probe.send(b"begin")

    def end_probe(self) -> Stalls:
        """What was seen since."""
        self._probe.send(b"end")
        return Stalls(**json.loads(self._probe.recv(4096)))

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
