"""Imports vLLM into the process that forks the stages of one host. Only for the build of vLLM for CPUs."""

from collections.abc import Callable
from importlib import import_module

from stagemesh.services.engines.vllm.engine import prepare_environment

_MODULES = (
    "vllm.usage.usage_lib",
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.core",
    "vllm.v1.executor.uniproc_executor",
    "stagemesh.services.engines.vllm.arguments",
    "stagemesh.services.engines.vllm.conversion",
    "stagemesh.services.engines.vllm.worker",
)


def preload() -> Callable[[], None]:
    """Imports vLLM. Returns the function that each forked process calls before it starts a thread.

    If vLLM cannot be imported, the stage reports that when it loads its engine.
    """
    prepare_environment()
    try:
        # First, because vLLM decorates functions of these modules with the compiler that the plugin replaces.
        import_module("vllm.plugins").load_general_plugins()
        for module in _MODULES:
            import_module(module)
    except ImportError:
        return _do_nothing
    from stagemesh.services.engines.vllm.core_process import fork_core

    return fork_core


def _do_nothing() -> None:
    pass
