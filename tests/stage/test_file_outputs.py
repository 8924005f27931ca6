"""Outputs that a stage encodes, and sends or stores."""

import asyncio
import hashlib
import threading
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest

from stagemesh.common.errors import CancelledRequestError, DeadlineError, StagemeshError
from stagemesh.common.media import stored_file
from stagemesh.common.media.encodings import make_encoder
from stagemesh.common.plugins.descriptors import Emitted, Signature
from stagemesh.common.process.media_config import MediaConfig
from stagemesh.common.wire.tensors import Array, TensorSpec
from stagemesh.connectors.packets import Packet
from stagemesh.services.engines.abilities import EngineAbilities
from stagemesh.services.engines.base import Checkpoint, Emission, EngineEvent, Task, Usage
from stagemesh.services.stage.runtime import StageRuntime
from stagemesh.services.stage.step import run
from stagemesh.services.stage.step.spec import StepSpec, StreamedOutput
from stagemesh.v1 import request_pb2
from tests.limits import files_of_at_most
from tests.media.locations import join_store_threads, s3_server
from tests.rpc.call_errors import raises
from tests.stage.gated_engine import GatedEngine
from tests.stage.replicas import events_of, loading, outputs_of, stage_config, step_spec

FRAMES = np.arange(30 * 16 * 16 * 3, dtype=np.int64).astype(np.uint8).reshape(30, 16, 16, 3)
SOUND = (0.3 * np.sin(np.arange(24_000) / 8)).astype(np.float32)
SIGNATURE = Signature(
    emits={
        "frames": Emitted(TensorSpec("uint8", ("frames", "height", "width", 3))),
        "sound": Emitted(TensorSpec("float32", ("samples",)), kind="audio", sample_rate_hz=24_000),
        "image": Emitted(TensorSpec("uint8", ("bytes",)), kind="image"),
        "song": Emitted(TensorSpec("uint8", ("bytes",)), kind="media", media_type="audio/ogg"),
    }
)
RAW = "application/octet-stream"


class EmittingEngine(GatedEngine):
    """Emits packets with a checkpoint after each, then waits for `gate` and ends."""

    abilities = EngineAbilities(can_pause=True, can_resume=True)

    def __init__(self, *packets: Packet) -> None:
        super().__init__()
        self.packets = packets
        self.emitted, self.may_release = asyncio.Event(), asyncio.Event()
        self.gate.set()
        self.may_release.set()

    async def submit(self, task: Task) -> AsyncGenerator[EngineEvent, None]:
        self.running.append(task.request_id)
        for steps, packet in enumerate(self.packets, 1):
            yield Emission(packet)
            yield Checkpoint(steps, token_ids=(1,))
        self.emitted.set()
        try:
            await self.gate.wait()
        finally:
            await self.may_release.wait()
        if self.error is not None:
            raise self.error
        assert not task.pause_requested.is_set()
        yield Usage(engine_steps=1)


def emitting(name: str, *tensors: Array, **metadata: Any) -> EmittingEngine:
    return EmittingEngine(*(Packet({name: tensor}, metadata) for tensor in tensors))


@asynccontextmanager
async def stage(engine: EmittingEngine, store: Path | str, **media: Any) -> AsyncGenerator[StageRuntime]:
    config = replace(stage_config(), media=MediaConfig(store=str(store), **media))
    async with loading(config, engine=engine, emulated=SIGNATURE) as runtime:
        try:
            await runtime.start()
            yield runtime
        finally:
            engine.gate.set()
            engine.may_release.set()


def wanted(
    tensor: str, media_type: str = "", *, store: Path | str | None = None, frame_rate: float | None = None
) -> StepSpec:
    root = f"file://{store}" if isinstance(store, Path) else store
    uri = f"{root}/outputs/r/file" if root else ""
    return step_spec(streamed=(StreamedOutput(tensor, media_type, frame_rate, uri),))


def files_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.rglob("*") if path.is_file())


async def test_a_stored_output_is_a_file_with_its_size_and_digest(tmp_path: Path) -> None:
    async with stage(emitting("frames", *np.array_split(FRAMES, 4)), tmp_path) as runtime:
        events = await events_of(runtime, wanted("frames", RAW, store=tmp_path))
    (output,) = outputs_of(events)
    content = FRAMES.tobytes()
    assert (tmp_path / "outputs/r/file").read_bytes() == content
    assert (output.file.size_bytes, output.file.sha256) == (len(content), hashlib.sha256(content).digest())
    assert (output.file.uri, output.file.media_type) == (f"file://{tmp_path}/outputs/r/file", RAW)
    assert output.finish.reason == request_pb2.FINISH_REASON_END
    assert events[-1].HasField("finished")
    assert files_in(tmp_path) == ["file"]


async def test_a_stored_video_can_be_played(tmp_path: Path) -> None:
    async with stage(emitting("frames", *np.array_split(FRAMES, 4)), tmp_path) as runtime:
        await events_of(runtime, wanted("frames", "video/mp4", store=tmp_path, frame_rate=12))
    with av.open(str(tmp_path / "outputs/r/file"), "r") as container:
        assert sum(1 for _ in container.decode(video=0)) == len(FRAMES)


async def test_encoded_audio_is_sent_while_it_is_made(tmp_path: Path) -> None:
    encoder = make_encoder("audio/ogg", sample_rate_hz=24_000)
    file = bytes(encoder.push(SOUND)) + bytes(encoder.finish())
    async with stage(emitting("sound", *np.array_split(SOUND, 10)), tmp_path) as runtime:
        parts = outputs_of(await events_of(runtime, wanted("sound", "audio/ogg")))
    assert b"".join(part.media.data for part in parts) == file
    assert all(file[part.position :].startswith(part.media.data) for part in parts)
    assert all(part.media.offset == part.position for part in parts)
    assert [part.media.last for part in parts] == [part.HasField("finish") for part in parts]
    assert len(parts) > 3


async def test_a_file_that_the_stage_encoded_itself_is_stored_as_it_is(tmp_path: Path) -> None:
    async with stage(emitting("song", FRAMES[0].reshape(-1)), tmp_path) as runtime:
        (output,) = outputs_of(await events_of(runtime, wanted("song", store=tmp_path)))
    assert output.file.media_type == "audio/ogg"
    assert (tmp_path / "outputs/r/file").read_bytes() == FRAMES[0].tobytes()


async def test_each_image_is_stored_as_a_file_but_no_preview_is(tmp_path: Path) -> None:
    files = [b"\x89PNG1", b"\xff\xd8\xff2"]
    images = [np.frombuffer(data, np.uint8) for data in files]
    engine = emitting("image", *images)
    engine.packets = (Packet({"image": images[0]}, {"preview": True}), *engine.packets)
    async with stage(engine, tmp_path) as runtime:
        stored = outputs_of(await events_of(runtime, wanted("image", store=tmp_path)))
    assert [(each.position, each.file.media_type) for each in stored] == [(0, "image/png"), (1, "image/jpeg")]
    assert [(tmp_path / each.file.uri.removeprefix(f"file://{tmp_path}/")).read_bytes() for each in stored] == files


@pytest.mark.parametrize("media_type", ["audio/ogg", RAW])
async def test_an_output_without_content_is_neither_sent_nor_stored(tmp_path: Path, media_type: str) -> None:
    async with stage(emitting("sound"), tmp_path) as runtime:
        for attempt, store in enumerate((None, tmp_path), 1):
            spec = replace(wanted("sound", media_type, store=store), step_id=f"r/thinker/{attempt}", attempt=attempt)
            (output,) = outputs_of(await events_of(runtime, spec))
            assert output.WhichOneof("content") is None
            assert output.HasField("finish")
    assert files_in(tmp_path) == []


async def test_a_step_that_makes_files_reports_no_checkpoint_and_does_not_pause(tmp_path: Path) -> None:
    engine = emitting("sound", SOUND)
    engine.gate.clear()
    async with stage(engine, tmp_path) as runtime:
        running = asyncio.create_task(events_of(runtime, wanted("sound", "audio/wav")))
        await engine.emitted.wait()
        (run,) = runtime._runs.running()
        run.request_pause()
        engine.gate.set()
        events = await running
    assert not any(event.HasField("checkpoint") for event in events)
    assert events[-1].HasField("finished")


@pytest.mark.parametrize("ends", ["cancelled", "failed"])
async def test_a_step_that_does_not_finish_leaves_nothing(tmp_path: Path, ends: str) -> None:
    engine = emitting("frames", FRAMES)
    engine.gate.clear()
    async with stage(engine, tmp_path) as runtime:
        running = asyncio.create_task(events_of(runtime, wanted("frames", RAW, store=tmp_path)))
        await engine.emitted.wait()
        assert len(files_in(tmp_path)) == 1
        if ends == "failed":
            engine.error = CancelledRequestError("no more")
            engine.gate.set()
        else:
            await runtime.cancel("r", attempt=1, reason="enough")
            assert files_in(tmp_path) == []
        with pytest.raises(CancelledRequestError):
            await running
    assert files_in(tmp_path) == []


@asynccontextmanager
async def ended_before_release(
    runtime: StageRuntime, engine: EmittingEngine, spec: StepSpec, monkeypatch: pytest.MonkeyPatch
) -> AsyncGenerator[None]:
    """Yields when the step has ended and its engine has not released it yet. Lets the engine release it at the end."""
    monkeypatch.setattr(run, "ABORT_S", 0.0)
    engine.gate.clear()
    engine.may_release.clear()
    running = asyncio.create_task(events_of(runtime, spec))
    await engine.emitted.wait()
    cancelling = asyncio.create_task(runtime.cancel("r", attempt=1, reason="enough"))
    with pytest.raises(CancelledRequestError):
        await running
    yield
    engine.may_release.set()
    await cancelling


async def test_a_step_that_is_released_late_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = emitting("frames", FRAMES)
    async with stage(engine, tmp_path) as runtime:
        async with ended_before_release(runtime, engine, wanted("frames", RAW, store=tmp_path), monkeypatch):
            assert len(files_in(tmp_path)) == 1
        assert files_in(tmp_path) == []


async def test_a_step_that_its_engine_releases_late_aborts_its_upload(monkeypatch: pytest.MonkeyPatch) -> None:
    # The upload begins when the first block of 8 MiB is full.
    engine = emitting("frames", np.resize(FRAMES, (12_000, 16, 16, 3)))
    with s3_server() as bucket:
        async with stage(engine, bucket.url, storage_options=bucket.options) as runtime:
            async with ended_before_release(runtime, engine, wanted("frames", RAW, store=bucket.url), monkeypatch):
                assert bucket.unfinished() == ["outputs/r/file"]
            assert (bucket.contents(), bucket.unfinished()) == ({}, [])


async def test_a_full_store_fails_no_other_step(tmp_path: Path) -> None:
    async with stage(emitting("frames", *np.array_split(FRAMES, 4)), tmp_path) as runtime:
        with files_of_at_most(8 << 10), raises(StagemeshError, reason="STORAGE_FULL"):
            await events_of(runtime, wanted("frames", RAW, store=tmp_path))
        assert files_in(tmp_path) == []
        other = replace(wanted("frames", RAW, store=tmp_path), step_id="r/thinker/2", attempt=2)
        assert outputs_of(await events_of(runtime, other))[0].file.size_bytes == FRAMES.nbytes


async def test_a_store_that_denies_writing_fails_the_step_before_the_engine_computes() -> None:
    engine = emitting("frames", FRAMES)
    # Not even root can create a folder here.
    async with stage(engine, "/sys/stagemesh") as runtime:
        with raises(StagemeshError, reason="STORE_DENIED"):
            await events_of(runtime, wanted("frames", RAW, store=Path("/sys/stagemesh")))
    assert engine.running == []


async def test_a_slow_store_delays_its_step_to_its_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written, write = threading.Event(), stored_file.LocalTarget.write

    def slow_write(self: stored_file.LocalTarget, data: bytes | memoryview) -> None:
        written.wait(10)
        write(self, data)

    monkeypatch.setattr(stored_file.LocalTarget, "write", slow_write)
    async with stage(emitting("frames", FRAMES), tmp_path) as runtime:
        slow = asyncio.create_task(_within(runtime, wanted("frames", RAW, store=tmp_path), time_left_s=0.5))
        assert outputs_of(await events_of(runtime, step_spec("other", streamed=("frames",))))
        assert not slow.done()
        with pytest.raises(DeadlineError):
            await slow
        written.set()
    await asyncio.to_thread(join_store_threads)
    assert files_in(tmp_path) == []


async def _within(runtime: StageRuntime, spec: StepSpec, *, time_left_s: float) -> None:
    async for _ in runtime.execute(spec, time_left_s=time_left_s):
        pass


@pytest.mark.parametrize(
    ("streamed", "said"),
    [
        (StreamedOutput("frames", "audio/wav"), "cannot be encoded as 'audio/wav'; use one of video/mp4, video/webm,"),
        (StreamedOutput("image", "image/png"), "use no media_type"),
        (StreamedOutput("frames", "video/mp4"), "has frame_rate None; use a number above 0"),
        (StreamedOutput("sound", "audio/ogg", 24), "omit it for any other output"),
        (StreamedOutput("sound", "", None, "file:///x/y"), "without a media_type; use one of audio/wav,"),
        (StreamedOutput("sound", RAW, None, "file:///etc/passwd"), "outside the allowed roots"),
    ],
)
async def test_an_output_that_cannot_be_made_is_rejected(tmp_path: Path, streamed: StreamedOutput, said: str) -> None:
    async with stage(emitting("sound", SOUND), tmp_path) as runtime:
        with pytest.raises(StagemeshError, match=said):
            await events_of(runtime, step_spec(streamed=(streamed,)))


async def test_a_stage_without_a_store_cannot_store(tmp_path: Path) -> None:
    async with stage(emitting("sound", SOUND), "") as runtime:
        with pytest.raises(StagemeshError, match=r"set media\.store"):
            await events_of(runtime, wanted("sound", RAW, store=tmp_path))


async def test_a_step_that_makes_files_cannot_resume(tmp_path: Path) -> None:
    spec = wanted("sound", "audio/wav")
    async with stage(emitting("sound", SOUND), tmp_path) as runtime:
        for task in (replace(spec.task, resume_from=Checkpoint(1)), replace(spec.task, max_steps=2)):
            with pytest.raises(StagemeshError, match="cannot pause or resume"):
                await events_of(runtime, replace(spec, task=task))
