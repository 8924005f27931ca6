"""Converts tasks to vLLM's requests, and runs the requests in vLLM."""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import fields
from itertools import chain
from typing import Any, cast

from vllm import SamplingParams
from vllm.config import VllmConfig
from vllm.exceptions import VLLMValidationError
from vllm.inputs import EngineInput
from vllm.multimodal.processing import BaseMultiModalProcessor, BaseProcessingInfo
from vllm.renderers import BaseRenderer, ChatParams
from vllm.renderers.chat_utils import ChatCompletionMessageParam
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams
from vllm.tokenizers import TokenizerLike
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError
from vllm.v1.engine.output_processor import RequestOutputCollector

from stagemesh.common.errors import InvalidRequestError, UnavailableError, UnsupportedError
from stagemesh.common.media.decoding import MediaKind
from stagemesh.services.engines import prompts
from stagemesh.services.engines.adapters import Entry
from stagemesh.services.engines.base import SamplingOptions, Structure, StructureKind, Task
from stagemesh.services.engines.vllm.control import lora_request
from stagemesh.services.engines.vllm.features import EngineRequest, RequestPrompt
from stagemesh.services.engines.vllm.messages.parsers import Parsers, required_call, strict_calls
from stagemesh.services.engines.vllm.outputs import TEXT, TOKEN_IDS, is_wanted, media_tokens

_log = logging.getLogger(__name__)

# Arguments of a chat template that a request cannot set by name.
_OWN_ARGUMENTS = frozenset(
    {
        "chat_template",
        "conversation",
        "max_length",
        "messages",
        "padding",
        "return_assistant_tokens_mask",
        "return_dict",
        "return_tensors",
        "tokenize",
        "tokenizer_kwargs",
        "tools",
        "truncation",
    }
)
# The names of vLLM's arguments that differ from the kinds of structures.
_STRUCTURES: Mapping[StructureKind, str] = {"json_schema": "json", "allowed_texts": "choice"}
# vLLM's message parts for media. They have no content, because vLLM receives the decoded media separately.
_EMPTY_PARTS: Mapping[MediaKind, Mapping[str, object]] = {
    "image": {"type": "image_pil", "image_pil": None},
    "audio": {"type": "input_audio", "input_audio": {"data": "", "format": ""}},
    "video": {"type": "video_url", "video_url": {"url": ""}},
}


def prompt_tokens(prompt: prompts.Prompt | None, llm: AsyncLLM) -> list[int]:
    """Returns the token ids of a prompt, with placeholder tokens for media.

    Applies the model's chat template to text and conversations. If the model does not have a template, encodes text
    without one. Raises InvalidRequestError if the prompt is empty, if the template rejects the prompt, if the model
    does not have a template for conversations, or if a token id is not in the model's vocabulary. Raises
    UnsupportedError if the conversation has tools but the template accepts none.
    """
    ids = _encode(prompt, llm.renderer)
    if not ids:
        raise InvalidRequestError("the prompt is empty; send text, messages or token ids", reason="EMPTY_PROMPT")
    # A tokenizer may have more tokens than the model. Placeholders for media are not in the vocabulary either.
    if not prompts.media_of(prompt):
        check_tokens(ids, vocabulary=llm.model_config.get_vocab_size())
    return ids


def check_tokens(ids: Iterable[int], *, vocabulary: int, field: str = "") -> None:
    """Raises InvalidRequestError if a token id is outside the model's vocabulary of `vocabulary` tokens.

    `field` names the sampling option that contains the ids in the error message.
    """
    outside = next((token for token in ids if not 0 <= token < vocabulary), None)
    if outside is not None:
        place = f"{field}: " if field else ""
        raise InvalidRequestError(
            f"{place}token id {outside} is outside the model's vocabulary of {vocabulary}", reason="UNKNOWN_TOKEN"
        )


def chat_template(renderer: BaseRenderer) -> object | None:
    """Returns the chat template of the model's processor or tokenizer, or None if it has none.

    A template is usually text. The template of a processor, which supports media, takes precedence.
    """
    processor = cast("BaseMultiModalProcessor[BaseProcessingInfo] | None", renderer.mm_processor)
    template = getattr(processor.info.get_hf_processor(), "chat_template", None) if processor is not None else None
    return template if template is not None else getattr(renderer.get_tokenizer(), "chat_template", None)


def _encode(prompt: prompts.Prompt | None, renderer: BaseRenderer) -> list[int]:
    match prompt:
        case None | "":
            return []
        case prompts.RawPrompt(content=str(text)):
            return renderer.get_tokenizer().encode(text)
        case prompts.RawPrompt(content=ids):
            return [token for token in ids if isinstance(token, int)]
        case str():
            if chat_template(renderer) is None:
                return renderer.get_tokenizer().encode(prompt)
            return _conversation_tokens(prompts.Conversation([prompts.ChatMessage("user", prompt)]), renderer)
        case prompts.Conversation():
            return _conversation_tokens(prompt, renderer)


def _conversation_tokens(conversation: prompts.Conversation, renderer: BaseRenderer) -> list[int]:
    template = chat_template(renderer)
    if template is None:
        raise InvalidRequestError(
            "this model has no chat template; send the prompt as text or token ids", reason="NO_CHAT_TEMPLATE"
        )
    if taken := _OWN_ARGUMENTS & conversation.template_arguments.keys():
        raise InvalidRequestError(
            f"template_arguments contain {min(taken)}, which the request or the stage sets itself; remove it",
            reason="INVALID_PROMPT",
        )
    if conversation.tools and isinstance(template, str) and "tools" not in template:
        raise UnsupportedError(
            "the model's chat template accepts no tools; omit them, or choose a model that can call tools",
            metadata={"ability": "tools"},
        )
    arguments: dict[str, object] = {"add_generation_prompt": True, **conversation.template_arguments, "tokenize": False}
    if conversation.tools:
        arguments["tools"] = [{"type": "function", "function": _tool(tool)} for tool in conversation.tools]
    # A template that is not text, such as several templates by name, is left to vLLM.
    params = ChatParams(chat_template=template if isinstance(template, str) else None, chat_template_kwargs=arguments)
    messages = [_message(message) for message in conversation.messages]
    try:
        _, rendered = renderer.render_messages(cast("list[ChatCompletionMessageParam]", messages), params)
    except (TypeError, ValueError, VLLMValidationError) as exc:
        raise InvalidRequestError(
            f"the model's chat template rejects the conversation: {exc}", reason="INVALID_PROMPT"
        ) from exc
    prompt: Mapping[str, Any] = dict(rendered)
    if "prompt_token_ids" in prompt:
        return list(prompt["prompt_token_ids"])
    # The template has already added the special tokens.
    return renderer.get_tokenizer().encode(prompt["prompt"], add_special_tokens=False)


def _message(message: prompts.ChatMessage) -> Mapping[str, object]:
    """Returns a message in the form that chat templates expect."""
    content = [_part(part) for part in message.parts] or message.content
    given: dict[str, object] = {"role": message.role, "content": content}
    if message.tool_calls:
        calls = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": dict(call.arguments)}}
            for call in message.tool_calls
        ]
        given |= {"content": content or None, "tool_calls": calls}
    if message.reasoning:
        given |= {"reasoning": message.reasoning, "reasoning_content": message.reasoning}
    if message.name:
        given["name"] = message.name
    if message.result_of is not None:
        given |= {"tool_call_id": message.result_of.id, "name": message.result_of.name}
    return given


def _tool(tool: prompts.Tool) -> Mapping[str, object]:
    parameters = tool.parameters or {"type": "object", "properties": {}}
    return {"name": tool.name, "description": tool.description, "parameters": parameters}


def _part(part: prompts.Part) -> Mapping[str, object]:
    return {"type": "text", "text": part} if isinstance(part, str) else _EMPTY_PARTS[part.kind]


class CheckedParams(SamplingParams):
    """vLLM's sampling parameters, already verified by `sampling_params` on another thread.

    vLLM's own verification is disabled, because it would run on the event loop.
    """

    def verify(self, *args: object, **kwargs: object) -> None:
        """Does nothing, because `sampling_params` has already verified the parameters."""

    def update_from_tokenizer(self, tokenizer: TokenizerLike) -> None:
        """Does nothing, because `sampling_params` has already applied the tokenizer's values."""


def sampling_params(
    task: Task, *, prompt: RequestPrompt, defaults: Mapping[str, Any], config: VllmConfig, parsers: Parsers
) -> CheckedParams:
    """Returns vLLM's sampling parameters for a task, verified and completed with the tokenizer's values.

    `defaults` are the model's own defaults, by vLLM's parameter names. `parsers` are the model's parsers. The
    verification of a large JSON schema takes long, but other threads can run during it.

    Raises InvalidRequestError for a value that vLLM would reject later or that would terminate vLLM's engine, or if the
    prompt leaves too little space for the output. Raises UnsupportedError if a task with a structure resumes from a
    checkpoint.
    """
    sampling, model = task.sampling, config.model_config
    _check_prompt_logprobs(task, prompt)
    values: dict[str, Any] = {**defaults, **_given(sampling)}
    calls = _calls(task, parsers, backend=config.structured_outputs_config.backend)
    own = values.get("structured_outputs")
    structure = values["structured_outputs"] = calls or own
    if structure is not None and task.resume_from is not None:
        raise UnsupportedError(
            "a request with a structure or strict tools cannot resume from a checkpoint: vLLM would restart the "
            "structure; omit resume_from to start over"
        )
    values["max_tokens"] = _max_tokens(sampling, prompt, max_model_len=model.max_model_len, usual=defaults)
    # vLLM has no such default of a model.
    least = int(model.override_generation_config.get("min_new_tokens", 0))
    values["min_tokens"] = max(sampling.min_tokens, min(least, values["max_tokens"]))
    try:
        params = CheckedParams(
            seed=task.seed,
            output_kind=RequestOutputKind.DELTA,
            # Log-probabilities are emitted only with the text and the tokens.
            logprobs=sampling.logprobs if is_wanted(task, TEXT) or is_wanted(task, TOKEN_IDS) else None,
            **values,
        )
        check_tokens(params.stop_token_ids or (), vocabulary=model.get_vocab_size(), field="stop_token_ids")
        _verify(params, config, parsers.tokenizer, own, is_wish=calls is not None and calls.json is None)
        SamplingParams.update_from_tokenizer(params, parsers.tokenizer)
    except (ValueError, VLLMValidationError) as exc:
        raise InvalidRequestError(f"sampling: {exc}", reason="INVALID_SAMPLING") from exc
    # vLLM does not check that the model has these tokens.
    bad_words = chain.from_iterable(params.bad_words_token_ids or ())
    check_tokens(bad_words, vocabulary=model.get_vocab_size(), field="bad_words")
    return params


_MAX_PROMPT_LOGPROBS = 131_072
"""The maximum number of tokens in the log-probabilities of a prompt. They are one message."""


def _check_prompt_logprobs(task: Task, prompt: RequestPrompt) -> None:
    """Raises the errors of `Sampling.prompt_logprobs` and `Sampling.tokens_only`."""
    name, alternatives = "prompt_logprobs", task.sampling.prompt_logprobs
    if task.sampling.tokens_only:
        name, alternatives = "tokens_only", 0
    if alternatives is None:
        return
    if task.inlets:
        raise UnsupportedError(f"{name}: the prompt of this stage comes from other stages; omit it")
    if len(prompt.token_ids) * (alternatives + 1) > _MAX_PROMPT_LOGPROBS:
        raise InvalidRequestError(
            f"{name} has {alternatives} alternatives for a prompt of {len(prompt.token_ids)} tokens; at most "
            f"{_MAX_PROMPT_LOGPROBS:,} tokens can be returned; reduce it, or shorten the prompt",
            reason="INVALID_SAMPLING",
        )


def _calls(task: Task, parsers: Parsers, *, backend: str) -> StructuredOutputsParams | None:
    """Returns the structure that the tools of a task impose, together with its JSON schema. None if they impose none.

    Raises InvalidRequestError if a call is required together with sampling options that exclude it.
    """
    sampling, prompt = task.sampling, task.prompt
    if not isinstance(prompt, prompts.Conversation) or not prompt.tools:
        return None
    structure, is_endless = sampling.structure, sampling.min_tokens > 0 or sampling.ignore_eos
    if not prompt.tool_choice.required:
        schema = structure.texts[0] if structure is not None and structure.kind == "json_schema" else None
        if is_endless or (structure is not None and schema is None):
            return None
        return strict_calls(prompt, parsers, backend=backend, schema=schema)
    if is_endless or structure is not None:
        raise InvalidRequestError(
            "sampling: a required tool call contradicts another structure, min_tokens and ignore_eos; omit them",
            reason="INVALID_SAMPLING",
        )
    return required_call(prompt)


def _verify(
    params: SamplingParams,
    config: VllmConfig,
    tokenizer: TokenizerLike,
    own: StructuredOutputsParams | None,
    *,
    is_wish: bool,
) -> None:
    """Lets vLLM verify the parameters. If `is_wish` is True, replaces a structure that vLLM does not support by `own`.

    Raises ValueError or VLLMValidationError if vLLM rejects the parameters.
    """
    others = config.model_config, config.speculative_config, config.structured_outputs_config, tokenizer
    try:
        SamplingParams.verify(params, *others)
    except (ValueError, VLLMValidationError) as exc:
        if not is_wish:
            raise
        _log.warning("the schemas of the strict tools are not enforced: %s", exc)
        params.structured_outputs = own
        SamplingParams.verify(params, *others)


def _max_tokens(
    sampling: SamplingOptions, prompt: RequestPrompt, *, max_model_len: int, usual: Mapping[str, Any]
) -> int:
    """Returns the maximum length of a request's output in tokens: at most the rest of the model's context.

    `usual` contains the model's own defaults. Without a default, the output may fill the context. Raises
    InvalidRequestError if the prompt leaves no space for a token, or for the minimum of the output.
    """
    wanted = max(1, sampling.min_tokens)
    # The model does not run for the tokens alone.
    space = max_model_len if sampling.tokens_only else max_model_len - len(prompt.token_ids)
    if space < wanted:
        media = media_tokens(prompt)
        of_media, remedy = (f" ({media} of media)", "send smaller or fewer media, or ") if media else ("", "")
        raise InvalidRequestError(
            f"this model's maximum context length is {max_model_len} tokens, but the prompt has "
            f"{len(prompt.token_ids)}{of_media} and the output at least {wanted}; {remedy}shorten the prompt",
            reason="PROMPT_TOO_LONG",
        )
    if sampling.max_tokens is not None:
        return min(space, sampling.max_tokens)
    return min(space, max(sampling.min_tokens, int(usual.get("max_tokens", space))))


def _given(sampling: SamplingOptions) -> dict[str, Any]:
    """Returns the sampling options that a request sets, by vLLM's parameter names. Omits `max_tokens` and
    `logprobs`.
    """
    values: dict[str, Any] = {field.name: getattr(sampling, field.name) for field in fields(sampling)}
    structure: Structure | None = values.pop("structure")
    if structure is not None:
        texts = list(structure.texts) if structure.kind == "allowed_texts" else structure.texts[0]
        arguments: dict[str, Any] = {_STRUCTURES.get(structure.kind, structure.kind): texts}
        values["structured_outputs"] = StructuredOutputsParams(**arguments)
    for name in ("max_tokens", "logprobs", "tokens_only", "count_tokens"):
        del values[name]
    # vLLM expects lists.
    values |= {name: list(values[name]) for name in ("stop", "stop_token_ids", "bad_words")}
    return {name: value for name, value in values.items() if value is not None}


async def start_request(
    llm: AsyncLLM, request: EngineRequest, adapter: Entry | None, *, stage: str
) -> RequestOutputCollector:
    """Passes a request to vLLM and returns the collector of its outputs. `adapter` is the adapter to apply, or None.

    The collector is read directly, because a generator of vLLM's costs processor time for each token. Its reader calls
    `AsyncLLM.abort` unless it has read the last output. Raises UnavailableError if vLLM has failed, and
    InvalidRequestError if vLLM rejects the request.
    """
    tokens = [*request.prompt.token_ids, *request.sampled]
    engine_input = cast("EngineInput", {**request.prompt.engine_input, "prompt_token_ids": tokens})
    try:
        return await llm.add_request(
            request.name,
            engine_input,
            request.params,
            lora_request=lora_request(adapter) if adapter is not None else None,
            # In vLLM a lower number is a higher priority.
            priority=-request.task.priority,
        )
    except (ValueError, VLLMValidationError) as exc:
        raise InvalidRequestError(f"stage {stage}: vLLM rejects the request: {exc}") from exc
    except EngineDeadError as exc:
        raise engine_failed(exc, stage=stage) from exc


def engine_failed(exc: Exception, *, stage: str) -> UnavailableError:
    """Returns the error for requests whose engine core has failed with the error `exc`."""
    return UnavailableError(f"stage {stage}: vLLM failed: {exc}", reason="ENGINE_FAILED")
