"""The fake engine. Its outputs depend only on the seed, the prompt and the step, so two runs are equal byte
by byte.
"""

import asyncio
import math
import os
import signal
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing

import numpy as np

from stagemesh.common.errors import (
    CancelledRequestError,
    InternalError,
    InvalidChunkError,
    InvalidRequestError,
    OverloadedError,
    UnavailableError,
)
from stagemesh.common.process.stage_process import StageConfig
from stagemesh.common.wire.tensors import Array, Tensors
from stagemesh.connectors.packets import NO_TICKETS, Packet, Ticket, expired_error
from stagemesh.fake_engine import KIND, STATE, signature
from stagemesh.fake_engine.options import FakeOptions, Fault, FaultKind, SeededRandom, fake_options
from stagemesh.fake_engine.outputs import (
    SampledText,
    compute_output,
    decoded_text,
    is_packed,
    media_text,
    pack,
    resize_text,
    source_text,
    state_content,
    step_state,
    unpack,
)
from stagemesh.fake_engine.state_store import StateStore, read_state
from stagemesh.services.engines.abilities import EngineAbilities, HandsOver
from stagemesh.services.engines.base import Checkpoint, Emission, EngineEvent, EngineLoad, Paused, Progress, Task, Usage
from stagemesh.services.engines.controls import SleepManager
from stagemesh.services.engines.input_join import packets_of
from stagemesh.services.engines.prompts import Conversation, Prompt, RawPrompt, media_of


class FakeEngine:
    """The engine of a fake stage. Runs at most `max_running` tasks at the same time. Further tasks wait."""

    def __init__(self, config: StageConfig) -> None:
        self._stage, self._function = config.stage, config.function or "source"
        self._options = fake_options(config.options, stage=config.stage)
        self._slots = asyncio.Semaphore(self._options.max_running)
        self._runs = set[FakeRun]()
        self._memory = hold_memory(0)
        self._closed = asyncio.Event()
        self._sleep = FakeSleep(self._options, stage=config.stage)
        self.states = StateStore()
        """The states that a `prefill` stage hands over."""

    @property
    def abilities(self) -> EngineAbilities:
        kinds = frozenset({KIND})
        return EngineAbilities(
            can_pause=True, can_resume=True, sleep=self._sleep, hands_over=HandsOver(offers=kinds, accepts=kinds)
        )

    async def start(self, report: Callable[[str], None]) -> None:
        report("loading the fake engine")
        self._memory = hold_memory(self._options.memory_bytes)
        if self._function == "prefill":
            await self.states.start()
        await asyncio.sleep(self._options.start_s)

    async def submit(self, task: Task) -> AsyncGenerator[EngineEvent, None]:
        run = FakeRun(
            task,
            stage=self._stage,
            function=self._function,
            options=self._options,
            closed=self._closed,
            states=self.states,
        )
        self._runs.add(run)
        try:
            if 0 < self.load().queued <= self._options.prefetch:
                await run.prefetch()
            async with self._slots, aclosing(run.events()) as events:
                async for event in events:
                    yield event
                    del event  # a variable would retain the memory of an emission while the next one is computed
        finally:
            self._runs.discard(run)

    def load(self) -> EngineLoad:
        running = min(len(self._runs), self._options.max_running)
        return EngineLoad(running, len(self._runs) - running, work_s=sum(run.left_s for run in self._runs))

    async def wait_failed(self) -> str:
        await asyncio.Event().wait()
        raise AssertionError("a fake engine never fails")

    async def close(self) -> None:
        self._closed.set()
        self._memory = hold_memory(0)
        await self.states.close()


class FakeSleep(SleepManager):
    """The sleep of a fake engine, which frees no memory. Waking takes `wake_s` seconds."""

    def __init__(self, options: FakeOptions, *, stage: str) -> None:
        super().__init__(stage=stage)
        self._options = options

    def check_sleep(self, level: int) -> None:
        if level != 1:
            raise InvalidRequestError(f"level is {level}; the fake engine sleeps at level 1")

    async def _engine_sleep(self, level: int) -> set[str]:
        del level
        return {"weights"}

    async def _engine_wake(self, tags: set[str]) -> None:
        del tags
        await asyncio.sleep(self._options.wake_s)


class FakeRun:
    """The run of one task. Converts each input to an emission, with the configured timing and faults.

    `events` may be called only once for each run.
    """

    def __init__(
        self, task: Task, *, stage: str, function: str, options: FakeOptions, closed: asyncio.Event, states: StateStore
    ) -> None:
        """Prepares the run.

        `closed` is an event that the engine sets when it is closed. `states` keeps the states that are handed over.
        """
        self._task, self._stage, self._function, self._options = task, stage, function, options
        self._signature = signature(function)
        self._random = SeededRandom(task.seed, stage)
        self._faults = TaskFaults(options.faults, task, self._random)
        self._closed, self._states = closed, states
        self._state_read: bytes | None = None
        """The state that a `decode` stage has read. None before it is read."""
        self._resumed = task.resume_from.steps if task.resume_from is not None else 0
        self._rows_to_skip: dict[str, int] = {}
        """The number of rows that must still be skipped because the checkpoint includes them, by tensor name."""
        self._step = 0
        if task.resume_from is not None and task.resume_from.rows and not is_packed(task.resume_from.tensors):
            # The new inputs may be split differently, so the task resumes at a row, not at a step.
            self._resumed, self._rows_to_skip = 0, dict(task.resume_from.rows)
        self._clock = StepClock(keeps_rate=self._is_source, clock=asyncio.get_running_loop().time)
        self._memory = hold_memory(0)
        self._sampled = SampledText(task.sampling)

    @property
    def left_s(self) -> float:
        """The estimated remaining work of the task, in seconds."""
        expected = self._source_steps if self._is_source else self._options.steps.mean
        return max(0.0, expected - self._step) * self._options.step_s.mean

    async def prefetch(self) -> None:
        """Reads the state that the task's packets refer to, if the stage accepts tickets, before the task runs."""
        if self._function == "decode":
            await self._handed_over_state()

    async def events(self) -> AsyncGenerator[EngineEvent, None]:
        """Runs the task and yields its events, as specified by `Engine.submit`."""
        self._memory = hold_memory(self._options.request_memory_bytes)
        size_bytes, delayed = 0, list[Emission]()
        usage = Usage(prompt_tokens=_length(self._task.prompt))
        yield usage
        async with aclosing(self._inputs()) as inputs:
            async for given in inputs:
                size_bytes += sum(tensor.nbytes for tensor in given.values())
                made = self._made(given)
                if made is None:
                    self._step += 1
                    continue
                await self._compute()
                usage.output_tokens, usage.engine_steps = size_bytes, self._step + 1
                emission = Emission(Packet(made, {"step": self._step}, self._tickets()))
                disordered = self._faults.swaps_outputs(self._step)
                self._step += 1
                pauses = self._step - self._resumed == self._task.max_steps or self._task.pause_requested.is_set()
                # A delayed output must be emitted before a pause, because it would be lost afterwards.
                if disordered and not pauses:
                    delayed.append(emission)
                    continue
                ready = [emission, *delayed]
                delayed.clear()
                del made, emission
                while ready:
                    yield ready.pop(0)
                yield Progress(self._step)
                if self._options.checkpoint_steps and not self._step % self._options.checkpoint_steps:
                    yield Checkpoint(self._step, tensors=step_state(self._step))
                if pauses:
                    left = await self._state(inputs)
                    if left is not None:
                        yield Paused(left)
                        return
        for each in delayed:
            yield each
        if self._before_checkpoint:
            assert self._task.resume_from is not None, "a task without a checkpoint starts at step 0"
            raise InvalidRequestError(
                f"stage {self._stage}: the checkpoint is of step {self._task.resume_from.steps}, but the task ends at "
                f"step {self._step}",
                reason="INVALID_CHECKPOINT",
            )
        usage.output_tokens, usage.engine_steps, usage.finish = size_bytes, self._step, self._sampled.finish
        yield usage

    @property
    def _is_source(self) -> bool:
        return not self._signature.accepts

    @property
    def _source_steps(self) -> int:
        if self._function == "prefill":
            return 1
        if self._signature.media:
            return len(media_of(self._task.prompt))
        asked = self._task.sampling.max_tokens
        return self._random.count(self._options.steps, "steps") if asked is None else asked

    @property
    def _before_checkpoint(self) -> bool:
        """Whether the task has not yet reached the checkpoint from which it resumes."""
        return self._step < self._resumed or any(self._rows_to_skip.values())

    def _tickets(self) -> Mapping[str, Ticket]:
        """Returns the tickets of a step. The state is ready to be read."""
        if self._function != "prefill":
            return NO_TICKETS
        content = state_content(self._task, self._options.state_bytes)
        return {STATE: self._states.offer(content, time_limit_s=self._options.state_limit_s)}

    async def _handed_over_state(self) -> bytes:
        """Returns the state that another stage hands over to this one. Reads it when called first."""
        if self._state_read is None:
            async with aclosing(packets_of(self._task, self._signature)) as packets:
                packet = await anext(packets, None)
                if packet is None:
                    raise InvalidChunkError(f"stage {self._stage} received no ticket")
                self._state_read = await self._read(packet.tickets[STATE])
        return self._state_read

    async def _read(self, ticket: Ticket) -> bytes:
        try:
            async with asyncio.timeout_at(await ticket.accept()):
                return await read_state(ticket.descriptor, pause_s=self._options.state_s)
        except (TimeoutError, UnavailableError) as exc:
            if self._options.recompute:
                return state_content(self._task, self._options.state_bytes)
            raise exc if isinstance(exc, UnavailableError) else expired_error(ticket.kind) from exc
        finally:
            ticket.release()

    def _made(self, given: Tensors) -> Tensors | None:
        """Returns the tensors of a step, or None if the output has ended or the checkpoint includes them."""
        limited = self._limited(compute_output(self._function, given, frame_side=self._options.frame_side))
        return None if limited is None else self._after_checkpoint(limited)

    def _limited(self, made: Tensors) -> Tensors | None:
        """Returns a step's tensors under the task's sampling parameters, or None if they have ended the output."""
        if not self._signature.sampling:
            return made
        text = self._sampled.limit(made["text"])
        return None if text is None else {"text": text}

    def _after_checkpoint(self, made: Tensors) -> Tensors | None:
        """Returns the rows of a step's tensors after the checkpoint, or None if all rows precede the checkpoint."""
        if not any(self._rows_to_skip.values()):
            return None if self._before_checkpoint else made
        skips = {name: min(len(tensor), self._rows_to_skip.get(name, 0)) for name, tensor in made.items()}
        for name, skipped in skips.items():
            self._rows_to_skip[name] = self._rows_to_skip.get(name, 0) - skipped
        rest = {name: tensor[skips[name] :] for name, tensor in made.items()}
        self._resumed = self._step if any(map(len, rest.values())) else self._step + 1
        return rest if self._resumed == self._step else None

    async def _inputs(self) -> AsyncGenerator[Tensors, None]:
        """Yields the input of each step.

        Starts with the first step, or with the remaining inputs that the task's checkpoint contains.
        """
        if self._is_source:
            for step in range(self._source_steps):
                yield {"text": await self._source_text(step)}
            return
        resume_from = self._task.resume_from
        if resume_from is not None and is_packed(resume_from.tensors):
            self._step = self._resumed
            for given in unpack(resume_from.tensors):
                yield given
            return
        if self._function == "decode":
            state = await self._handed_over_state()
            for step in range(self._source_steps):
                yield {"text": self._sized(decoded_text(state, step), step)}
            return
        step, last = 0, -1
        async with aclosing(packets_of(self._task, self._signature)) as packets:
            async for packet in packets:
                last = self._check_order(packet, last)
                yield {
                    name: self._sized(tensor, step) if name == "text" else tensor
                    for name, tensor in packet.tensors.items()
                }
                step += 1

    async def _source_text(self, step: int) -> Array:
        if self._signature.media:
            return await asyncio.to_thread(media_text, media_of(self._task.prompt)[step])
        return self._sized(source_text(self._task, step), step)

    def _sized(self, text: Array, step: int) -> Array:
        return resize_text(text, self._random.count(self._options.size_bytes, "size", step))

    def _check_order(self, packet: Packet, last: int) -> int:
        """Returns the step number in the packet's metadata.

        Returns `last` if there is no step number or if the request has several edges. `last` is the step number of the
        previous packet. Raises InvalidChunkError if the packet's step number is less than `last`.
        """
        step = packet.metadata.get("step")
        if not isinstance(step, int) or len(self._task.inlets) > 1:
            return last
        if step < last:
            raise InvalidChunkError(
                f"stage {self._stage}: its producer's output of step {step} arrived after that of step {last}",
                reason="OUT_OF_ORDER",
            )
        return step

    async def _state(self, inputs: AsyncGenerator[Tensors, None]) -> Checkpoint | None:
        """Returns the checkpoint of a pausing task, or None if the task has no steps left.

        The checkpoint normally contains the remaining inputs, because the stage does not receive them again. If the
        pause was requested, the checkpoint omits them, because the replica that resumes the task receives all inputs
        again.
        """
        if self._task.pause_requested.is_set() or (self._is_source and self._step < self._source_steps):
            return Checkpoint(self._step, tensors=step_state(self._step))
        if self._is_source:
            return None
        left = [{name: np.array(tensor) for name, tensor in given.items()} async for given in inputs]
        return Checkpoint(self._step, tensors=pack(left)) if left else None

    async def _compute(self) -> None:
        """Applies the faults of the current step and waits for the step's duration."""
        step = self._step
        await self._faults.strike(step, stage=self._stage)
        await asyncio.sleep(self._clock.pause_s(self._duration_s(step) + self._faults.slowness_s(step)))
        if self._closed.is_set():
            raise CancelledRequestError(f"stage {self._stage} is closing", reason="ABORTED")
        if step == self._options.fail_at_step:
            raise InternalError(
                f"stage {self._stage} fails at step {step}, as its option fail_at_step asks", reason="FAKE_FAULT"
            )

    def _duration_s(self, step: int) -> float:
        first_s = self._options.first_step_s if step == 0 else None
        return self._random.draw(first_s or self._options.step_s, "duration", step)


class TaskFaults:
    """The faults that occur in one attempt of a request, each with the number of steps before it occurs."""

    def __init__(self, faults: Sequence[Fault], task: Task, random: SeededRandom) -> None:
        self._random = random
        self._faults = {
            number: (fault, random.count(fault.after_steps, "after", number, task.attempt))
            for number, fault in enumerate(faults)
            if fault.attempts == 0 or task.attempt <= fault.attempts
            if random.quantile("fault", number, task.attempt) < fault.probability
        }

    def swaps_outputs(self, step: int) -> bool:
        """Returns whether the output of this step must be emitted after the output of the next step."""
        return bool(self._now("disorder", step))

    def slowness_s(self, step: int) -> float:
        """Returns the time in seconds that the `slow` faults add to this step."""
        return sum(
            self._random.draw(fault.slow_s, "slow", number, step)
            for number, (fault, after) in self._faults.items()
            if fault.kind == "slow" and step >= after
        )

    async def strike(self, step: int, *, stage: str) -> None:
        """Applies the fault that occurs before this step, if any.

        Depending on the fault, kills the process, waits forever, or raises InternalError.
        """
        if self._now("exit", step):
            os.kill(os.getpid(), signal.SIGKILL)
        if self._now("hang", step):
            await asyncio.Event().wait()
        if self._now("error", step):
            raise InternalError(f"stage {stage} fails at step {step}, as its option faults asks", reason="FAKE_FAULT")

    def _now(self, kind: FaultKind, step: int) -> bool:
        return any(fault.kind == kind and step == after for fault, after in self._faults.values())


class StepClock:
    """Computes the time at which each step of a task ends. `clock` returns the current time in seconds.

    With `keeps_rate`, a step that starts late still ends at the time that the schedule sets, which preserves the
    average rate. After a delay of more than one step, the missed steps are not made up. The next step ends at a later
    time of the same schedule, so that tasks that were blocked together do not resume in lockstep. Without `keeps_rate`,
    each step ends its full duration after its start.
    """

    def __init__(self, *, keeps_rate: bool, clock: Callable[[], float]) -> None:
        self._keeps_rate, self._now_s = keeps_rate, clock
        self._due_s = -math.inf

    def pause_s(self, duration_s: float) -> float:
        """Returns the time until the end of a step that starts now, in seconds. `duration_s` is the step's
        duration.
        """
        now_s = self._now_s()
        late_s = now_s - self._due_s
        keeps = self._keeps_rate and math.isfinite(late_s)
        self._due_s = (now_s - math.fmod(late_s, duration_s) if keeps and duration_s else now_s) + duration_s
        return self._due_s - now_s


def hold_memory(size_bytes: int) -> Array:
    """Allocates `size_bytes` bytes of memory as an array. The memory is freed when the array is deleted.

    Raises OverloadedError if too little memory is available.
    """
    try:
        return np.ones(size_bytes, np.uint8)
    except MemoryError as exc:
        raise OverloadedError(
            f"the fake engine cannot allocate {size_bytes} bytes; lower memory_bytes or request_memory_bytes",
            reason="OUT_OF_MEMORY",
        ) from exc


def _length(prompt: Prompt | None) -> int:
    match prompt:
        case Conversation():
            return len(prompt.messages)
        case RawPrompt():
            return len(prompt.content)
        case _:
            return len(prompt or "")
