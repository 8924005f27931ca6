"""Converts a task's prompt to token ids. Uses the model's chat template if there is one."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from vllm.exceptions import VLLMValidationError
from vllm.renderers import BaseRenderer, ChatParams

from stagemesh.common.errors import InvalidRequestError
from stagemesh.services.engines.base import ChatMessage, Prompt, media_of
from stagemesh.services.engines.media import MediaKind, Part

if TYPE_CHECKING:
    from vllm.multimodal.processing import BaseMultiModalProcessor, BaseProcessingInfo
    from vllm.renderers.chat_utils import ChatCompletionMessageParam

# vLLM's message parts for media. They have no content, because vLLM receives the decoded media separately.
_EMPTY_PARTS: Mapping[MediaKind, Mapping[str, object]] = {
    "image": {"type": "image_pil", "image_pil": None},
    "audio": {"type": "input_audio", "input_audio": {"data": "", "format": ""}},
    "video": {"type": "video_url", "video_url": {"url": ""}},
}


def prompt_tokens(prompt: Prompt | None, renderer: BaseRenderer, *, vocabulary: int) -> list[int]:
    """Returns the token ids of a prompt, with placeholder tokens for media.

    Applies the model's chat template to text and messages. If the model has no template, text is encoded without a
    template. Raises InvalidRequestError if the prompt is empty, if the template rejects the prompt, if the model has no
    template for messages, or if an id is not in the model's vocabulary.
    """
    given = [] if prompt is None or isinstance(prompt, str) else [part for part in prompt if isinstance(part, int)]
    ids = given or _encode(prompt, renderer)
    if not ids:
        raise InvalidRequestError("the prompt is empty; send text, messages or token ids", reason="EMPTY_PROMPT")
    # A tokenizer may know more tokens than the model. Placeholders for media are not in the vocabulary either.
    if not media_of(prompt):
        check_tokens(ids, vocabulary=vocabulary)
    return ids


def check_tokens(ids: Sequence[int], *, vocabulary: int) -> None:
    """Raises InvalidRequestError if a token id is outside the model's vocabulary."""
    outside = next((token for token in ids if not 0 <= token < vocabulary), None)
    if outside is not None:
        raise InvalidRequestError(
            f"token id {outside} is outside the model's vocabulary of {vocabulary}", reason="UNKNOWN_TOKEN"
        )


def has_template(renderer: BaseRenderer) -> bool:
    """Returns whether the model's tokenizer or processor has a chat template."""
    if getattr(renderer.get_tokenizer(), "chat_template", None) is not None:
        return True
    processor = cast("BaseMultiModalProcessor[BaseProcessingInfo] | None", renderer.mm_processor)
    if processor is None:
        return False
    return getattr(processor.info.get_hf_processor(), "chat_template", None) is not None


def _encode(prompt: Prompt | None, renderer: BaseRenderer) -> list[int]:
    if not prompt:
        return []
    if isinstance(prompt, str):
        if not has_template(renderer):
            return renderer.get_tokenizer().encode(prompt)
        messages = [ChatMessage("user", prompt)]
    else:
        messages = [part for part in prompt if isinstance(part, ChatMessage)]
    if not has_template(renderer):
        raise InvalidRequestError(
            "this model has no chat template; send the prompt as text or token ids", reason="NO_CHAT_TEMPLATE"
        )
    return _conversation_tokens(messages, renderer)


def _conversation_tokens(messages: Sequence[ChatMessage], renderer: BaseRenderer) -> list[int]:
    conversation = [
        {"role": message.role, "content": [_part(part) for part in message.parts] or message.content}
        for message in messages
    ]
    tokenizer = renderer.get_tokenizer()
    # The template of a processor, which supports media, takes precedence over the tokenizer's. Without a processor, the
    # template is passed so that vLLM does not search for one.
    template = None if renderer.mm_processor is not None else getattr(tokenizer, "chat_template", None)
    params = ChatParams(
        chat_template=template if isinstance(template, str) else None,
        chat_template_kwargs={"add_generation_prompt": True, "tokenize": False},
    )
    try:
        _, rendered = renderer.render_messages(cast("list[ChatCompletionMessageParam]", conversation), params)
    except (ValueError, VLLMValidationError) as exc:
        raise InvalidRequestError(f"the model's chat template rejects the conversation: {exc}") from exc
    prompt: Mapping[str, Any] = dict(rendered)
    if "prompt_token_ids" in prompt:
        return list(prompt["prompt_token_ids"])
    # The template has already added the special tokens.
    return tokenizer.encode(prompt["prompt"], add_special_tokens=False)


def _part(part: Part) -> Mapping[str, object]:
    return {"type": "text", "text": part} if isinstance(part, str) else _EMPTY_PARTS[part.kind]
