"""A stage with the vllm engine and a probe of its event loop, in a process of its own."""

import json
import socket
from collections.abc import Mapping
from pathlib import Path

from pydantic import JsonValue

from benchmarks.ar_variants.loop_probe import Tick
from benchmarks.ar_variants.model_files import options_of
from benchmarks.ar_variants.states_consumer import GENERATION, PIPELINE, PRODUCER
from benchmarks.stage_process import StageProcess
from stagemesh.common.process.stage_process import DataPlaneConfig, StageConfig

ARENA_BYTES = 32 << 20
"""The whole arena is in memory from the start. The default is twice this size."""
_MAX_REPORT_BYTES = 1 << 20
EMITS_STATES: Mapping[str, JsonValue] = {"hidden_states": {"layers": ["last"], "dtype": "bfloat16"}}


class StagedEngine(StageProcess):
    """A `StageProcess` with a probe."""

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
            command = ("benchmarks.ar_variants.probed_stage", "--probe", str(number))
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
        return [Tick(*tick) for tick in json.loads(self._probe.recv(_MAX_REPORT_BYTES))]
