"""The readers of what peers and users send, each as a function of bytes that returns whether it accepts them.

A reader raises nothing: the errors of bad input count as a refusal, and any other error is a defect.

`SEEDS` has valid inputs of each, from which mutations reach beyond the first checks.
"""

import asyncio
import contextlib
import io
import json
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from google.protobuf.message import DecodeError

from stagemesh.common.errors import StagemeshError
from stagemesh.common.media.decoding import DecodedBytes, MediaKind, read_audio
from stagemesh.common.media.images import read_image
from stagemesh.common.media.videos import read_video
from stagemesh.connectors.data_plane import DataPlane
from stagemesh.connectors.fragments import decode_fragment, encode_fragment, split_into_fragments
from stagemesh.connectors.packets import Packet
from stagemesh.connectors.wire import FlowDigest, key_to_wire
from stagemesh.orchestrator.request.validation import validate
from stagemesh.orchestrator.session.settings import read_settings
from stagemesh.pipeline import Pipeline, load_pipeline
from stagemesh.services.engines.diffusion.serialization import deserialize, serialize
from stagemesh.services.engines.function.engine import RequestCheckpoints
from stagemesh.services.stage.step.spec import checkpoint_to_wire, rebinding_from_wire, spec_from_wire
from stagemesh.v1 import chunk_pb2, orchestrator_pb2, request_pb2, stage_pb2, tensor_pb2
from tests.connectors.handmade_producers import hello
from tests.fuzz.hostile_peers import (
    KEY,
    SilentStream,
    answer_seeds,
    join,
    read_answers,
    read_replies,
    reply_seeds,
    split,
)
from tests.fuzz.messages import MessageFuzzer
from tests.system.pipelines import pipeline_file

_LIMIT_BYTES = 16 << 20
_PIPELINE = """\
pipeline: fuzzed
stages:
  source: {engine: fake, function: source, options: {steps: 3}}
  relay: {engine: fake, function: relay}
edges: [{from: source, to: relay, connector: shm, chunk: {frames: 4, ramp: [1, 2]}}]
outputs: {text: relay, files: {from: source, media_type: application/octet-stream}}
limits: {max_in_flight: 3, per_caller: {max_sessions: 2}}
"""


# -- chunks


@cache
def _chunk_plane() -> tuple[asyncio.AbstractEventLoop, DataPlane]:
    """Returns a consumer's data plane, and the loop in which it was created."""

    async def make() -> DataPlane:
        return DataPlane(replica="b-0", pipeline="p", generation="g", arena_bytes=1 << 20, window_bytes=64 << 10)

    loop = asyncio.new_event_loop()
    return loop, loop.run_until_complete(make())


def read_chunks(data: bytes) -> bool:
    """A sequence of messages of PutChunk, each with its length before it. The first is preceded by a valid Hello.

    Returns whether a chunk of the expected flow has arrived.
    """
    loop, plane = _chunk_plane()
    return loop.run_until_complete(_receive(plane, data))


async def _receive(plane: Any, data: bytes) -> bool:
    inlet = plane.open_inlet(KEY, producer="a-0")
    session = plane._open_session()
    session.begin(SilentStream())
    arrived = 0
    try:
        with contextlib.suppress(StagemeshError):
            for message in (_HELLO, *split(data)):
                session.received(message)
                arrived = max(arrived, inlet.attempt.next_seq)
                await asyncio.sleep(0)
    finally:
        session.closed(None)
        await inlet.aclose(lost=False)
    return arrived > 0


_HELLO = hello().SerializeToString()


def read_fragment(data: bytes) -> bool:
    """The message format of fragments, which is decoded without protobuf."""
    return _accepts(lambda: decode_fragment(data))


def _put(*items: stage_pb2.PutItem) -> bytes:
    return stage_pb2.PutChunkRequest(items=items).SerializeToString()


def _chunk_seeds() -> list[bytes]:
    key, opening = key_to_wire(KEY), stage_pb2.OpenEdge(opening=1, connector=chunk_pb2.CONNECTOR_GRPC)
    opening.key.CopyFrom(key)
    tensor = tensor_pb2.Tensor(name="x", dtype=tensor_pb2.DATA_TYPE_UINT8, shape=[4], inline=b"1234")
    data = chunk_pb2.ChunkData(tensors=[tensor], size_bytes=4, metadata={"m": tensor_pb2.TypedValue(integer=3)})
    digest = FlowDigest()
    opened = _put(stage_pb2.PutItem(open=opening))
    chunk = _put(stage_pb2.PutItem(chunk=chunk_pb2.Chunk(key=key, seq=0, data=data)))
    end = _put(stage_pb2.PutItem(chunk=chunk_pb2.Chunk(key=key, seq=1, end=digest.end())))
    abort = _put(stage_pb2.PutItem(chunk=chunk_pb2.Chunk(key=key, seq=1, abort=chunk_pb2.ChunkAbort())))
    demand = _put(stage_pb2.PutItem(demand=stage_pb2.CreditDemand(key=key, size_bytes=9)))
    return [
        join([opened, chunk, end]),
        join([opened, chunk, chunk, abort]),
        join([opened, *_fragment_seeds(), demand]),
        join([opened, demand, opened, chunk]),
    ]


def _fragment_seeds() -> list[bytes]:
    tensors = {"x": np.arange(6000, dtype=np.uint8)}
    made = split_into_fragments(key_to_wire(KEY), tensors, total_bytes=6000, seq=0)
    return [encode_fragment(each) for each in made]


# -- media


def _accepts(read: Callable[[], object]) -> bool:
    try:
        read()
    except StagemeshError:
        return False
    return True


def read_media(data: bytes) -> bool:
    """An image, audio or video file. The first byte selects the kind. The gateway's reader of audio reads it, too."""
    # Imports PyAV, which the other targets do without.
    from stagemesh.gateway.audio import measure

    kind, content = _KINDS[data[0] % len(_KINDS) if data else 0], data[1:]
    file, decoded = io.BytesIO(content), DecodedBytes(_LIMIT_BYTES)
    if kind == "image":
        return _accepts(lambda: read_image(file, decoded))
    if kind == "audio":
        _accepts(lambda: measure(content, param="file", decoded=DecodedBytes(_LIMIT_BYTES)))
        return _accepts(lambda: read_audio(file, kind, decoded))
    _accepts(lambda: read_audio(io.BytesIO(content), kind, DecodedBytes(_LIMIT_BYTES)))
    return _accepts(lambda: read_video(file, decoded, max_frames=8))


_KINDS: Sequence[MediaKind] = ("image", "audio", "video")


def _media_seeds() -> list[bytes]:
    from tests.media.samples import seeds_of

    return [bytes([number]) + seed for number, kind in enumerate(_KINDS) for seed in seeds_of(kind)]


# -- states


def read_state(data: bytes) -> bool:
    """A serialized state of a diffusion request, and the tensors of a function's checkpoint."""
    array = np.frombuffer(data, np.uint8)
    return _accepts(lambda: deserialize(array, kind="state", model="m", device=torch.device("cpu")))


def read_checkpoint(data: bytes) -> bool:
    """A checkpoint of a function stage, in the message of a step."""

    def read(message: stage_pb2.ExecuteStepRequest) -> None:
        resumed = spec_from_wire(message).task.resume_from
        if resumed is not None:
            dict(RequestCheckpoints(function="f", interval_rows=1, resumed=resumed).state)

    return _accepts_message(data, {stage_pb2.ExecuteStepRequest: read})


def _state_seeds() -> list[bytes]:
    generator = torch.Generator().manual_seed(1)
    tree = {"latents": torch.zeros(2, 3), "list": [1, 2.5, None, "x"], "tuple": (True,), "generator": generator}
    tree |= {"dtype": torch.float32, "array": np.arange(3)}
    return [serialize(tree, kind="state", model="m").tobytes(), serialize({}, kind="state", model="m").tobytes()]


# -- messages and files


def read_step(data: bytes) -> bool:
    """The message of a step, or that of a rebinding."""
    readers: Mapping[Any, Callable[[Any], object]] = {
        stage_pb2.ExecuteStepRequest: spec_from_wire,
        stage_pb2.RebindStepRequest: rebinding_from_wire,
    }
    return _accepts_message(data, readers)


def read_request(data: bytes) -> bool:
    """The message of a request, or that which opens a session."""
    pipeline = _pipeline()
    readers: Mapping[Any, Callable[[Any], object]] = {
        orchestrator_pb2.GenerateRequest: lambda message: validate(message, pipeline),
        orchestrator_pb2.SessionOpen: lambda message: read_settings(message, pipeline),
    }
    return _accepts_message(data, readers)


def _accepts_message(data: bytes, readers: Mapping[Any, Callable[[Any], object]]) -> bool:
    """Returns whether `data` is a message that one of the readers accepts. `readers` is by message type."""
    accepted = False
    for kind, read in readers.items():
        try:
            message = kind.FromString(data)
        except DecodeError:
            continue
        accepted = _accepts(partial(read, message)) or accepted
    return accepted


@cache
def _pipeline() -> Pipeline:
    return load_pipeline(str(pipeline_file(_folder(), _PIPELINE, name="valid")))


@cache
def _folder() -> Path:
    return Path(tempfile.mkdtemp(prefix="stagemesh-fuzz-"))


def read_pipeline(data: bytes) -> bool:
    """A pipeline file."""
    path = _folder() / "fuzzed.yaml"
    path.write_bytes(data)
    return _accepts(lambda: load_pipeline(str(path), variables={}, check_models=False))


def _message_seeds(*valid: Any) -> list[bytes]:
    """Returns valid messages, and random ones of their types."""
    fuzzer = MessageFuzzer(7)
    made = [fuzzer.message(each.DESCRIPTOR) for each in valid for _ in range(20)]
    return [each.SerializeToString() for each in (*valid, *made)]


def _step(**fields: Any) -> stage_pb2.ExecuteStepRequest:
    return stage_pb2.ExecuteStepRequest(request_id="r", step_id="r/a/1", attempt=1, **fields)


def _resumed_step() -> stage_pb2.ExecuteStepRequest:
    checkpoints = RequestCheckpoints(function="f", interval_rows=1, resumed=None)
    checkpoints.new_part(Packet({"x": np.zeros((3, 2), np.float32)}))
    return _step(resume_from=checkpoint_to_wire(checkpoints.make({"s": np.arange(4)}, steps=1)))


TARGETS: Mapping[str, Callable[[bytes], bool]] = {
    "chunks": read_chunks,
    "fragment": read_fragment,
    "replies": read_replies,
    "answers": lambda data: read_answers(data, _pipeline()),
    "media": read_media,
    "state": read_state,
    "checkpoint": read_checkpoint,
    "step": read_step,
    "request": read_request,
    "pipeline": read_pipeline,
}


@cache
def seeds(target: str) -> tuple[bytes, ...]:
    """Returns valid inputs of a target."""
    makers: Mapping[str, Callable[[], list[bytes]]] = {
        "chunks": _chunk_seeds,
        "fragment": _fragment_seeds,
        "replies": reply_seeds,
        "answers": lambda: answer_seeds(_pipeline()),
        "media": _media_seeds,
        "state": _state_seeds,
        "checkpoint": lambda: _message_seeds(_resumed_step()),
        "step": lambda: _message_seeds(_step(), stage_pb2.RebindStepRequest(request_id="r", step_id="r/a/1")),
        "request": lambda: _message_seeds(
            orchestrator_pb2.GenerateRequest(input=request_pb2.Input(text="hi"), outputs=["text"]),
            orchestrator_pb2.SessionOpen(session_id="s"),
        ),
        "pipeline": lambda: [_PIPELINE.encode(), json.dumps({"pipeline": "x", "stages": {}}).encode()],
    }
    return tuple(makers[target]())
