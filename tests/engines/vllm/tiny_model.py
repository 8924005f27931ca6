"""A Qwen3 with a few thousand random weights and a tokenizer with one token for each byte."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import JsonValue
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

MAX_MODEL_LEN = 256
MODEL_LAYERS = 4
"""The number of layers of the model whose hidden states are compared."""
OPTIONS: Mapping[str, JsonValue] = {"load_format": "dummy", "kv_cache_memory_bytes": 8 << 20}
"""The stage options to load it."""
FLOAT32: Mapping[str, JsonValue] = {"dtype": "float32", "kv_cache_memory_bytes": 8 << 20}
"""The stage options to compute in float32 with weights from files."""
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TOOLS_TEMPLATE = (
    "{% if refuse is defined %}{{ raise_exception('refused: ' + refuse) }}{% endif %}"
    "{% for tool in tools or [] %}{{ tool.type }}:{{ tool.function | tojson }}|{% endfor %}"
    "{% for message in messages %}<|{{ message.role }}|>{{ message.content }}"
    "{% for call in message.tool_calls or [] %}"
    "[{{ call.id }} {{ call.function.name }} {{ call.function.arguments.city }}]{% endfor %}"
    "{% if message.tool_call_id %}({{ message.tool_call_id }} {{ message.name }}){% endif %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% if thinking is false %}no thoughts{% endif %}{% endif %}"
)
SPECIAL = ("<|end|>", "<|user|>", "<|assistant|>", "<|system|>")
"""The tokens of chat templates. The first one ends a text."""


def write_tiny_model(folder: Path, *, template: str = CHAT_TEMPLATE, positions: int = MAX_MODEL_LEN) -> Path:
    """Writes a model that vLLM loads with load_format="dummy"."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = byte_tokenizer(SPECIAL)
    tokenizer.save(str(folder / "tokenizer.json"))
    kind = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "dtype": "float32"}
    sizes = text_config(tokenizer.get_vocab_size(), positions)
    _write(folder / "config.json", {**kind, **sizes, "tie_word_embeddings": True})
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>", "pad_token": "<|end|>"}
    _write(folder / "tokenizer_config.json", {**settings, "chat_template": template})
    return folder


def byte_tokenizer(special: Sequence[str]) -> Tokenizer:
    """Returns a tokenizer with one token for each of the special words and each byte."""
    words = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={word: number for number, word in enumerate(words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(special))
    return tokenizer


def text_config(vocabulary: int, positions: int) -> dict[str, Any]:
    """Returns the sizes of a tiny language model with the end token 0."""
    return {
        "vocab_size": vocabulary,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "max_position_embeddings": positions,
        "eos_token_id": 0,
    }


def _write(path: Path, content: Mapping[str, object]) -> None:
    path.write_text(json.dumps(content))


def write_real_model(folder: Path, *, layers: int = 2, positions: int = MAX_MODEL_LEN, deviation: float = 0.02) -> Path:
    """Writes a model with random weights, for both vLLM and transformers.

    `deviation` is the standard deviation of the weights. With 0.2, each token depends on all tokens before it.
    """
    import torch
    from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

    write_tiny_model(folder, positions=positions)
    config = json.loads((folder / "config.json").read_text())
    config |= {"num_hidden_layers": layers, "initializer_range": deviation}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: PreTrainedModel = Qwen3ForCausalLM(Qwen3Config(**config))  # type: ignore[no-untyped-call]
    model.save_pretrained(folder)
    return folder
