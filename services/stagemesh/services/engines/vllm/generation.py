"""One request's way through vLLM, from what was checked to its last event."""

from collections.abc import AsyncGenerator
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from vllm import TokensPrompt
from vllm.exceptions import VLLMValidationError
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from stagemesh.common.errors import InvalidRequestError, UnavailableError
from stagemesh.services.engines.base import Emission, EngineEvent, Progress, Task, Usage
from stagemesh.services.engines.vllm.emissions import check_end, emission
from stagemesh.services.engines.vllm.resume.checkpoint import checkpoint, crossed

if TYPE_CHECKING:
    from vllm.inputs import EngineInput
    from vllm.lora.request import LoRARequest
    from vllm.outputs import CompletionOutput, RequestOutput
    from vllm.v1.engine.async_llm import AsyncLLM

    from stagemesh.services.engines.vllm.control import Control
    from stagemesh.services.engines.vllm.embeddings.input import EmbeddedInput
    from stagemesh.services.engines.vllm.hidden_states.collector import RequestStates
    from stagemesh.services.engines.vllm.load_meter import LoadMeter
    from stagemesh.services.engines.vllm.media.prompts import MediaPrompt
    from stagemesh.services.engines.vllm.run_ahead.limits import RequestLimit
    from stagemesh.services.engines.vllm.sampling import CheckedParams

PROGRESS_TOKENS = 64
"""Whoever follows a request more closely has its text or its tokens streamed, which says as much."""


@dataclass(frozen=True)
class Generation:
    """What is to be generated."""

    stage: str
    name: str
    """By which vLLM and its workers know the request."""
    task: Task
    ids: list[int]
    """The prompt."""
    resumed: list[int]
    """The tokens of the checkpoint from which it goes on."""
    params: "CheckedParams"
    adapter: "LoRARequest | None"
    states: "RequestStates | None"
    embedded: "EmbeddedInput | None"
    media: "MediaPrompt | None"
    limit: "RequestLimit | None"
    checkpoint_tokens: int

    async def events(self, llm: "AsyncLLM", meter: "LoadMeter", control: "Control") -> AsyncGenerator[EngineEvent]:
        """What is made, as it is made; see `Engine.submit`."""
        sampled, aborted = list(self.resumed), False
        async with AsyncExitStack() as fed:
            if self.embedded is not None:
                assert self.limit is not None, "what is fed is limited"
                await fed.enter_async_context(self.embedded.feeding(self.limit, partial(llm.abort, self.name)))
            async with aclosing(self._outputs(llm)) as outputs:
                async for output in outputs:
                    made = output.outputs[0]
                    check_end(made, self.task, stage=self.stage)
                    meter.count(self.name, len(made.token_ids))
                    for event in self._events_of(made, sampled, finished=output.finished):
                        yield event
                    if self.limit is not None and self.states is not None:
                        self.limit.take(len(self.ids) + len(sampled))
                    if output.finished:
                        control.count_prompt(output)
                        aborted = made.finish_reason == "abort"
            # One that was aborted was not computed to its end: what its feeding failed with is raised instead.
            if self.states is not None and not aborted:
                async with aclosing(self.states.up_to(self._computed(sampled))) as rows:
                    async for packet in rows:
                        yield Emission(packet)
        yield Usage(prompt_tokens=len(self.ids), output_tokens=len(sampled), steps=len(sampled))

    def _events_of(self, made: "CompletionOutput", sampled: list[int], *, finished: bool) -> list[EngineEvent]:
        """What one output of vLLM brings; adds its tokens to `sampled`."""
        events: list[EngineEvent] = []
        if emitted := emission(made, self.task):
            events.append(emitted)
        before = len(sampled)
        sampled += made.token_ids
        if crossed(PROGRESS_TOKENS, before, len(sampled)):
            events.append(Progress(len(sampled)))
        if self.states is not None:
            events += [Emission(packet) for packet in self.states.take(before=self._computed(sampled))]
        if crossed(self.checkpoint_tokens, before, len(sampled)) and not finished:
            media = self.media.digest if self.media is not None else b""
            events.append(checkpoint(self.ids, sampled, media=media))
        return events

    def _computed(self, sampled: list[int]) -> int:
        """How many positions have gone through the model; the last token has not."""
        return len(self.ids) + len(sampled) - 1

    async def _outputs(self, llm: "AsyncLLM") -> AsyncGenerator["RequestOutput"]:
        """Those of vLLM, with its failures in our words."""
        try:
            generated = llm.generate(
                self._rendered(llm),
                self.params,
                self.name,
                lora_request=self.adapter,
                # Lower goes first in vLLM.
                priority=-self.task.priority,
            )
            async with aclosing(generated) as outputs:
                async for output in outputs:
                    yield output
        except (EngineDeadError, EngineGenerateError) as exc:
            raise UnavailableError(f"stage {self.stage}: vLLM failed: {exc}") from exc
        except (ValueError, VLLMValidationError) as exc:
            raise InvalidRequestError(f"stage {self.stage}: vLLM refuses the request: {exc}") from exc

    def _rendered(self, llm: "AsyncLLM") -> "EngineInput":
        if self.media is not None:
            return self.media.followed_by(self.resumed)
        prompt = TokensPrompt(prompt_token_ids=self.ids + self.resumed)
        if self.embedded is not None:
            # The same placeholders mean something else each time.
            prompt["cache_salt"] = self.name
        rendered: list[EngineInput] = llm.renderer.render_cmpl([prompt])
        return rendered[0]
