"""Writes models that consist of a configuration and a tokenizer; vLLM makes random weights."""

import json
from dataclasses import dataclass
from pathlib import Path

from pydantic import JsonValue
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

MAX_MODEL_LEN = 256


@dataclass(frozen=True)
class Shape:
    """The sizes of a Qwen3."""

    name: str
    layers: int
    width: int
    inner_width: int
    vocabulary: int
    tied: bool
    dtype: str


LARGER = Shape("24 M", layers=8, width=256, inner_width=1024, vocabulary=32_000, tied=False, dtype="bfloat16")
SMALLER = Shape("1.3 M", layers=3, width=128, inner_width=512, vocabulary=4_096, tied=True, dtype="float32")
"""A model whose cost is the host's alone. In float32, because a processor without bfloat16 would emulate it."""


def write_model(folder: Path, shape: Shape, *, max_model_len: int = MAX_MODEL_LEN) -> Path:
    """Writes a folder for load_format="dummy". No token ends a text, so that a request makes all tokens it may."""
    folder.mkdir(parents=True)
    tokenizer = _tokenizer(shape.vocabulary)
    tokenizer.save(str(folder / "tokenizer.json"))
    _write(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast"})
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "dtype": shape.dtype,
        "vocab_size": shape.vocabulary,
        "hidden_size": shape.width,
        "intermediate_size": shape.inner_width,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": shape.width // 4,
        "max_position_embeddings": max_model_len,
        "tie_word_embeddings": shape.tied,
    }
    _write(folder / "config.json", config)
    return folder


def options_of(model: Path) -> dict[str, JsonValue]:
    """Returns the engine options of a stage with the model, and of the engine called directly."""
    return {
        "load_format": "dummy",
        # vLLM would turn float32 into bfloat16.
        "dtype": json.loads((model / "config.json").read_text())["dtype"],
        "kv_cache_memory_bytes": 64 << 20,
        "max_num_seqs": 64,
    }


def _tokenizer(vocabulary: int) -> Tokenizer:
    """Returns a tokenizer in which each token is a word of about four letters or a single byte."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [f"Ġw{number}" for number in range(vocabulary - len(letters))]
    tokenizer = Tokenizer(models.BPE(vocab={word: number for number, word in enumerate(letters + words)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _write(path: Path, content: object) -> None:
    path.write_text(json.dumps(content))
