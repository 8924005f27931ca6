"""The engine and the function whose inputs and outputs are stamped."""

from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from contextvars import ContextVar
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from pydantic import JsonValue

from benchmarks.omni_streams.stamps import FOLDER, Stamps, without_folder
from stagemesh.common.plugins.entry_points import import_factory
from stagemesh.common.process.stage_process import StageConfig
from stagemesh.common.wire.tensors import Value
from stagemesh.connectors.flow import outlet
from stagemesh.connectors.flow.chunking import Chunker
from stagemesh.connectors.packets import Packet
from stagemesh.services.engines.base import Emission, EngineEvent, Task
from stagemesh.services.engines.function.base import Call, Function
from stagemesh.services.engines.vllm.engine import VllmEngine
from stagemesh.services.models.qwen3_omni import CODE2WAV


@dataclass(frozen=True)
class _Producer:
    """The stamps of a running step."""

    emitted: Stamps
    cut: Stamps
    """The stamps of the chunks that are cut from the emissions."""


_producer: ContextVar[_Producer] = ContextVar("producer")


class _StampedChunker(Chunker):
    """Cuts chunks, and stamps them with the time of the emission that led to them."""

    def push(self, packet: Packet) -> list[Packet]:
        return self._stamped(super().push(packet))

    def cut(self) -> list[Packet]:
        if (producer := _producer.get(None)) is not None:
            # A pause of the talker led to this chunk, not an emission. Its hop begins when the pause is noticed.
            producer.emitted.add(0)
        return self._stamped(super().cut())

    def _stamped(self, chunks: list[Packet]) -> list[Packet]:
        if (producer := _producer.get(None)) is not None:
            for chunk in chunks:
                producer.cut.add(len(chunk.tensors["codes"]))
        return chunks


setattr(outlet, "Chunker", _StampedChunker)  # noqa: B010  # the module does not export the name


class StampedVllm(VllmEngine):
    """The vllm engine, which also stamps the rows that it reads and emits, and the chunks that are cut from them."""

    def __init__(self, config: StageConfig) -> None:
        self._stage, self._folder = config.stage, Path(str(config.options[FOLDER]))
        super().__init__(replace(config, options=without_folder(config.options)))

    async def submit(self, task: Task) -> AsyncGenerator[EngineEvent, None]:
        arrived, emitted = Stamps(f"{self._stage} in", task.seed), Stamps(f"{self._stage} out", task.seed)
        cut = Stamps(f"{self._stage} chunks", task.seed)
        if self._stage == "talker":
            # The code that iterates this generator runs in the same context, and cuts the chunks.
            _producer.set(_Producer(emitted, cut))
        inlets = {edge: _StampedInlet(packets, arrived) for edge, packets in task.inlets.items()}
        async with aclosing(super().submit(replace(task, inlets=inlets))) as events:
            async for event in events:
                if isinstance(event, Emission):
                    tensors = event.packet.tensors
                    emitted.add(sum(len(tensors[name]) for name in ("token_ids", "codes") if name in tensors))
                yield event
        arrived.save(self._folder)
        emitted.save(self._folder)
        cut.save(self._folder)


class _StampedInlet:
    """The talker's input. An iterator rather than a generator, whose frame would retain the last packet."""

    def __init__(self, packets: AsyncIterable[Packet], stamps: Stamps) -> None:
        self._packets, self._stamps = aiter(packets), stamps

    def __aiter__(self) -> AsyncIterator[Packet]:
        return self

    async def __anext__(self) -> Packet:
        packet = await anext(self._packets)
        rows = len(packet.tensors["text_ids"])
        if not self._stamps.rows:
            rows -= cast("int", packet.metadata["prompt_tokens"])
        self._stamps.add(rows)
        return packet


class StampedVocoder:
    """The function code2wav, which also stamps the frames with which it is called."""

    def __init__(self, model: Path | None, options: Mapping[str, JsonValue]) -> None:
        self._folder = Path(str(options[FOLDER]))
        self._vocoder: Function[object] = import_factory(CODE2WAV.factory)(model, without_folder(options))

    def open(self, *, seed: int, options: Mapping[str, Value]) -> tuple[Stamps, object]:
        return Stamps("code2wav in", seed), self._vocoder.open(seed=seed, options=options)

    def __call__(self, batch: Sequence[Call[tuple[Stamps, object]]]) -> Sequence[Sequence[Packet]]:
        for call in batch:
            if call.packet is not None:
                call.state[0].add(len(call.packet.tensors["codes"]))
            else:
                call.state[0].save(self._folder)
        return self._vocoder([Call(call.state[1], call.packet) for call in batch])
