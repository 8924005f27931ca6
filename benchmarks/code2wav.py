"""Measures code2wav under many concurrent streams: whether all listeners hear their audio without a break.

The model is Qwen3-Omni's code2wav at full size with random weights. A scripted talker, which computes nothing, emits
the frames, so that only the vocoder, the edge and the orchestrator are measured. All run as `stagemesh up` starts them.

- In the paced loads, each stream has 12.5 frames a second, as the real talker has at least. Streams begin within the
  first 2 s.
- In the flooded load, all frames of all streams are there at once.
- First playable audio is the arrival of the first chunk from which on play-out does not starve at once.
- C50 is the percentage of streams whose longest underrun is under 50 ms.
- The cadence is the time between two chunks, divided by the playing time of the first of them. At a paced load the
  talker limits it to 1.

Samples in bfloat16 are compared with those in float32 on the same device.
"""

import argparse
import asyncio
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import log10, sqrt
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

from benchmarks.code2wav_streams.model import FRAME_S, Written, write_code2wav
from benchmarks.code2wav_streams.stages import CODEBOOK, GROUPS, RATE, RECORD, VocoderCall, read_record
from benchmarks.edge_ways.findings import say
from benchmarks.omni_streams.playout import Chunk, first_playable_s, worst_underrun_s
from benchmarks.report import Figure, report
from stagemesh.cli.launcher import Launcher
from stagemesh.client import AsyncClient, AudioChunk
from stagemesh.client.requests import StageArguments
from stagemesh.connectors.packets import Packet
from stagemesh.pipeline import load_pipeline
from stagemesh.services.engines.function.base import Call
from stagemesh.services.models.codec_speech.vocoder import CodecVocoder, VocoderState
from stagemesh.services.models.qwen3_omni.code2wav import make_code2wav

RATE_PER_S = 1 / FRAME_S
C50_S = 0.05
BEGIN_WITHIN_S = 2.0
_PIPELINE = """
pipeline: code2wav
main_stage: talker
stages:
  talker: {{engine: scripted_talker, model: {model}}}
  code2wav:
    engine: function
    function: recorded_code2wav
    model: {model}
    options: {{device: {device}, dtype: {dtype}, max_batch: {max_batch}, {record_option}: {record}}}
edges:
  - from: talker
    to: code2wav
    transform: qwen3_omni.talker2code2wav
    chunk: {{frames: 25, initial_frames: 4, ramp: auto}}
outputs: {{audio: code2wav}}
limits: {{max_in_flight: 4096, max_queued: 4096}}
"""
_ENTRY_POINTS = """\
[stagemesh.engines]
scripted_talker = benchmarks.code2wav_streams.stages:TALKER
[stagemesh.functions]
recorded_code2wav = benchmarks.code2wav_streams.stages:VOCODER
"""


@dataclass(frozen=True)
class Options:
    """The size of the measurement."""

    device: str
    streams: Sequence[int]
    frames: int
    max_batch: int
    dtype: str = "auto"
    tiny: bool = False


@dataclass(frozen=True)
class Load:
    """The streams of a load: the chunks that each received, with arrivals since the stream's request."""

    name: str
    streams: Sequence[Sequence[Chunk]]
    seconds: float
    calls: Sequence[VocoderCall]

    @property
    def audio_s(self) -> float:
        """The playing time of all audio."""
        return sum(chunk.duration_s for stream in self.streams for chunk in stream)


async def measure(options: Options, model: Written, folder: Path) -> list[Load]:
    """Starts the pipeline and runs all loads."""
    record = folder / "record.jsonl"
    record.touch()
    _register(folder)
    text = _PIPELINE.format(
        model=model.folder,
        device=options.device,
        dtype=options.dtype,
        max_batch=options.max_batch,
        record_option=RECORD,
        record=record,
    )
    (folder / "pipeline.yaml").write_text(text)
    launcher = Launcher(load_pipeline(str(folder / "pipeline.yaml")), listen="127.0.0.1:0")
    loads = list[Load]()
    async with launcher.running():
        await launcher.wait_ready()
        async with AsyncClient(launcher.endpoint) as client:
            runner = _Runner(client, model, options.frames, record)
            # In a process that has just started, the first calls take longer, and no speed is known to `ramp: auto`.
            await runner.run("warm", streams=max(options.streams), rate=RATE_PER_S, frames=60)
            for streams in options.streams:
                loads.append(await runner.run(f"{streams} streams, paced", streams=streams, rate=RATE_PER_S))
                say(f"{loads[-1].name}: {loads[-1].seconds:.1f} s")
            most = max(options.streams)
            loads.append(await runner.run(f"{most} streams, flooded", streams=most, rate=0.0))
            say(f"{loads[-1].name}: {loads[-1].seconds:.1f} s")
    return loads


class _Runner:
    """Runs loads on the running pipeline."""

    def __init__(self, client: AsyncClient, model: Written, frames: int, record: Path) -> None:
        self._client, self._model, self._frames, self._record = client, model, frames, record

    async def run(self, name: str, *, streams: int, rate: float, frames: int = 0) -> Load:
        """Runs one load. Its streams begin at random times if the talker is paced, otherwise all at once."""
        known, generator = len(read_record(self._record)), random.Random(streams)
        delays_s = [generator.uniform(0, BEGIN_WITHIN_S) if rate else 0.0 for _ in range(streams)]
        began_s = time.monotonic()
        heard = await asyncio.gather(
            *(
                self._listen(seed, rate=rate, frames=frames or self._frames, delay_s=delay_s)
                for seed, delay_s in enumerate(delays_s, start=1)
            )
        )
        seconds = time.monotonic() - began_s
        return Load(name, heard, seconds, read_record(self._record)[known:])

    async def _listen(self, seed: int, *, rate: float, frames: int, delay_s: float) -> list[Chunk]:
        await asyncio.sleep(delay_s)
        options = {RATE: rate, GROUPS: self._model.groups, CODEBOOK: self._model.codebook}
        talker = StageArguments(max_tokens=frames, options=options)
        chunks, began_s = list[Chunk](), time.monotonic()
        async for event in self._client.generate("Speak.", seed=seed, stages={"talker": talker}, outputs=["audio"]):
            if isinstance(event, AudioChunk):
                duration_s = len(event.samples) / self._model.samples * FRAME_S
                chunks.append(Chunk(time.monotonic() - began_s, duration_s))
        return chunks


def _register(folder: Path) -> None:
    """Makes the talker and the recorded vocoder known to this process and to all that it starts."""
    package = folder / "scripted-1.0.dist-info"
    package.mkdir()
    (package / "METADATA").write_text("Metadata-Version: 2.1\nName: scripted\nVersion: 1.0\n")
    (package / "entry_points.txt").write_text(_ENTRY_POINTS)
    sys.path.insert(0, str(folder))
    root = Path(__file__).parents[1]
    paths = [str(folder), str(root), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)


def load_figures(load: Load) -> Iterator[Figure]:
    """Yields what the listeners of a load hear, and how its calls were."""
    subject, paced = load.name, "paced" in load.name
    first_ms = sorted(1e3 * first_playable_s(stream) for stream in load.streams)
    underruns_ms = [1e3 * worst_underrun_s(stream) for stream in load.streams]
    cadence = sorted(
        (after.arrival_s - chunk.arrival_s) / chunk.duration_s
        for stream in load.streams
        for chunk, after in pairwise(stream)
    )
    yield Figure("first playable audio, p50", _quantile(first_ms, 0.5), "ms", "", subject)
    yield Figure("first playable audio, p95", _quantile(first_ms, 0.95), "ms", "", subject)
    smooth = 100 * sum(underrun_ms < 1e3 * C50_S for underrun_ms in underruns_ms) / len(underruns_ms)
    yield Figure("C50", smooth, "%", ">=99" if paced else "", subject)
    yield Figure("longest underrun", max(underruns_ms), "ms", "", subject)
    for share in (0.5, 0.95, 1.0):
        yield Figure(f"cadence, p{100 * share:.0f}", _quantile(cadence, share), "ratio", "", subject)
    yield Figure("audio made a second", load.audio_s / load.seconds, "s/s", "", subject)
    calls_ms = sorted(1e3 * call.seconds for call in load.calls)
    for share in (0.5, 0.99, 1.0):
        yield Figure(f"call of the vocoder, p{100 * share:.0f}", _quantile(calls_ms, share), "ms", "", subject)
    yield Figure("streams a call", statistics.mean(len(call.frames) for call in load.calls), "", "", subject)
    yield Figure("streams a call, most", max(len(call.frames) for call in load.calls), "", "", subject)
    yield Figure("share of the time in calls", sum(calls_ms) / 1e3 / load.seconds, "ratio", "", subject)
    reserved_gb = max(call.reserved_bytes for call in load.calls) / 1e9
    yield Figure("memory reserved on the GPU", reserved_gb, "GB", "", subject)


def shape_figures(vocoder: CodecVocoder, model: Written, streams: Sequence[int]) -> Iterator[Figure]:
    """Yields the time of a call in this process, by the number of streams and their frames."""
    for frames in (4, 25):
        for rows in streams:
            states = [vocoder.open(seed=0, options={}) for _ in range(rows)]
            # The first two calls have other kernels: one is at the first frames, the next one the first with a past.
            seconds = [_timed(vocoder, states, _codes(model, frames, seed=number)) for number in range(8)]
            first_ms = 1e3 * max(seconds[:2])
            yield Figure(
                f"{rows} streams, {frames} frames each, new shape", first_ms, "ms", "", "a call of the vocoder"
            )
            value = 1e3 * statistics.median(seconds[2:])
            yield Figure(f"{rows} streams, {frames} frames each", value, "ms", "", "a call of the vocoder")


def precision_figures(model: Written, device: str, frames: int) -> Iterator[Figure]:
    """Yields how samples in bfloat16 differ from those in float32."""
    exact, rounded = (
        _decoded(make_code2wav(model.folder, {"device": device, "dtype": dtype}), model, frames)
        for dtype in ("float32", "bfloat16")
    )
    signal, noise = (float(np.mean(np.square(samples))) for samples in (exact, rounded - exact))
    subject = "samples in bfloat16 against float32"
    yield Figure("signal to noise", 10 * log10(signal / noise), "dB", "", subject)
    yield Figure("largest difference", float(np.abs(rounded - exact).max()), "", "", subject)
    yield Figure("root of the mean square, float32", sqrt(signal), "", "", subject)


def _decoded(vocoder: CodecVocoder, model: Written, frames: int) -> npt.NDArray[np.float32]:
    """Returns the samples of one stream that is decoded in chunks of 25 frames."""
    state, codes = vocoder.open(seed=0, options={}), _codes(model, frames, seed=0)
    parts = list[npt.NDArray[np.float32]]()
    for at in range(0, frames, 25):
        (made,) = vocoder([Call(state, Packet({"codes": codes[at : at + 25]}))])
        parts += [packet.tensors["audio"].astype(np.float32, copy=False) for packet in made]
    return np.concatenate(parts)


def _codes(model: Written, frames: int, *, seed: int) -> npt.NDArray[np.int32]:
    return np.random.default_rng(seed).integers(0, model.codebook, (frames, model.groups), np.int32)


def _timed(vocoder: CodecVocoder, states: Sequence[VocoderState], codes: npt.NDArray[np.int32]) -> float:
    calls = [Call(state, Packet({"codes": codes})) for state in states]
    began_s = time.perf_counter()
    vocoder(calls)
    return time.perf_counter() - began_s


def _quantile(values: Sequence[float], share: float) -> float:
    return values[min(len(values) - 1, int(share * len(values)))]


def main() -> None:
    """Reads the command line, measures and reports."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="Write the figures to this file as JSON.")
    parser.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    parser.add_argument("--streams", type=int, nargs="+", default=[1, 64], help="default: 1 64")
    parser.add_argument("--frames", type=int, default=150, help="frames of a stream; default: %(default)s")
    parser.add_argument("--max-batch", type=int, default=64, help="option of the stage; default: %(default)s")
    parser.add_argument("--tiny", action="store_true", help="Use a tiny model, for a machine without a GPU.")
    given = parser.parse_args()
    options = Options(given.device, given.streams, given.frames, given.max_batch, tiny=given.tiny)
    has_gpu = options.device != "cpu" and torch.cuda.is_available()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = write_code2wav(folder / "model", tiny=options.tiny, device=torch.device("cuda" if has_gpu else "cpu"))
        say("the model is written")
        figures = list(precision_figures(model, options.device, min(100, options.frames)))
        vocoder = make_code2wav(model.folder, {"device": options.device})
        figures += shape_figures(vocoder, model, [rows for rows in (1, 8, 32, 64) if rows <= max(options.streams)])
        del vocoder
        if has_gpu:
            torch.cuda.empty_cache()
        figures += [each for load in asyncio.run(measure(options, model, folder)) for each in load_figures(load)]
    report("code2wav", figures, json_file=given.json)


if __name__ == "__main__":
    main()
