"""vLLM's `vllm.general_plugins` entry point: called in every process that vLLM starts, before anything else there."""

import multiprocessing

from stagemesh.services.serving.lifecycle import die_with_parent


def register() -> None:
    """Has vLLM's own processes (engine core, workers) end with the process that started them, however that ends."""
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid is not None:
        die_with_parent(parent.pid)
