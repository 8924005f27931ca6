"""Converts the SmolLM2 model from a GGUF file to the format that vLLM loads fastest.

The format consists of bfloat16 safetensors, the config and the tokenizer.
"""

import logging
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from stagemesh.common.settings import set_library_variables


def convert(source: Path, target: Path, report: Callable[[str], None]) -> None:
    """Converts the GGUF file `source` and writes the model into the folder `target`. Implements `Prepare`.

    Calls `report` with a line of text for each phase.
    """
    # transformers must neither contact a hub nor draw progress bars over the caller's bars. It reads these variables
    # when it is imported.
    set_library_variables(
        {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1", "TORCHAO_FORCE_SKIP_LOADING_SO_FILES": "1"}, replace=True
    )
    # If this module is missing, the error of transformers does not name it.
    import_module("gguf")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    # transformers imports torchao if it is installed, which logs deprecations that are of no use to the user.
    logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)
    report("converting the tokenizer")
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(target)
    report("reading the weights")
    model = AutoModelForCausalLM.from_pretrained(
        source.parent,
        gguf_file=source.name,
        dtype=torch.bfloat16,
        quantization_config=GgufConfig(dequantize=True),
    )
    report("writing bfloat16 weights")
    model.save_pretrained(target)
