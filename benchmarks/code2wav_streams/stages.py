"""A talker that emits random frames at the rate that a request chooses, and code2wav with a record of its calls."""

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import numpy as np
import torch
from pydantic import JsonValue, TypeAdapter

from stagemesh.common.plugins.descriptors import Emitted, EngineDescriptor, OptionSpec, Signature
from stagemesh.common.plugins.entry_points import import_factory
from stagemesh.common.process.stage_process import StageConfig
from stagemesh.common.wire.tensors import TensorSpec, Value
from stagemesh.connectors.packets import Packet
from stagemesh.services.engines.abilities import EngineAbilities
from stagemesh.services.engines.base import Emission, EngineEvent, EngineLoad, Task, Usage
from stagemesh.services.engines.function.base import Call, Function
from stagemesh.services.models.qwen3_omni import CODE2WAV

RECORD = "record"
"""The stage option of code2wav with the file for the record of its calls."""
RATE, GROUPS, CODEBOOK = "frames_per_s", "groups", "codebook"
"""The options of a request for the talker."""


class ScriptedTalker:
    """An engine that emits `max_tokens` random frames, each at its time. It computes nothing."""

    def __init__(self, config: StageConfig) -> None:
        del config
        self._running = 0

    @property
    def abilities(self) -> EngineAbilities:
        return EngineAbilities()

    async def start(self, report: Callable[[str], None]) -> None:
        del report

    async def submit(self, task: Task) -> AsyncGenerator[EngineEvent, None]:
        rate, count = float(task.options[RATE]), task.sampling.max_tokens or 1
        shape = count, int(task.options[GROUPS])
        codes = np.random.default_rng(task.seed).integers(0, int(task.options[CODEBOOK]), shape, np.int32)
        loop = asyncio.get_running_loop()
        self._running, began_s = self._running + 1, loop.time()
        try:
            for number in range(count):
                if rate:
                    await asyncio.sleep(max(0.0, began_s + (number + 1) / rate - loop.time()))
                yield Emission(Packet({"codes": codes[number : number + 1]}))
            yield Usage(output_tokens=count, engine_steps=count)
        finally:
            self._running -= 1

    def load(self) -> EngineLoad:
        return EngineLoad(self._running, 0, work_s=0.0)

    async def wait_failed(self) -> str:
        await asyncio.Event().wait()
        raise AssertionError("this engine never fails")

    async def close(self) -> None:
        pass


@dataclass(frozen=True)
class VocoderCall:
    """One call of code2wav. A request's last call has no frames and is not recorded."""

    began_s: float
    """CLOCK_MONOTONIC, in seconds."""
    seconds: float
    frames: Sequence[int]
    """The new frames of each stream."""
    reserved_bytes: int
    """The memory that torch has reserved on the GPU, or 0."""


class RecordedVocoder:
    """The function code2wav, which also records its calls."""

    def __init__(self, model: Path | None, options: Mapping[str, JsonValue]) -> None:
        given = {name: value for name, value in options.items() if name != RECORD}
        self._vocoder: Function[object] = import_factory(CODE2WAV.factory)(model, given)
        self._record = Path(str(options[RECORD]))

    def open(self, *, seed: int, options: Mapping[str, Value]) -> object:
        return self._vocoder.open(seed=seed, options=options)

    def __call__(self, batch: Sequence[Call[object]]) -> Sequence[Sequence[Packet]]:
        began_s = time.monotonic()
        made = self._vocoder(batch)
        seconds = time.monotonic() - began_s
        if frames := [len(call.packet.tensors["codes"]) for call in batch if call.packet is not None]:
            reserved_bytes = torch.cuda.memory_reserved() if torch.cuda.is_available() else 0
            with self._record.open("a") as file:
                file.write(json.dumps(asdict(VocoderCall(began_s, seconds, frames, reserved_bytes))) + "\n")
        return made


_CALL = TypeAdapter(VocoderCall)


def read_record(file: Path) -> list[VocoderCall]:
    """Returns the calls in a record."""
    return [_CALL.validate_json(line) for line in file.read_text().splitlines()]


TALKER = EngineDescriptor(
    factory=f"{__name__}:ScriptedTalker",
    signature=lambda _function, _options: Signature(
        emits={"codes": Emitted(TensorSpec("int32", ("frames", "groups")))},
        options={
            RATE: OptionSpec(12.5, minimum=0, description="Frames a second. 0: all at once."),
            GROUPS: OptionSpec(16, minimum=1),
            CODEBOOK: OptionSpec(2048, minimum=1),
        },
        sampling=True,
    ),
    needs_model=False,
)
VOCODER = replace(CODE2WAV, factory=f"{__name__}:RecordedVocoder", stage_options=None)
