"""Converts the SmolLM2 GGUF file into what vLLM loads fastest: bfloat16 safetensors, config and tokenizer."""

from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from stagemesh.common.settings import set_library_variables


def convert(source: Path, target: Path, report: Callable[[str], None]) -> None:
    """Writes the model of the GGUF file `source` into the folder `target`."""
    # Read when transformers is imported: it must neither contact a hub nor draw progress bars over the caller's.
    set_library_variables({"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}, replace=True)
    # The error of transformers does not name this module if it is missing.
    import_module("gguf")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

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
