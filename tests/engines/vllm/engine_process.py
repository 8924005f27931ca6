"""A process with a vllm engine for a test to kill. Prints "ready", then generates forever.

The arguments are the model, "spawned" or "forked", which says how the engine core starts, and the `load_format`.
"""

import asyncio
import sys

from stagemesh.services.engines.base import SamplingOptions, Task
from stagemesh.services.engines.vllm.engine import VllmEngine
from stagemesh.services.engines.vllm.engine_core import preload
from tests.engines.support import stage_config
from tests.engines.vllm.tiny_model import OPTIONS


async def main(model: str, load_format: str) -> None:
    """Runs until the process is killed."""
    engine = VllmEngine(stage_config("vllm", model=model, options={**OPTIONS, "load_format": load_format}))
    await engine.start(lambda _: None)
    print("ready", flush=True)
    while True:
        async for _ in engine.submit(Task("r", 1, "hello", sampling=SamplingOptions(max_tokens=200))):
            pass


if __name__ == "__main__":
    _, path, start, weights = sys.argv
    if start == "forked":
        preload()()
    asyncio.run(main(path, weights))
