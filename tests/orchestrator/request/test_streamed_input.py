"""Streamed input: its packets, their delivery over real flows, and the requests that may have it."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from stagemesh.common.errors import CancelledRequestError, InvalidRequestError, StagemeshError, UnsupportedError
from stagemesh.common.wire.tensors import inline_tensor
from stagemesh.conformance import Host
from stagemesh.connectors.data_plane import DataPlane
from stagemesh.connectors.packets import ConsumerAddress, EdgeKey, Packet
from stagemesh.orchestrator.fleet.replica import Replica
from stagemesh.orchestrator.request.streamed_input import InputPlanes, StreamedInput, packets_of
from stagemesh.orchestrator.request.validation import ValidRequest, validate
from stagemesh.pipeline import Edge, Pipeline
from stagemesh.v1 import orchestrator_pb2, request_pb2
from stagemesh.v1.request_pb2 import MediaFile, Part
from tests.orchestrator.mesh import ask, load

BOTH = """
pipeline: both
stages:
  writer: {engine: fake, function: source}
  echo: {engine: fake, function: relay}
  ear: {engine: fake, function: relay}
edges:
  - {from: writer, to: echo, when: {input: stream, given: false}}
  - {from: "@input", to: echo}
  - {from: "@input", to: ear}
outputs: {written: writer, said: echo, heard: ear}
"""
EDGE = Edge(name="in", producer="@input", consumer="b", tensors=("text",))


def _audio(samples: object, *, rate_hz: int = 16_000) -> Part:
    tensor = inline_tensor("", np.asarray(samples))
    return Part(audio=request_pb2.Audio(samples=tensor, sample_rate_hz=rate_hz))


def _said(*texts: str) -> list[Packet]:
    return [Packet({"text": np.frombuffer(text.encode(), np.uint8)}) for text in texts]


# -- packets


def test_a_long_text_becomes_packets_of_whole_characters() -> None:
    text = "añ語🙂" * 100_000
    packets = packets_of(Part(text=text), kinds={"text"})
    assert "".join(packet.tensors["text"].tobytes().decode() for packet in packets) == text
    assert max(packet.size_bytes for packet in packets) <= 256 << 10


def test_audio_becomes_packets_of_one_channel_with_its_rate() -> None:
    stereo = np.stack([np.full(100_000, 0.5, np.float32), np.zeros(100_000, np.float32)], axis=1)
    packets = packets_of(_audio(stereo), kinds={"audio"})
    samples = np.concatenate([packet.tensors["audio"] for packet in packets])
    assert (samples.shape, samples.dtype, set(samples.tolist())) == ((100_000,), np.dtype(np.float32), {0.25})
    assert [packet.metadata for packet in packets] == [{"sample_rate_hz": 16_000}] * 2


_INVALID = {
    "dtype": (_audio(np.zeros(4, np.int16)), "the samples are int16[4]; send float32[samples] or [samples, channels]"),
    "axes": (_audio(np.zeros((2, 2, 2), np.float32)), "the samples are float32[2, 2, 2]"),
    "sample": (_audio(np.array([np.nan], np.float32)), "a sample is not a finite number"),
    "rate": (_audio(np.zeros(4, np.float32), rate_hz=0), "sample_rate_hz is 0; use 1000 to 384000"),
}


@pytest.mark.parametrize(("part", "problem"), _INVALID.values(), ids=_INVALID)
def test_invalid_audio_is_rejected(part: Part, problem: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        packets_of(part, kinds={"audio"})
    assert (caught.value.reason, problem in caught.value.message) == ("INVALID_MEDIA", True)


_NOT_AUDIO = {"image": Part(image=MediaFile(data=b"x")), "empty": Part(), "text": Part(text="hi")}


@pytest.mark.parametrize(("kind", "part"), _NOT_AUDIO.items())
def test_a_piece_that_no_stage_takes_is_rejected(kind: str, part: Part) -> None:
    with pytest.raises(UnsupportedError, match=f"a piece of streamed input is {kind}, but the stages take audio"):
        packets_of(part, kinds={"audio"})


# -- delivery


@pytest.fixture
async def consumer() -> AsyncIterator[Host]:
    host = await Host.started("b-0")
    yield host
    await host.close()


@pytest.fixture
async def planes() -> AsyncIterator[InputPlanes]:
    planes = InputPlanes("p")
    yield planes
    await planes.close()


def _replica(host: Host, *, generation: str = "g") -> Replica:
    address = ConsumerAddress(host.replica, host.endpoint)
    return cast("Replica", SimpleNamespace(address=address, generation=generation))


async def _send(stream: StreamedInput, planes: InputPlanes, consumer: Replica, *, attempt: int = 1) -> None:
    async with planes.open_outlet(EdgeKey("r", EDGE.name, attempt), consumer) as outlet:
        await stream.send(outlet, EDGE)


async def _received(host: Host, planes: InputPlanes, *, attempt: int = 1) -> str:
    inlet = host.plane.open_inlet(EdgeKey("r", EDGE.name, attempt), producer=planes.producer)
    try:
        return "".join([packet.tensors["text"].tobytes().decode() async for packet in inlet])
    finally:
        await inlet.aclose()


async def test_each_attempt_receives_all_and_bytes_are_consumed_once(consumer: Host, planes: InputPlanes) -> None:
    consumed = list[int]()
    stream = StreamedInput(consumed.append)
    stream.begin([EDGE])
    for packet in _said("one ", "two ", "three"):
        stream.append(packet)
    stream.append(Packet({"audio": np.zeros(4, np.float32)}))
    stream.end()
    for attempt in (1, 2):
        sending = asyncio.ensure_future(_send(stream, planes, _replica(consumer), attempt=attempt))
        assert await _received(consumer, planes, attempt=attempt) == "one two three"
        await sending
    assert consumed == [4, 4, 5, 16]


async def test_an_abort_overtakes_packets_that_lack_credit(planes: InputPlanes) -> None:
    consumer = await Host.started("b-0", window_bytes=10_000)
    stream = StreamedInput(lambda _: None)
    stream.begin([EDGE])
    for packet in _said(*["x" * 8_000] * 4):
        stream.append(packet)
    sending = asyncio.ensure_future(_send(stream, planes, _replica(consumer)))
    inlet = consumer.plane.open_inlet(EdgeKey("r", EDGE.name, 1), producer=planes.producer)
    await anext(inlet)
    stream.abort(InvalidRequestError("it is broken"))
    with pytest.raises(InvalidRequestError, match="it is broken"):
        while True:
            await anext(inlet)
    with pytest.raises(CancelledRequestError):
        await sending
    await inlet.aclose()
    await consumer.close()


async def test_a_stage_is_told_if_its_request_stops_early(consumer: Host, planes: InputPlanes) -> None:
    stream = StreamedInput(lambda _: None)
    stream.begin([EDGE])
    sending = asyncio.ensure_future(_send(stream, planes, _replica(consumer)))
    receiving = asyncio.ensure_future(_received(consumer, planes))
    stream.append(_said("one")[0])
    await asyncio.sleep(0)
    sending.cancel()
    with pytest.raises(StagemeshError, match="the request stopped before the end of its input"):
        await receiving


@pytest.fixture
async def later() -> AsyncIterator[Host]:
    """A replica of another generation."""
    host = await Host.started("b-1")
    await host.plane.close()
    host.plane = DataPlane(replica="b-1", pipeline="p", generation="later")
    yield host
    await host.close()


@pytest.mark.parametrize("ends", [True, False])
async def test_each_generation_has_a_data_plane(ends: bool, consumer: Host, later: Host, planes: InputPlanes) -> None:
    first, second = StreamedInput(lambda _: None), StreamedInput(lambda _: None)
    sending = asyncio.ensure_future(_send(first, planes, _replica(consumer)))
    receiving = asyncio.ensure_future(_received(consumer, planes))
    if ends:
        first.end()
        await receiving
        await sending
    second.end()
    _, text = await asyncio.gather(_send(second, planes, _replica(later, generation="later")), _received(later, planes))
    assert text == ""
    assert planes._planes.keys() == ({"later"} if ends else {"g", "later"})
    first.end()
    await asyncio.gather(receiving, sending)


def test_the_rest_counts_as_consumed_when_the_request_ends() -> None:
    consumed = list[int]()
    stream = StreamedInput(consumed.append)
    stream.append(_said("one")[0])
    stream.close()
    stream.append(_said("later")[0])
    assert (consumed, stream.size_bytes) == ([3, 5], 8)


# -- requests


@pytest.fixture
def pipeline(tmp_path: Path) -> Pipeline:
    return load(tmp_path, BOTH)


def _streamed(pipeline: Pipeline, *outputs: str, choices: int = 1) -> ValidRequest:
    request = orchestrator_pb2.GenerateRequest(outputs=outputs, parameters=request_pb2.Parameters(choices=choices))
    return validate(request, pipeline, stream=StreamedInput(lambda _: None))


def test_a_request_wants_by_default_what_its_input_can_produce(pipeline: Pipeline) -> None:
    assert validate(ask(), pipeline).outputs == ("written", "said")
    assert _streamed(pipeline).outputs == ("said", "heard")


def test_an_output_that_needs_a_prompt_is_rejected_with_streamed_input(pipeline: Pipeline) -> None:
    with pytest.raises(UnsupportedError) as caught:
        _streamed(pipeline, "said", "written")
    assert caught.value.message == (
        "pipeline 'both' cannot make the wanted outputs: 'writer' needs a prompt; use the input mode PROMPT, or want "
        "only said, heard"
    )


def test_an_output_that_needs_streamed_input_is_rejected_with_a_prompt(pipeline: Pipeline) -> None:
    problem = r"'ear' needs streamed input; stream the input in a session \(Converse\)"
    with pytest.raises(UnsupportedError, match=problem):
        validate(ask(outputs=["heard"]), pipeline)


def test_a_pipeline_without_an_edge_from_the_client_takes_no_streamed_input(tmp_path: Path) -> None:
    one = load(tmp_path, "pipeline: one\nstages: {a: {engine: fake, function: source}}\noutputs: {a: a}\n")
    with pytest.raises(UnsupportedError, match="because no edge leads from @input; use the input mode PROMPT"):
        _streamed(one)


def test_a_request_with_streamed_input_has_one_choice(pipeline: Pipeline) -> None:
    with pytest.raises(InvalidRequestError, match="choices is 2"):
        _streamed(pipeline, choices=2)
