"""An engine whose output is a function of seed, prompt and step alone, so that tests can compare bytes."""

import asyncio
import hashlib
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from dataclasses import dataclass

import numpy as np

from stagemesh.connectors.base import Packet
from stagemesh.connectors.errors import (
    CancelledRequestError,
    InternalError,
    InvalidRequestError,
    UnsupportedError,
)
from stagemesh.connectors.tensors import Array
from stagemesh.services.engines.base import (
    Checkpoint,
    Emission,
    EngineEvent,
    EngineLoad,
    Progress,
    Resumable,
    Task,
    Usage,
)
from stagemesh.services.engines.fake import FRAME_WIDTH, signature
from stagemesh.services.engines.options import parse_options
from stagemesh.services.serving.config import StageConfig


@dataclass(frozen=True)
class FakeOptions:
    """How a fake stage behaves."""

    steps: int = 4
    """Steps of a source where the request sets no max_tokens."""
    step_s: float = 0.0
    """How long a step takes, by `asyncio.sleep`."""
    size_bytes: int = 0
    """Pads a source's text to this size; 0 leaves it as it is."""
    fail_at_step: int | None = None
    """The step, from 0, that raises."""
    start_s: float = 0.0
    """How long loading takes."""
    max_running: int = 256
    """Tasks run at once; more are queued."""
    checkpoint_steps: int = 0
    """Steps between two checkpoints; 0 for none."""


class FakeEngine(Resumable):
    """See `stagemesh.services.engines.base.Engine`."""

    def __init__(self, config: StageConfig) -> None:
        self._stage = config.stage
        self._options = parse_options(FakeOptions, config.options, stage=config.stage)
        self._accepts = signature(config.function).accepts
        self._emits = next(iter(signature(config.function).emits))
        self._slots = asyncio.Semaphore(self._options.max_running)
        self._held = 0
        self._closed = False

    async def start(self, report: Callable[[str], None]) -> None:
        report("loading nothing")
        await asyncio.sleep(self._options.start_s)

    async def submit(self, task: Task) -> AsyncGenerator[EngineEvent, None]:
        if task.max_steps is not None:
            raise UnsupportedError(f"stage {self._stage}: the fake engine cannot pause")
        self._held += 1
        try:
            async with self._slots, aclosing(self._run(task)) as events:
                async for event in events:
                    yield event
        finally:
            self._held -= 1

    async def _run(self, task: Task) -> AsyncGenerator[EngineEvent, None]:
        step = size_bytes = 0
        done = task.resume_from.steps if task.resume_from is not None else 0
        async for text in self._texts(task):
            if step >= done:
                await self._step(step)
                tensor = frames_of(text) if self._emits == "frames" else text
                yield Emission(Packet({self._emits: tensor}, {"step": step}))
            step, size_bytes = step + 1, size_bytes + text.nbytes
            if step > done:
                yield Progress(step)
                if self._options.checkpoint_steps and not step % self._options.checkpoint_steps:
                    yield Checkpoint(step)
        if step <= done and task.resume_from is not None:
            raise InvalidRequestError(
                f"stage {self._stage}: the checkpoint is of step {done}, and all is done at {step}",
                reason="INVALID_CHECKPOINT",
            )
        yield Usage(prompt_tokens=len(task.prompt or ""), output_tokens=size_bytes, steps=step)

    async def _texts(self, task: Task) -> AsyncIterator[Array]:
        if not self._accepts:
            for step in range(self._options.steps if task.sampling.max_tokens is None else task.sampling.max_tokens):
                yield source_text(task, step=step, size_bytes=self._options.size_bytes)
            return
        if len(task.inlets) != 1:
            raise InvalidRequestError(f"stage {self._stage} needs one incoming edge, not {len(task.inlets)}")
        async for packet in next(iter(task.inlets.values())):
            self._accepts["text"].check("text", packet.tensors["text"])
            yield packet.tensors["text"]

    async def _step(self, step: int) -> None:
        await asyncio.sleep(self._options.step_s)
        if self._closed:
            raise CancelledRequestError(f"stage {self._stage} is closing")
        if step == self._options.fail_at_step:
            raise InternalError(f"stage {self._stage} fails at step {step}, as its option fail_at_step asks")

    def load(self) -> EngineLoad:
        running = min(self._held, self._options.max_running)
        left_s = self._held * self._options.steps * self._options.step_s
        return EngineLoad(running, self._held - running, work_s=left_s)

    async def wait_failed(self) -> str:
        await asyncio.Event().wait()
        raise AssertionError("a fake engine never dies")

    async def close(self) -> None:
        self._closed = True


def source_text(task: Task, *, step: int, size_bytes: int) -> Array:
    """What a source emits at `step`: a short ASCII sentence, repeated or cut to `size_bytes` where that is set."""
    digest = hashlib.sha256(f"{task.seed}/{task.prompt}/{step}".encode()).hexdigest()[:8]
    text = f"Step {step} is {digest}. ".encode()
    if size_bytes:
        text = (text * (size_bytes // len(text) + 1))[:size_bytes]
    return np.frombuffer(text, np.uint8)


def frames_of(text: Array) -> Array:
    """One frame for each byte: the byte's value times 1, 2, 3 …"""
    return text[:, None].astype(np.float32) * np.arange(1, FRAME_WIDTH + 1, dtype=np.float32)
