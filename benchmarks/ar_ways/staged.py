"""Runs a stage on the vllm engine in a separate process, with a probe of its event loop."""

import json
import socket
from collections.abc import Mapping
from pathlib import Path

from pydantic import JsonValue

from benchmarks.ar_ways.loop_probe import Tick
from benchmarks.ar_ways.models import options_of
from benchmarks.ar_ways.taker import GENERATION, PIPELINE, PRODUCER
from benchmarks.stage_process import StageProcess
from stagemesh.common.stage_config import DataPlaneConfig, StageConfig

ARENA_BYTES = 32 << 20
"""The size of the arena, which is fully allocated at the start. The default is twice as large."""
_MAX_TOLD_BYTES = 1 << 20
EMITS_STATES: Mapping[str, JsonValue] = {"hidden_states": {"layers": ["last"], "dtype": "bfloat16"}}


class StagedEngine(StageProcess):
    """A stage process with a probe."""

    def __init__(self, folder: Path, *, model: Path, name: str, options: Mapping[str, JsonValue] | None = None) -> None:
        config = StageConfig(
            pipeline=PIPELINE,
            generation=GENERATION,
            stage=name,
            replica=PRODUCER,
            engine="vllm",
            listen="",
            model=str(model),
            data_plane=DataPlaneConfig(arena_bytes=ARENA_BYTES),
            options={**options_of(model), **(options or {})},
        )
        self._probe, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            number = theirs.fileno()
            command = ("benchmarks.ar_ways.probed_stage", "--probe", str(number))
            super().__init__(folder, config, command=command, pass_fds=[number])

    def __exit__(self, *_: object) -> None:
        self._probe.close()
        super().__exit__()

    def begin_probe(self) -> None:
        """Starts the probe."""
        self._probe.send(b"begin")

    def end_probe(self) -> list[Tick]:
        """Stops the probe and returns the late ticks."""
        self._probe.send(b"end")
        return [Tick(*tick) for tick in json.loads(self._probe.recv(_MAX_TOLD_BYTES))]
