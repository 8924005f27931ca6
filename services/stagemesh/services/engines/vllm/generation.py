"""Runs one request in vLLM and converts vLLM's outputs to the engine's events."""

from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, cast

import numpy as np
from vllm.exceptions import VLLMValidationError
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from stagemesh.common.errors import InvalidRequestError, UnavailableError
from stagemesh.common.tensors import Array
from stagemesh.connectors.edge import Packet
from stagemesh.services.engines.base import Emission, EngineEvent, Progress, Task, TokenLogprobs, Usage
from stagemesh.services.engines.vllm.features import EngineRequest, RequestHook
from stagemesh.services.engines.vllm.sampling import TOKEN_IDS, is_wanted

if TYPE_CHECKING:
    from vllm.inputs import EngineInput
    from vllm.logprobs import Logprob
    from vllm.lora.request import LoRARequest
    from vllm.outputs import CompletionOutput, RequestOutput
    from vllm.v1.engine.async_llm import AsyncLLM

    from stagemesh.services.engines.vllm.control import Control
    from stagemesh.services.engines.vllm.engine import LoadMeter

_PROGRESS_TOKENS = 64
"""The number of tokens between two progress events of a request.

A caller that needs more frequent progress streams the text or the tokens.
"""


async def generate(
    llm: "AsyncLLM",
    request: EngineRequest,
    hooks: Sequence[RequestHook],
    *,
    adapter: "LoRARequest | None",
    meter: "LoadMeter",
    control: "Control",
    stage: str,
) -> AsyncGenerator[EngineEvent]:
    """Runs a request in vLLM and yields its events. The last event is Usage.

    Raises the same errors as `Engine.submit`.
    """
    task, sampled = request.task, request.sampled
    async with aclosing(_outputs(llm, request, adapter, stage=stage)) as outputs:
        async for output in outputs:
            completion = output.outputs[0]
            _check_end(completion, task, stage=stage)
            meter.count(request.name, len(completion.token_ids))
            before = len(sampled)
            sampled += completion.token_ids
            if (emission := _emission(completion, task)) is not None:
                yield emission
            if before // _PROGRESS_TOKENS != len(sampled) // _PROGRESS_TOKENS:
                yield Progress(len(sampled))
            for hook in hooks:
                for event in hook.observe(finished=output.finished):
                    yield event
            if output.finished:
                control.count_prompt(output)
    for hook in hooks:
        async with aclosing(hook.finish()) as events:
            async for event in events:
                yield event
    yield Usage(prompt_tokens=len(request.prompt.token_ids), output_tokens=len(sampled), steps=len(sampled))


async def _outputs(
    llm: "AsyncLLM", request: EngineRequest, adapter: "LoRARequest | None", *, stage: str
) -> AsyncGenerator["RequestOutput"]:
    """Yields vLLM's outputs for a request.

    Raises UnavailableError if vLLM fails, and InvalidRequestError if vLLM rejects the request.
    """
    tokens = [*request.prompt.token_ids, *request.sampled]
    engine_input = cast("EngineInput", {**request.prompt.engine_input, "prompt_token_ids": tokens})
    try:
        generated = llm.generate(
            engine_input,
            request.params,
            request.name,
            lora_request=adapter,
            # In vLLM a lower number is a higher priority.
            priority=-request.task.priority,
        )
        async with aclosing(generated) as outputs:
            async for output in outputs:
                yield output
    except (EngineDeadError, EngineGenerateError) as exc:
        raise UnavailableError(f"stage {stage}: vLLM failed: {exc}") from exc
    except (ValueError, VLLMValidationError) as exc:
        raise InvalidRequestError(f"stage {stage}: vLLM rejects the request: {exc}") from exc


def _emission(output: "CompletionOutput", task: Task) -> Emission | None:
    """Returns an emission with an output's new text and tokens, or None if the output has neither.

    A packet with tokens always contains the text, which may be empty, so that a consumer of both needs only one packet.
    """
    tokens = list(output.token_ids) if is_wanted(task, TOKEN_IDS) else []
    if not output.text and not tokens:
        return None
    tensors: dict[str, Array] = {"text": np.frombuffer(output.text.encode(), np.uint8)}
    if not tokens:
        return Emission(Packet(tensors))
    tensors[TOKEN_IDS] = np.array(tokens, np.int32)
    return Emission(Packet(tensors), _logprobs(output, tokens, alternatives=task.sampling.logprobs))


def _check_end(output: "CompletionOutput", task: Task, *, stage: str) -> None:
    """Raises an error if vLLM ended the request with an error.

    Raises InvalidRequestError if the request has a structure, and UnavailableError if it does not.
    """
    if output.finish_reason != "error":
        return
    if task.sampling.structure is not None:
        raise InvalidRequestError(
            f"stage {stage}: no token can continue the {task.sampling.structure.kind}, or the "
            f"{task.sampling.structure.kind} is too large; simplify it, or omit bad_words",
            reason="INVALID_SAMPLING",
        )
    raise UnavailableError(f"stage {stage}: vLLM ended the request with an error; its own log has the cause")


def _logprobs(output: "CompletionOutput", tokens: list[int], *, alternatives: int | None) -> tuple[TokenLogprobs, ...]:
    if alternatives is None or not output.logprobs:
        return ()
    pairs = zip(tokens, output.logprobs, strict=True)
    return tuple(_token_logprobs(token, known, limit=alternatives) for token, known in pairs if known is not None)


def _token_logprobs(token: int, known: "Mapping[int, Logprob]", *, limit: int) -> TokenLogprobs:
    ranked = sorted(known.items(), key=lambda item: item[1].rank or 0)[:limit]
    return TokenLogprobs(
        known[token].logprob, tuple(each for each, _ in ranked), tuple(logprob.logprob for _, logprob in ranked)
    )
