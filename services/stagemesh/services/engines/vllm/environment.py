"""What vLLM reads from the environment. Importing this module imports nothing of vLLM."""

import os


def prepare() -> None:
    """Sets what vLLM reads from the environment, where the user has not. Before the first import of vllm."""
    for name, value in {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    }.items():
        os.environ.setdefault(name, value)
