"""Replicas of external stages, which `stagemesh up` does not start."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from anyio.from_thread import start_blocking_portal

from stagemesh.cli.launcher.process_configs import stage_config
from stagemesh.common.process.config import dump_config
from stagemesh.common.process.stage_process import OrchestratorAddress
from stagemesh.pipeline import load_pipeline
from tests.children import killed_at_end
from tests.system.pipelines import pipeline_file
from tests.system.stub_stage import ReplicaFault, serving_stub

SONG = """\
pipeline: song
stages:
  writer:
    engine: fake
    function: source
    replicas: {writers}
    options: {{steps: {steps}, step_s: {step_s}, size_bytes: 30, checkpoint_steps: 1}}
  upper:
    engine: external
    {addresses}
    signature:
      accepts:
        text: uint8[bytes]
      emits:
        text: {{type: "uint8[bytes]", kind: text}}
  frames: {{engine: fake, function: frames}}
edges:
  - {{from: writer, to: upper{edge}}}
  - {{from: upper, to: frames}}
outputs: {{text: upper, frames: frames}}
"""


def song(folder: Path, *addresses: str, edge: str = "", steps: int = 10, step_s: float = 0.0, writers: int = 1) -> Path:
    """Writes the pipeline writer → upper → frames, in which `upper` is external and returns its text.

    `addresses` are the addresses of the replicas of `upper`, and `edge` is the YAML of further keys of the edge to it.
    """
    listed = f"addresses: {json.dumps(addresses)}" if addresses else ""
    text = SONG.format(addresses=listed, edge=edge, steps=steps, step_s=step_s, writers=writers)
    return pipeline_file(folder, text, name="song")


@contextmanager
def external_replica(
    pipeline: Path,
    *,
    listen: str = "127.0.0.1:0",
    admin: str = "",
    name: str = "upper-0",
    engine: str = "fake",
    function: str = "relay",
) -> Iterator["subprocess.Popen[bytes]"]:
    """Runs a replica of the stage `upper` in a process of its own. Registers it at `admin` if that is not empty."""
    loaded = load_pipeline(str(pipeline))
    config = replace(
        stage_config(loaded, loaded.stages["upper"], replica=name, listen=listen),
        engine=engine,
        function=function,
        orchestrators=(OrchestratorAddress(admin),) if admin else (),
    )
    command = [str(Path(sys.executable).with_name("stagemesh")), "serve", "stage", "-"]
    with killed_at_end(subprocess.Popen(command, stdin=subprocess.PIPE)) as process:
        assert process.stdin is not None
        process.stdin.write(dump_config(config))
        process.stdin.close()
        yield process


@contextmanager
def stub_replica(
    pipeline: Path, *, listen: str, name: str = "upper-0", fault: ReplicaFault = ReplicaFault.NONE
) -> Iterator[None]:
    """Runs a replica of the stage `upper` that is made of generated stubs alone, in a thread of this process."""
    with (
        start_blocking_portal() as portal,
        portal.wrap_async_context_manager(serving_stub(load_pipeline(str(pipeline)), listen, name=name, fault=fault)),
    ):
        yield
