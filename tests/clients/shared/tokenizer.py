"""A tokenizer for clients that count or send tokens: each printable character of ASCII is a token."""

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast


def write_tokenizer() -> str:
    """Writes the tokenizer into the working directory. Returns its folder."""
    characters = ["<end>", "Ġ", *map(chr, range(ord("!"), ord("~") + 1))]
    vocabulary = {character: number for number, character in enumerate(characters)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = {"eos_token": "<end>", "pad_token": "<end>"}
    make: Any = PreTrainedTokenizerFast
    make(tokenizer_object=tokenizer, **special).save_pretrained("tokenizer")
    return str(Path("tokenizer").resolve())
