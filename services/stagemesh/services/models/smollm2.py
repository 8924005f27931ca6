"""Turns the SmolLM2 GGUF file into what vLLM loads fastest: bfloat16 safetensors, config, tokenizer, chat template."""

# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false
# (torch and transformers are only partly typed)

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import gguf
import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import save_file

from stagemesh.common.settings import set_library_variables


def convert(source: Path, target: Path, report: Callable[[str], None]) -> None:
    """Writes the model of the GGUF file `source` into the folder `target`."""
    report("converting the tokenizer")
    _write_tokenizer(source, target)
    report("reading the weights")
    reader = gguf.GGUFReader(source)
    _write_config(reader, target)
    report("writing bfloat16 weights")
    _write_weights(reader, target)


def _field(reader: gguf.GGUFReader, name: str) -> int | float:
    value: object = reader.fields[name].contents()
    assert isinstance(value, int | float), f"{name} of the GGUF file is {value!r}"
    return value


def _count(reader: gguf.GGUFReader, name: str) -> int:
    return int(_field(reader, name))


def _write_tokenizer(source: Path, target: Path) -> None:
    # Read when transformers is imported: nothing may be asked of a hub.
    set_library_variables({"HF_HUB_OFFLINE": "1"}, replace=True)
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name)
    tokenizer.save_pretrained(target)


def _write_config(reader: gguf.GGUFReader, target: Path) -> None:
    special = {
        "bos_token_id": _count(reader, "tokenizer.ggml.bos_token_id"),
        "eos_token_id": _count(reader, "tokenizer.ggml.eos_token_id"),
        "pad_token_id": _count(reader, "tokenizer.ggml.padding_token_id"),
    }
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": _count(reader, "llama.vocab_size"),
        "hidden_size": _count(reader, "llama.embedding_length"),
        "intermediate_size": _count(reader, "llama.feed_forward_length"),
        "num_hidden_layers": _count(reader, "llama.block_count"),
        "num_attention_heads": _count(reader, "llama.attention.head_count"),
        "num_key_value_heads": _count(reader, "llama.attention.head_count_kv"),
        "max_position_embeddings": _count(reader, "llama.context_length"),
        "rms_norm_eps": _field(reader, "llama.attention.layer_norm_rms_epsilon"),
        "rope_parameters": {"rope_type": "default", "rope_theta": _field(reader, "llama.rope.freq_base")},
        "tie_word_embeddings": True,
        **special,
    }
    (target / "config.json").write_text(json.dumps(config, indent=2))
    (target / "generation_config.json").write_text(json.dumps(special, indent=2))


def _write_weights(reader: gguf.GGUFReader, target: Path) -> None:
    weights = {name: torch.from_numpy(array).to(torch.bfloat16) for name, array in _weights(reader)}
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})


def _weights(reader: gguf.GGUFReader) -> Iterator[tuple[str, npt.NDArray[np.float32]]]:
    """Each tensor in float32 under the name that transformers gives it."""
    layers = _count(reader, "llama.block_count")
    names = _transformers_names(layers)
    heads = {
        "attn_q": _count(reader, "llama.attention.head_count"),
        "attn_k": _count(reader, "llama.attention.head_count_kv"),
    }
    for tensor in reader.tensors:
        array = gguf.dequantize(tensor.data, tensor.tensor_type)
        kind = tensor.name.split(".")[-2]
        if kind in heads:
            array = _unpermuted(array, heads[kind])
        yield names[tensor.name], np.array(array, np.float32)  # a copy: torch takes none that is read-only


def _unpermuted(array: npt.NDArray[np.float32], heads: int) -> npt.NDArray[np.float32]:
    # GGUF interleaves the two halves of each rotary head; transformers keeps them side by side.
    return array.reshape(heads, -1, 2, array.shape[-1]).swapaxes(1, 2).reshape(array.shape)


def _transformers_names(layers: int) -> dict[str, str]:
    parts = {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    names = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    for layer in range(layers):
        for short, long in parts.items():
            names[f"blk.{layer}.{short}.weight"] = f"model.layers.{layer}.{long}.weight"
    return names
