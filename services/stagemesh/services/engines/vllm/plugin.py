"""The plugin for vLLM's entry point group `vllm.general_plugins`. Each process that vLLM starts first calls
`register`.
"""

import multiprocessing
import operator
from typing import Any

from vllm import ModelRegistry
from vllm.model_executor.models import registry
from vllm.platforms import current_platform

from stagemesh.common.plugins.descriptors import CodecModelDescriptor
from stagemesh.common.plugins.entry_points import load_descriptors
from stagemesh.common.process.lifecycle import die_with_parent

_PUNICA = "stagemesh.services.engines.vllm.worker.SelectiveLoraKernels"


def register() -> None:
    """Prepares the current vLLM process (engine core or worker).

    - Registers the codec language models.
    - On a CPU, disables compilation of the sampler, replaces vLLM's LoRA kernels by `worker.SelectiveLoraKernels`, and
      inspects classes of models in this process.
    - Makes the process terminate when its parent process terminates.
    """
    if current_platform.is_cpu():
        # vLLM compiles small functions of its sampler even with `enforce_eager`. On a CPU the first request for
        # log-probabilities would delay all others by seconds, or would end the engine if there is no C++ compiler.
        platform: Any = type(current_platform)
        platform.simple_compile_backend = "eager"
        # Passed by name, because this process may not be a worker.
        platform.get_punica_wrapper = classmethod(lambda _: _PUNICA)
        # vLLM inspects a class in a process of its own, so that this one does not initialize CUDA. That process imports
        # vLLM again, which takes ten seconds.
        inspection: Any = registry
        inspection._run_in_subprocess = operator.call  # noqa: SLF001  # vLLM has no option for it
    for descriptor in load_descriptors(CodecModelDescriptor):
        ModelRegistry.register_model(descriptor.architecture, descriptor.model_class)
    parent = multiprocessing.parent_process()
    if parent is not None and parent.pid is not None:
        die_with_parent(parent.pid)
