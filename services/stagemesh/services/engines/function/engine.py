"""The function engine, which runs one callable on one thread, with the checkpoints of its requests. It batches
packets of all requests as they arrive.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Hashable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from functools import partial
from typing import TypeVar, cast

import numpy as np

from stagemesh.common.errors import InvalidRequestError, NotReadyError, StagemeshError, UnsupportedError
from stagemesh.common.plugins.descriptors import FunctionDescriptor
from stagemesh.common.plugins.entry_points import import_factory, load_descriptor
from stagemesh.common.process.stage_process import StageConfig
from stagemesh.common.wire.telemetry import StepTrace
from stagemesh.common.wire.tensors import Array, Tensors, Value
from stagemesh.connectors.flow.received_rows import ReceivedRows
from stagemesh.connectors.packets import CONTEXT, Packet, RowCounter, rows_of
from stagemesh.services.engines.abilities import EngineAbilities
from stagemesh.services.engines.base import Checkpoint, Emission, EngineEvent, EngineLoad, Progress, Task, Usage
from stagemesh.services.engines.calls import EngineCalls
from stagemesh.services.engines.function import batch_runner, check_stage_options, function_options, own_options
from stagemesh.services.engines.function.base import Call, Function, OpensWithout, Saves
from stagemesh.services.engines.function.playout import EWMA_WEIGHT, AudioStream, AudioTensor, CallCosts
from stagemesh.services.engines.input_join import packets_of
from stagemesh.services.engines.options import request_options
from stagemesh.services.engines.prompts import media_of
from stagemesh.services.engines.user_errors import UserCode, UserErrors

_FUNCTION = "function"
_STATE, _INPUT = "state.", "input."


class RequestCheckpoints:
    """Counts the inputs of one request, decides when its state is saved, and makes its checkpoints.

    `function` is the name of the function. `interval_rows` is the number of rows between two checkpoints, or 0 for no
    checkpoints. `resumed` is the checkpoint from which the request resumes, or None.

    Raises InvalidRequestError (INVALID_CHECKPOINT) if the checkpoint is not one of this function.
    """

    def __init__(self, *, function: str, interval_rows: int, resumed: Checkpoint | None) -> None:
        self._name: Array = np.frombuffer(function.encode(), np.uint8)
        self._interval = interval_rows
        self._resumed = resumed
        if resumed is not None and not np.array_equal(resumed.tensors.get(_FUNCTION, ()), self._name):
            raise invalid_checkpoint(f"does not contain a state of the function {function}")
        self._rows = ReceivedRows(edge="input", counted=_input_rows(resumed) if resumed is not None else {})
        self._rows.begin({})
        self._positions = RowCounter({})
        self._saved_rows = self._row_count

    @property
    def state(self) -> Tensors:
        """The saved state from which the request resumes."""
        assert self._resumed is not None, "the request starts from its beginning"
        return _with_prefix(_STATE, self._resumed.tensors)

    @property
    def is_due(self) -> bool:
        """Whether the state of the request must be saved now.

        Inputs with left context are not counted, because their rows depend on how the producer has cut its chunks.
        """
        if not self._interval or self._rows.is_repeating or self._rows.has_context:
            return False
        return self._row_count // self._interval > self._saved_rows // self._interval

    def new_part(self, packet: Packet) -> Packet | None:
        """Returns the rows of an input that the checkpoint does not include, or None if it includes all of them."""
        if CONTEXT in packet.metadata:
            self._rows.has_context = True
            return packet
        rows = rows_of(packet)
        return self._rows.new_part(packet, rows, self._positions.add(rows))

    def check_end(self) -> None:
        """Raises InvalidRequestError if the inputs have ended before the checkpoint."""
        if self._rows.is_repeating:
            raise invalid_checkpoint("includes more input rows than the request has")

    def make(self, state: Tensors, *, steps: int) -> Checkpoint:
        """Returns the checkpoint of the request after `steps` inputs. `state` is the function's state."""
        self._saved_rows = self._row_count
        tensors: dict[str, Array] = {_FUNCTION: self._name}
        tensors |= {_STATE + name: tensor for name, tensor in state.items()}
        tensors |= {_INPUT + name: np.array(rows) for name, rows in self._rows.counted.items()}
        return Checkpoint(steps, tensors=tensors)

    @property
    def _row_count(self) -> int:
        return max(self._rows.counted.values(), default=0)


def invalid_checkpoint(problem: str) -> InvalidRequestError:
    """Returns the error for a checkpoint with a `problem`."""
    return InvalidRequestError(
        f"the checkpoint {problem}; send a checkpoint of this request back unchanged, or omit resume_from",
        reason="INVALID_CHECKPOINT",
    )


def _input_rows(checkpoint: Checkpoint) -> dict[str, int]:
    try:
        rows = {name: int(each) for name, each in _with_prefix(_INPUT, checkpoint.tensors).items()}
    except (TypeError, ValueError) as exc:
        raise invalid_checkpoint(f"has damaged numbers of input rows: {exc}") from exc
    if not any(rows.values()) or min(rows.values()) < 0:
        raise invalid_checkpoint("includes no input rows")
    return rows


def _with_prefix(prefix: str, tensors: Tensors) -> dict[str, Array]:
    return {name.removeprefix(prefix): each for name, each in tensors.items() if name.startswith(prefix)}


Result = TypeVar("Result")


class FunctionEngine:
    """Runs one function on batches of at most `max_batch` calls.

    Calls are passed to the function in arrival order, unless the function emits audio. Then calls of requests that have
    emitted no audio run first, except that listeners who run out of audio soon come before them. Next are the calls of
    the requests whose listeners first run out of audio. A batch then consists of calls whose inputs have the same
    shapes, either of requests with audio or of others, because other calls share no forward pass. No call waits for a
    batch to fill.

    A request has at most one waiting call, because the engine awaits each call of a request before it makes the next
    one. If the function implements `Saves`, a request emits a checkpoint every `checkpoint_rows` input rows, or none if
    the option is 0. The options `max_batch` and `checkpoint_rows` are not passed to the function.
    """

    def __init__(self, config: StageConfig, *, clock: Callable[[], float] = time.monotonic) -> None:
        if config.function is None:
            raise InvalidRequestError(f"stage {config.stage}: the engine needs `function`", reason="INVALID_CONFIG")
        self._stage = config.stage
        self._name = config.function
        self._descriptor = load_descriptor(FunctionDescriptor, config.function)
        self._code = UserCode(
            f"function {config.function} of stage {config.stage}",
            self._descriptor.factory,
            UserErrors(details=config.error_details, log=config.log),
            function=config.function,
        )
        self._model = config.model_path
        check_stage_options(self._descriptor, config.options, stage=config.stage)
        self._own_options = own_options(config.options, stage=config.stage)
        self._options = function_options(config.options)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=config.function)
        self._function: Function[object] | None = None
        self._runner: batch_runner.CallRunner | None = None
        """Runs the calls of the function. None until the function is loaded."""
        self._audio, self._costs = AudioTensor(self._descriptor.signature), CallCosts()
        self._clock = clock
        self._call_s = 0.0
        """The exponentially weighted moving average of the time per call, in seconds. 0 before the first call."""
        self._held = 0
        self._calls = EngineCalls()

    @property
    def abilities(self) -> EngineAbilities:
        # Until the function is loaded, the stage accepts no task in any case.
        return EngineAbilities(
            can_resume=self._function is None or isinstance(self._function, Saves), metrics=self._calls.metrics
        )

    async def start(self, report: Callable[[str], None]) -> None:
        report(f"loading {self._name}")
        self._function = function = await self._in_thread(self._load)
        self._runner = batch_runner.CallRunner(
            self._name,
            self._thread,
            partial(batch_runner.run_calls, function, self._code),
            max_batch=self._own_options.max_batch,
            on_done=self._record,
            clock=self._clock,
        )

    async def submit(self, task: Task) -> AsyncGenerator[EngineEvent, None]:
        assert self._function is not None, "tasks are submitted after `start`"
        saver = cast("Saves[object]", self._function) if isinstance(self._function, Saves) else None
        if task.max_steps is not None or (task.resume_from is not None and saver is None):
            raise UnsupportedError(
                f"stage {self._stage}: a function stage cannot pause, and resumes only if its function implements Saves"
            )
        options = request_options(task.options, self._descriptor.signature.options, stage=self._stage)
        self._held += 1
        try:
            interval_rows = self._own_options.checkpoint_rows if saver is not None else 0
            checkpoints = RequestCheckpoints(function=self._name, interval_rows=interval_rows, resumed=task.resume_from)
            state = await self._in_function(partial(_open, self._function, task, options, checkpoints))
            media = media_of(task.prompt)
            steps, stream = task.resume_from.steps if task.resume_from is not None else 0, AudioStream()
            async with aclosing(packets_of(task, self._descriptor.signature)) as packets:
                async for given in packets:
                    if (packet := checkpoints.new_part(given)) is None:
                        continue
                    for made in await self._call(Call(state, packet, media), stream, task.trace):
                        yield Emission(made)
                    steps += 1
                    yield Progress(steps)
                    if saver is not None and checkpoints.is_due:
                        saved = await self._in_function(partial(saver.save, state))
                        yield checkpoints.make(saved, steps=steps)
            checkpoints.check_end()
            for made in await self._call(Call[object](state, None), stream, task.trace):
                yield Emission(made)
            yield Usage(engine_steps=steps)
        finally:
            self._held -= 1

    def load(self) -> EngineLoad:
        waiting = len(self._runner) if self._runner is not None else 0
        return EngineLoad(
            running=self._held,
            queued=waiting,
            work_s=waiting * self._call_s,
            call_costs_s=self._costs.by_frames,
            frame_audio_s=self._costs.frame_audio_s,
            audio_delay_s=self._costs.audio_delay_s,
        )

    async def wait_failed(self) -> str:
        assert self._runner is not None, "`start` has not been called"
        await asyncio.wait([self._runner.failed])
        return f"function {self._name} returned no outcomes for a batch of calls; the log of this process has the cause"

    async def close(self) -> None:
        if self._runner is not None:
            self._runner.close()
        self._thread.shutdown(wait=False, cancel_futures=True)

    # -- internals

    async def _in_thread(self, work: Callable[[], Result]) -> Result:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def _in_function(self, work: Callable[[], Result]) -> Result:
        """Runs a method of the function. Raises an InternalError (ENGINE_ERROR) if it raises another exception."""

        def run() -> Result:
            with self._code.converted_errors():
                return work()

        return await self._in_thread(run)

    def _load(self) -> Function[object]:
        try:
            function: Function[object] = import_factory(self._descriptor.factory)(self._model, self._options)
        except ImportError as exc:
            raise NotReadyError(
                f"function {self._name} needs the module {exc.name}; install what contains it, such as an extra of "
                "Stagemesh, or correct the import",
                reason="MISSING_MODULE",
            ) from exc
        return function

    async def _call(self, call: Call[object], stream: AudioStream, trace: StepTrace | None) -> Sequence[Packet]:
        """Adds a call to the queue and waits until it has run. Returns the function's output packets for the call.

        If the caller is cancelled, a call that is still waiting is not run. The result of a call that runs is
        discarded.
        """
        assert self._runner is not None, "calls belong to requests, which are accepted when the function is loaded"
        waiting = batch_runner.WaitingCall(call, asyncio.get_running_loop().create_future(), trace)
        shape = (stream.has_begun, _shape_of(call.packet)) if self._audio.exists else None
        self._runner.add(waiting, shape=shape, due_s=self._costs.due_s(stream, now_s=self._clock()))
        made = await waiting.done
        audio_s = self._audio.seconds(made)
        if audio_s and not stream.has_begun:
            self._costs.add_first(_frames_of(call.packet), audio_s=audio_s)
        stream.add(audio_s, now_s=self._clock())
        return made

    def _record(
        self, batch: Sequence[batch_runner.WaitingCall], outcomes: Sequence[batch_runner.Outcome], took_s: float
    ) -> None:
        self._calls.add((waiting.trace for waiting in batch), seconds=took_s)
        call_s = took_s / len(batch)
        self._call_s += (call_s - self._call_s) * (EWMA_WEIGHT if self._call_s else 1.0)
        made = [outcome for outcome in outcomes if not isinstance(outcome, StagemeshError)]
        if self._audio.exists and len(made) == len(batch):
            frames = [_frames_of(waiting.call.packet) for waiting in batch]
            self._costs.add(frames, took_s=took_s, audio_s=sum(map(self._audio.seconds, made)))


def _shape_of(packet: Packet | None) -> Hashable:
    """Returns the shapes of a packet's tensors. Calls with equal shapes can share a forward pass."""
    return packet and frozenset((name, tensor.shape) for name, tensor in packet.tensors.items())


def _frames_of(packet: Packet | None) -> int:
    return max((len(tensor) for tensor in packet.tensors.values() if tensor.ndim), default=0) if packet else 0


def _open(
    function: Function[object], task: Task, options: Mapping[str, Value], checkpoints: RequestCheckpoints
) -> object:
    if isinstance(function, Saves) and task.resume_from is not None:
        restores = cast("Saves[object]", function)
        try:
            return restores.restore(checkpoints.state, seed=task.seed, options=options)
        except (KeyError, TypeError, ValueError) as exc:
            raise invalid_checkpoint(f"cannot be restored: {exc}") from exc
    if isinstance(function, OpensWithout):
        opens = cast("OpensWithout[object]", function)
        return opens.open_without(task.absent, seed=task.seed, options=options)
    return function.open(seed=task.seed, options=options)
