"""vLLM's `vllm.general_plugins` entry point: called in every process that vLLM starts, before anything else there."""

import multiprocessing
from typing import Any

from vllm.platforms import current_platform

from stagemesh.common.process_lifecycle import die_with_parent
from stagemesh.services.engines.vllm.run_ahead import scheduler

_PUNICA = "stagemesh.services.engines.vllm.adapters.cpu_rows.AppliesOnlyChosen"


def register() -> None:
    """Has vLLM's own processes (engine core, workers) end with the process that started them, however that ends.

    Also gives the engine core the method that a replica calls there.
    """
    if current_platform.is_cpu():
        # vLLM compiles small functions of its sampler whatever `enforce_eager` says. On a CPU the first request for
        # log-probabilities would hold all others up for seconds, and end the engine where there is no C++ compiler.
        platform: Any = type(current_platform)
        platform.simple_compile_backend = "eager"
        # Named, not imported: few stages have adapters.
        platform.get_punica_wrapper = classmethod(lambda _: _PUNICA)
    scheduler.offer()
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid is not None:
        die_with_parent(parent.pid)
