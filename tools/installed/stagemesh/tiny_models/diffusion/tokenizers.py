"""Tokenizers of a few hundred tokens for tiny pipelines, made in memory: one token per character."""

from collections.abc import Iterable
from itertools import chain

from tokenizers import pre_tokenizers
from transformers import ByT5Tokenizer, CLIPTokenizer, Qwen2Tokenizer, T5Tokenizer

_VISION = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
QWEN_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", *_VISION)
"""The id of a token is its index."""
_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'text' %}{{ part.text }}{% else %}<|vision_start|><|image_pad|><|vision_end|>{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def qwen_tokenizer(templates: Iterable[str] = ()) -> Qwen2Tokenizer:
    """Tokens are bytes and the words of a pipeline's templates, which it removes by their number of tokens."""
    words = _words(templates)
    merges = list(dict.fromkeys((word[:end], word[end]) for word in words for end in range(1, len(word))))
    tokens = [*QWEN_SPECIAL, *_alphabet(), *dict.fromkeys("".join(merge) for merge in merges)]
    tokenizer = Qwen2Tokenizer(vocab=_numbered(tokens), merges=merges, model_max_length=2048)  # type: ignore[arg-type]
    tokenizer.add_special_tokens({"additional_special_tokens": list(QWEN_SPECIAL)})
    tokenizer.chat_template = _CHAT_TEMPLATE
    return tokenizer


def clip_tokenizer(_templates: Iterable[str] = ()) -> CLIPTokenizer:
    """Tokens are bytes. The last byte of a word has a token of its own. A prompt has at most 77 tokens."""
    ends = [f"{letter}</w>" for letter in _alphabet()]
    tokens = ["<|startoftext|>", "<|endoftext|>", *_alphabet(), *ends]
    return CLIPTokenizer(vocab=_numbered(tokens), model_max_length=77)


def t5_tokenizer(_templates: Iterable[str] = ()) -> T5Tokenizer:
    """Tokens are the printable ASCII characters, all equally likely."""
    letters = [("\N{LOWER ONE EIGHTH BLOCK}", -2.0), *((chr(code), -2.0) for code in range(33, 127))]
    special = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0)]
    return T5Tokenizer(vocab=[*special, *letters], extra_ids=0, model_max_length=512)


def byt5_tokenizer(_templates: Iterable[str] = ()) -> ByT5Tokenizer:
    """Tokens are bytes."""
    return ByT5Tokenizer(extra_ids=0, model_max_length=512)


def _words(templates: Iterable[str]) -> list[str]:
    # Words that begin with a space come first. Otherwise a merge inside of a word would precede the merge at its
    # beginning, and the word would be two tokens.
    split = Qwen2Tokenizer().backend_tokenizer.pre_tokenizer
    texts = chain.from_iterable(_without_special(template) for template in templates)
    pieces = {piece for text in texts for piece, _ in split.pre_tokenize_str(text)}
    return sorted(pieces, key=lambda piece: (not piece.startswith("Ġ"), piece))


def _without_special(text: str) -> list[str]:
    for token in (*QWEN_SPECIAL, "{}"):
        text = text.replace(token, "\0")
    return text.split("\0")


def _alphabet() -> list[str]:
    return sorted(pre_tokenizers.ByteLevel.alphabet())


def _numbered(tokens: list[str]) -> dict[str, int]:
    return {token: number for number, token in enumerate(tokens)}
