"""What vLLM reads from the environment. Importing this module imports nothing of vLLM."""

from stagemesh.common.settings import set_library_variables


def prepare() -> None:
    """Sets what vLLM reads from the environment, where the user has not. Before the first import of vllm."""
    set_library_variables(
        {
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_LOGGING_LEVEL": "WARNING",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
        }
    )
