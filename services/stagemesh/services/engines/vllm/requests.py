"""A task's prompt in vLLM's terms."""

from typing import Any

from vllm.tokenizers import TokenizerLike

from stagemesh.connectors.errors import InvalidRequestError
from stagemesh.services.engines.base import ChatMessage, Prompt


def prompt_tokens(prompt: Prompt | None, tokenizer: TokenizerLike, *, vocabulary: int) -> list[int]:
    """The token ids of a prompt, put through the model's chat template where it has one.

    Raises InvalidRequestError for one that is empty, or holds ids that the model does not have.
    """
    given = [] if prompt is None or isinstance(prompt, str) else [part for part in prompt if isinstance(part, int)]
    if given:
        ids = given
        beyond = next((token for token in ids if not 0 <= token < vocabulary), None)
        if beyond is not None:
            raise InvalidRequestError(
                f"token id {beyond} is outside the model's vocabulary of {vocabulary}", reason="UNKNOWN_TOKEN"
            )
    else:
        ids = _encode(prompt, tokenizer)
    if not ids:
        raise InvalidRequestError("the prompt is empty; send text, messages or token ids", reason="EMPTY_PROMPT")
    return ids


def _encode(prompt: Prompt | None, tokenizer: TokenizerLike) -> list[int]:
    if not prompt:
        return []
    has_template = getattr(tokenizer, "chat_template", None) is not None
    if isinstance(prompt, str):
        if not has_template:
            return tokenizer.encode(prompt)
        messages = [ChatMessage("user", prompt)]
    else:
        messages = [part for part in prompt if isinstance(part, ChatMessage)]
    if not has_template:
        raise InvalidRequestError(
            "this model has no chat template; send the prompt as text or token ids", reason="NO_CHAT_TEMPLATE"
        )
    conversation: list[Any] = [message._asdict() for message in messages]
    text = tokenizer.apply_chat_template(conversation, add_generation_prompt=True, tokenize=False)
    assert isinstance(text, str), "a template that does not tokenize gives text"
    # The template writes the special tokens itself.
    return tokenizer.encode(text, add_special_tokens=False)
