"""An engine that runs one callable on one thread. It batches the packets of all requests as they arrive."""

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar, cast

from pydantic import JsonValue

from stagemesh.common.descriptors import FunctionDescriptor, import_factory, load_function_descriptor
from stagemesh.common.errors import (
    InternalError,
    InvalidRequestError,
    NotReadyError,
    StagemeshError,
    UnavailableError,
    UnsupportedError,
)
from stagemesh.common.stage_config import StageConfig
from stagemesh.connectors.edge import Packet
from stagemesh.services.engines.abilities import EngineAbilities
from stagemesh.services.engines.base import Emission, EngineEvent, EngineLoad, Progress, Task, Usage
from stagemesh.services.engines.function.base import Call, Function, OpensWithout
from stagemesh.services.engines.input_join import packets_of
from stagemesh.services.engines.options import request_options

_logger = logging.getLogger(__name__)
_DEFAULT_MAX_BATCH = 32
_EWMA_WEIGHT = 0.2

Result = TypeVar("Result")


class _Waiting(NamedTuple):
    call: Call[object]
    done: asyncio.Future[Sequence[Packet]]


class Batcher:
    """Passes calls to a function in arrival order, at most `max_batch` at a time.

    A request has at most one waiting call, because it awaits each call before it makes the next call.
    """

    def __init__(self, function: Function[object], *, name: str, thread: ThreadPoolExecutor, max_batch: int) -> None:
        self._function = function
        self._name = name
        self._thread = thread
        self._max_batch = max_batch
        self._waiting: deque[_Waiting] = deque()
        self._arrived = asyncio.Event()
        self._call_s = 0.0
        """The time per call in seconds, as an exponentially weighted moving average."""
        self._closed = False

    @property
    def waiting(self) -> int:
        """The number of calls that wait to be run."""
        return len(self._waiting)

    @property
    def work_s(self) -> float:
        """The estimated time to run the waiting calls, in seconds."""
        return len(self._waiting) * self._call_s

    async def call(self, call: Call[object]) -> Sequence[Packet]:
        """Waits for a call to be run. Returns the function's output packets.

        Cancellation drops a waiting call. If the call has started, cancellation drops its result.
        """
        if self._closed:
            raise UnavailableError(f"function {self._name} is closed")
        waiting = _Waiting(call, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        self._arrived.set()
        return await waiting.done

    async def run(self) -> None:
        """Runs waiting calls until cancelled. Calls that are then still waiting fail with UnavailableError."""
        try:
            while True:
                await self._arrived.wait()
                await self._serve(self._take())
        finally:
            self._closed = True
            for waiting in self._waiting:
                _set_outcome(waiting, UnavailableError(f"function {self._name} is closed"))

    def _take(self) -> list[_Waiting]:
        batch: list[_Waiting] = []
        while self._waiting and len(batch) < self._max_batch:
            waiting = self._waiting.popleft()
            if not waiting.done.cancelled():
                batch.append(waiting)
        if not self._waiting:
            self._arrived.clear()
        return batch

    async def _serve(self, batch: list[_Waiting]) -> None:
        if not batch:
            return
        calls = [waiting.call for waiting in batch]
        outcomes: Sequence[Sequence[Packet] | StagemeshError] = [
            UnavailableError(f"function {self._name} was closed while it ran")
        ] * len(calls)
        began_s = time.monotonic()
        try:
            outcomes = await asyncio.get_running_loop().run_in_executor(self._thread, self._compute, calls)
            call_s = (time.monotonic() - began_s) / len(batch)
            self._call_s += (call_s - self._call_s) * (_EWMA_WEIGHT if self._call_s else 1.0)
        finally:
            for waiting, outcome in zip(batch, outcomes, strict=True):
                _set_outcome(waiting, outcome)

    def _compute(self, calls: Sequence[Call[object]]) -> Sequence[Sequence[Packet] | StagemeshError]:
        try:
            made = self._function(calls)
        except Exception as exc:  # noqa: BLE001  # user code: any exception fails only its own request
            if len(calls) == 1:
                return [self._to_error(exc)]
            return [self._compute([call])[0] for call in calls]
        if len(made) != len(calls):
            error = InternalError(f"function {self._name} returned {len(made)} results for {len(calls)} calls")
            return [error] * len(calls)
        return made

    def _to_error(self, exc: Exception) -> StagemeshError:
        if isinstance(exc, StagemeshError):
            return exc
        _logger.error("function %s raised", self._name, exc_info=exc)
        return InternalError(
            f"function {self._name} raised {type(exc).__name__}; the log of this stage has the traceback",
            reason="FUNCTION_RAISED",
            metadata={"function": self._name},
        )


def _set_outcome(waiting: _Waiting, outcome: Sequence[Packet] | StagemeshError) -> None:
    if waiting.done.done():
        return
    if isinstance(outcome, StagemeshError):
        waiting.done.set_exception(outcome)
    else:
        waiting.done.set_result(outcome)


class FunctionEngine:
    """Runs one function. The engine reads the option `max_batch` and passes all other options to the function."""

    def __init__(self, config: StageConfig, *, descriptor: FunctionDescriptor | None = None) -> None:
        if config.function is None:
            raise InvalidRequestError(f"stage {config.stage}: the function engine needs `function`")
        self._stage = config.stage
        self._name = config.function
        self._descriptor = descriptor or load_function_descriptor(config.function)
        self._model = Path(config.model) if config.model is not None else None
        self._max_batch, self._options = _split_options(config)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=config.function)
        self._function: Function[object] | None = None
        self._batcher: Batcher | None = None
        self._serving: asyncio.Task[None] | None = None
        self._held = 0

    @property
    def abilities(self) -> EngineAbilities:
        return EngineAbilities()

    async def start(self, report: Callable[[str], None]) -> None:
        report(f"loading {self._name}")
        self._function = function = await self._in_thread(self._load)
        self._batcher = Batcher(function, name=self._name, thread=self._thread, max_batch=self._max_batch)
        self._serving = asyncio.create_task(self._batcher.run(), name=f"function {self._name}")

    def _load(self) -> Function[object]:
        try:
            function: Function[object] = import_factory(self._descriptor.factory)(self._model, self._options)
        except ImportError as exc:
            raise NotReadyError(
                f"function {self._name} needs the module {exc.name}; install the Stagemesh extra that contains it",
                reason="MISSING_MODULE",
            ) from exc
        return function

    async def submit(self, task: Task) -> AsyncGenerator[EngineEvent, None]:
        if self._batcher is None or self._function is None:
            raise NotReadyError(f"stage {self._stage} is still loading {self._name}")
        if task.max_steps is not None or task.resume_from is not None:
            raise UnsupportedError(f"stage {self._stage}: a function stage can neither pause nor resume")
        options = request_options(task.options, self._descriptor.signature.options, stage=self._stage)
        self._held += 1
        try:
            state = await self._in_thread(partial(_open, self._function, task, options))
            steps = 0
            async with aclosing(packets_of(task, self._descriptor.signature)) as packets:
                async for packet in packets:
                    for made in await self._batcher.call(Call(state, packet)):
                        yield Emission(made)
                    steps += 1
                    yield Progress(steps)
            for made in await self._batcher.call(Call[object](state, None)):
                yield Emission(made)
            yield Usage(steps=steps)
        finally:
            self._held -= 1

    def load(self) -> EngineLoad:
        waiting, work_s = (self._batcher.waiting, self._batcher.work_s) if self._batcher else (0, 0.0)
        return EngineLoad(running=self._held, queued=waiting, work_s=work_s)

    async def wait_failed(self) -> str:
        assert self._serving is not None, "`start` has not been called"
        await asyncio.wait([self._serving])
        return f"the batcher of function {self._name} ended"

    async def close(self) -> None:
        if self._serving is not None:
            self._serving.cancel()
            await asyncio.wait([self._serving])
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _in_thread(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)


def _open(function: Function[object], task: Task, options: Mapping[str, float]) -> object:
    if isinstance(function, OpensWithout):
        opens = cast("OpensWithout[object]", function)
        return opens.open_without(task.absent, seed=task.seed, options=options)
    return function.open(seed=task.seed, options=options)


def _split_options(config: StageConfig) -> tuple[int, Mapping[str, JsonValue]]:
    options = dict(config.options)
    max_batch = options.pop("max_batch", _DEFAULT_MAX_BATCH)
    if not isinstance(max_batch, int) or max_batch < 1:
        raise InvalidRequestError(
            f"stage {config.stage}: option max_batch is {max_batch!r}; it must be a whole number from 1",
            reason="INVALID_OPTION",
        )
    return max_batch, options
