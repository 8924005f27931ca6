"""Runs the workers of a further node of a vllm stage that spans nodes.

`python -m stagemesh.services.engines.vllm.node --config FILE`, with the config of the stage and its own `node_rank`.
The process on the first node (`node_rank: 0`) is the replica. This process serves no port.
"""

import asyncio
import sys
from threading import Thread

from stagemesh.common.errors import UnavailableError
from stagemesh.common.process.lifecycle import run_configured
from stagemesh.common.process.stage_process import StageConfig
from stagemesh.services.engines.vllm.engine import VllmEngine

_END_S = 20.0
"""The time in seconds that the replica needs to end after its drain."""


async def run_workers(config: StageConfig, stopping: asyncio.Event) -> None:
    """Runs the workers until the replica has drained after SIGTERM.

    Kubernetes stops all nodes of a replica at the same time, and the steps that the replica drains need all workers.
    Raises UnavailableError if a worker ends before.
    """
    loop, ended, loaded = asyncio.get_running_loop(), asyncio.Event(), asyncio.Event()
    failures: list[Exception] = []

    def run() -> None:
        try:
            executor = VllmEngine(config).start_workers()
            loop.call_soon_threadsafe(loaded.set)
            executor.start_worker_monitor(inline=True)
        except Exception as exc:  # noqa: BLE001 - raised below
            failures.append(exc)
        loop.call_soon_threadsafe(ended.set)

    # The kernel terminates the workers when the thread that started them ends. It ends with the process at the latest.
    Thread(target=run, name="vllm-owner", daemon=True).start()
    events = [asyncio.create_task(event.wait()) for event in (ended, stopping)]
    await asyncio.wait(events, return_when=asyncio.FIRST_COMPLETED)
    if stopping.is_set() and loaded.is_set():
        await asyncio.wait(events[:1], timeout=config.drain_s + _END_S)
    for event in events:
        event.cancel()
    if not stopping.is_set():
        raise failures[0] if failures else UnavailableError("a worker of this node ended", reason="ENGINE_FAILED")


if __name__ == "__main__":
    sys.exit(run_configured(StageConfig, run_workers, module="stagemesh.services.engines.vllm.node"))
