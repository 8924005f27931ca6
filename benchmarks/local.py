"""Runs a pipeline's engines, transforms and chunk policies in one process, connected by queues without services.

    python -m benchmarks.local PROMPT --seed 7 --max-tokens 70 --into FOLDER

writes the text and the samples to FOLDER/text.txt and FOLDER/audio.npy.

It is the baseline of measurements of a deployed pipeline, whose output must be equal byte for byte.
"""

import argparse
import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from stagemesh.common.plugins.descriptors import EngineDescriptor, TransformDescriptor
from stagemesh.common.plugins.entry_points import import_factory, load_descriptor
from stagemesh.common.process.stage_process import StageConfig
from stagemesh.common.wire.chunk_sizes import StepPolicy
from stagemesh.connectors.flow.chunking import Chunker
from stagemesh.connectors.packets import Packet, Transform
from stagemesh.pipeline import Edge, Pipeline, load_pipeline
from stagemesh.services.engines.base import Emission, Engine, SamplingOptions, Task


@dataclass(frozen=True, eq=False)
class LocalRun:
    """The outputs of a request and their times, in seconds since its start."""

    text: str
    audio: npt.NDArray[np.float32]
    first_text_s: float
    first_audio_s: float
    total_s: float


class Queue:
    """An edge: passes packets from one task to another through the edge's chunk policy and transform."""

    def __init__(self, edge: Edge) -> None:
        self._chunker = None if isinstance(edge.policy, StepPolicy) else Chunker(edge.policy)
        self._transform: Transform | None = None
        if edge.transform:
            self._transform = import_factory(load_descriptor(TransformDescriptor, edge.transform).factory)()
        self._packets: asyncio.Queue[Packet | None] = asyncio.Queue(maxsize=64)

    async def put(self, packet: Packet | None) -> None:
        """Sends a packet. None ends the edge."""
        chunks = [packet] if packet else []
        if self._chunker is not None:
            chunks = self._chunker.push(packet) if packet else self._chunker.finish()
        for chunk in chunks:
            await self._packets.put(chunk)
        if packet is None:
            await self._packets.put(None)

    async def __aiter__(self) -> AsyncIterator[Packet]:
        while (packet := await self._packets.get()) is not None:
            for ready in self._transform.push(packet) if self._transform else (packet,):
                yield ready
        for ready in self._transform.finish() if self._transform else ():
            yield ready


class LocalPipeline:
    """All stages of a pipeline, loaded in this process."""

    def __init__(self, pipeline: Pipeline, engines: Mapping[str, Engine]) -> None:
        self._pipeline, self._engines = pipeline, engines

    @classmethod
    @asynccontextmanager
    async def started(
        cls, name: str = "speech", overrides: Mapping[str, str] | None = None
    ) -> AsyncGenerator["LocalPipeline"]:
        """Loads a pipeline's engines and closes them at the end of the block."""
        pipeline = load_pipeline(name, overrides=overrides or {})
        async with AsyncExitStack() as stack:
            engines: dict[str, Engine] = {}
            for stage in pipeline.stages.values():
                config = StageConfig(
                    pipeline=pipeline.name,
                    generation=pipeline.generation,
                    stage=stage.name,
                    replica=stage.name,
                    engine=stage.engine,
                    listen="",
                    function=stage.function,
                    model=None if stage.model_path is None else str(stage.model_path),
                    options=stage.options,
                )
                engine: Engine = import_factory(load_descriptor(EngineDescriptor, stage.engine).factory)(config)
                await engine.start(lambda _: None)
                stack.push_async_callback(engine.close)
                engines[stage.name] = engine
            yield cls(pipeline, engines)

    async def run(self, prompt: str, *, seed: int, max_tokens: int) -> LocalRun:
        """Runs one request."""
        began_s = time.monotonic()
        queues = {edge.name: Queue(edge) for edge in self._pipeline.edges}
        outputs: dict[str, list[npt.NDArray[np.generic]]] = {}
        first_s: dict[str, float] = {}

        async def run_stage(stage: str) -> None:
            inlets = {edge.name: queues[edge.name] for edge in self._pipeline.edges if edge.consumer == stage}
            outlets = [queues[edge.name] for edge in self._pipeline.edges if edge.producer == stage]
            task = Task(
                request_id="local",
                seed=seed,
                prompt=None if inlets else prompt,
                sampling=SamplingOptions(max_tokens=max_tokens),
                inlets=inlets,
            )
            async for event in self._engines[stage].submit(task):
                if isinstance(event, Emission):
                    for name, tensor in event.packet.tensors.items():
                        first_s.setdefault(f"{stage}.{name}", time.monotonic() - began_s)
                        outputs.setdefault(f"{stage}.{name}", []).append(tensor)
                    for outlet in outlets:
                        await outlet.put(event.packet)
            for outlet in outlets:
                await outlet.put(None)

        async with asyncio.TaskGroup() as group:
            for stage in self._pipeline.stages:
                group.create_task(run_stage(stage))
        text, audio = (self._place(output) for output in ("text", "audio"))
        return LocalRun(
            text=b"".join(part.tobytes() for part in outputs[text]).decode(),
            audio=np.concatenate(outputs[audio]).astype(np.float32),
            first_text_s=first_s[text],
            first_audio_s=first_s[audio],
            total_s=time.monotonic() - began_s,
        )

    def _place(self, output: str) -> str:
        return f"{self._pipeline.outputs[output].stage}.{self._pipeline.outputs[output].tensor}"


def main() -> None:
    """Runs the speech pipeline once."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompt")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-tokens", type=int, default=70)
    parser.add_argument("--into", type=Path, required=True)
    arguments = parser.parse_args()

    async def run() -> LocalRun:
        async with LocalPipeline.started() as local:
            return await local.run(arguments.prompt, seed=arguments.seed, max_tokens=arguments.max_tokens)

    result = asyncio.run(run())
    np.save(arguments.into / "audio.npy", result.audio)
    (arguments.into / "text.txt").write_text(result.text)


if __name__ == "__main__":
    main()
