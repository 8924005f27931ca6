"""The measured pipeline: a tiny Qwen3-Omni in three stages, started as `stagemesh up` starts it."""

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path

import psutil

from benchmarks.omni_streams import stamps
from benchmarks.orchestrator_paths.processes import cpu_s
from stagemesh.cli.launcher import Launcher
from stagemesh.client import AsyncClient
from stagemesh.pipeline import load_pipeline

TORCHVISION = Path(sys.prefix) / "torchvision"
"""The folder into which `make venv` installs torchvision, which the thinker imports."""
FORK_SERVER = "fork server"
_MB = 1 << 20
_PIPELINE = """
pipeline: omni
main_stage: thinker
stages:
  thinker:
    engine: stamped_vllm
    model: {model}
    options:
      dtype: float32
      max_model_len: 2048
      kv_cache_memory_bytes: 16777216
      enable_prefix_caching: false
      hidden_states: {{layers: [accept], positions: true, prompt_only: true, dtype: float32}}
  talker:
    engine: stamped_vllm
    model: {model}
    options:
      dtype: float32
      max_model_len: 2048
      kv_cache_memory_bytes: 16777216
      codec: {{model: qwen3_omni.talker, dtype: float32}}
  code2wav: {{engine: function, function: stamped_code2wav, model: {model}, options: {{}}}}
edges:
  - {{from: thinker, to: talker, transform: qwen3_omni.thinker2talker}}
  - from: talker
    to: code2wav
    transform: qwen3_omni.talker2code2wav
    chunk: {{frames: 25, initial_frames: 4, ramp: auto}}
outputs: {{text: thinker.text, audio: code2wav}}
"""


@dataclass(frozen=True)
class Deployment:
    """A running pipeline."""

    client: AsyncClient
    stamps: Path
    """The folder with the stamps of its stages."""
    ready_s: float
    """The time from the start of the first process until all are ready."""
    processes: Mapping[str, psutil.Process]
    """The orchestrator's process, that of each replica, and the fork server. vLLM's processes are their children."""

    def cpu_s(self) -> dict[str, float]:
        """Returns the processor time of each process and its children so far."""
        return {name: sum(map(cpu_s, self._family(each))) for name, each in self.processes.items()}

    def memory_mb(self) -> dict[str, float]:
        """Returns the resident memory of each process and its children. Shared pages count in each process."""
        return {
            name: sum(member.memory_info().rss for member in self._family(each)) / _MB
            for name, each in self.processes.items()
        }

    def _family(self, process: psutil.Process) -> list[psutil.Process]:
        """Returns a process and its children, without those that have a name of their own."""
        named = self.processes.values()
        return [process, *(each for child in process.children() if child not in named for each in self._family(child))]


@asynccontextmanager
async def deployed(folder: Path) -> AsyncGenerator[Deployment]:
    """Runs the pipeline of `folder`. Yields when all processes are ready."""
    (stamp_folder := folder / "stamps").mkdir()
    changed = {"stages.*.options.stamps": str(stamp_folder)}
    pipeline = load_pipeline(str(folder / "pipeline.yaml"), overrides=changed)
    launcher = Launcher(pipeline, listen="127.0.0.1:0", overrides=changed)
    began_s = time.monotonic()
    async with launcher.running():
        await launcher.wait_ready()
        ready_s = time.monotonic() - began_s
        processes = {
            status.stage or status.name: psutil.Process(status.process_id) for status in launcher.processes.values()
        }
        for each in list(processes.values()):
            if (parent := each.parent()) is not None and parent.pid != os.getpid():
                processes[FORK_SERVER] = parent
        async with AsyncClient(launcher.endpoint) as client:
            yield Deployment(client, stamp_folder, ready_s, processes)


async def prepare(folder: Path) -> None:
    """Writes the model and the pipeline file, and makes the stages known to the processes that are started later."""
    model = folder / "model"
    written = await asyncio.create_subprocess_exec(
        Path(sys.executable).with_name("stagemesh"), "models", "tiny", "qwen3-omni", str(model)
    )
    assert await written.wait() == 0, "the tiny model cannot be written"
    config = json.loads((model / "config.json").read_text())["code2wav_config"]
    samples = prod((*config["upsampling_ratios"], *config["upsample_rates"]))
    assert samples == stamps.SAMPLES_PER_FRAME, "the tiny model has another number of samples per frame"
    (folder / "pipeline.yaml").write_text(_PIPELINE.format(model=model))
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(TORCHVISION), os.environ.get("PYTHONPATH")]))
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    stamps.register(folder)
