"""A stage process with a probe of its event loop.

`python -m benchmarks.ar_variants.probed_stage --config FILE --probe FD`: FD is a socket. The message "begin" starts the
probe, and "end" is answered with the late ticks.
"""

import argparse
import asyncio
import json
import socket
import sys
from functools import partial
from pathlib import Path

from benchmarks.ar_variants.loop_probe import LoopProbe
from stagemesh.common.process.config import load_config
from stagemesh.common.process.lifecycle import run_service
from stagemesh.common.process.stage_process import StageConfig
from stagemesh.services.stage.process import serve


class ProbeControl:
    """Starts and stops a probe of the running loop on commands from a socket."""

    def __init__(self, control: socket.socket) -> None:
        self._control, self._probe = control, LoopProbe()
        asyncio.get_running_loop().add_reader(control, self._read_command)

    def _read_command(self) -> None:
        command = self._control.recv(16)
        if command == b"begin":
            self._probe.begin()
            return
        ticks = self._probe.end()
        if command:
            self._control.send(json.dumps(ticks).encode())
        else:
            asyncio.get_running_loop().remove_reader(self._control)


async def _serve(config: StageConfig, control: socket.socket, stopping: asyncio.Event) -> None:
    ProbeControl(control)
    await serve(config, stopping)


def main() -> int:
    """Serves a stage until SIGTERM."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--probe", type=int, required=True)
    arguments = parser.parse_args()
    config = load_config(StageConfig, arguments.config)
    with socket.socket(fileno=arguments.probe) as control:
        return run_service(partial(_serve, config, control), parent_pid=config.parent_pid)


if __name__ == "__main__":
    sys.exit(main())
