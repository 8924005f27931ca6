"""Tensors as fragments for a client."""

import io
from itertools import accumulate
from typing import Any

import av
import numpy as np
import pytest

from stagemesh.client.received_events import EventDecoder
from stagemesh.common.errors import UnsupportedError
from stagemesh.common.media.encodings import AUDIO_ENCODINGS, VIDEO_ENCODINGS, make_encoder
from stagemesh.common.plugins.descriptors import Emitted, OutputKind
from stagemesh.common.requests.output_position import Position, length_of
from stagemesh.common.wire.tensors import Array, TensorSpec, read_inline
from stagemesh.connectors.packets import Packet
from stagemesh.services.engines.base import END, Emission, MessageDelta, Progress, TokenLogprob, TokenLogprobs
from stagemesh.services.stage.step.outputs import (
    PROGRESS_INTERVAL_S,
    STEPS_INTERVAL_S,
    ProgressThrottle,
    StreamedOutputs,
)
from stagemesh.v1 import request_pb2
from stagemesh.v1.orchestrator_pb2 import GenerateResponse
from tests.rpc.call_errors import raises


@pytest.mark.parametrize("text", ["naïve 5 €", "🙂e\u0301👩\u200d🚀", "\ufeffa\ufeff"])
def test_a_text_does_not_depend_on_its_division(text: str) -> None:
    data = text.encode()
    for cut in range(len(data) + 1):
        assert "".join(each.text for each in _outputs("text", [_bytes(data[:cut]), _bytes(data[cut:])])) == text


def test_long_audio_is_cut_without_loss() -> None:
    samples = np.arange(700_000, dtype=np.float32)
    pieces = [output.audio for output in _outputs("audio", [samples])]
    assert [piece.sample_rate_hz for piece in pieces] == [24_000] * 3
    assert np.array_equal(np.concatenate([read_inline(piece.samples) for piece in pieces]), samples)


@pytest.mark.parametrize(
    ("data", "media_type"),
    [(b"\x89PNG..", "image/png"), (b"\xff\xd8\xff..", "image/jpeg"), (b"?", "application/octet-stream")],
)
def test_an_image_has_its_media_type(data: bytes, media_type: str) -> None:
    (output,) = _outputs("image", [_bytes(data)])
    assert output.image == request_pb2.Media(data=data, media_type=media_type, last=True)


def test_a_large_image_is_cut_into_parts_of_one_position() -> None:
    image = np.arange(5 << 19, dtype=np.int64).astype(np.uint8)
    outputs = _outputs("image", [image, _bytes(b"?")])
    assert [(each.position, each.image.offset, each.image.last) for each in outputs] == [
        (0, 0, False),
        (0, 1 << 20, False),
        (0, 2 << 20, True),
        (1, 0, True),
    ]
    assert b"".join(each.image.data for each in outputs[:3]) == image.tobytes()


def test_encoded_media_are_counted_in_bytes_and_their_last_part_says_so() -> None:
    outputs = _outputs("media", [_bytes(b"abc"), _bytes(b"de")])
    assert [(each.media.offset, each.media.data, each.media.last) for each in outputs] == [
        (0, b"abc", False),
        (3, b"de", False),
        (5, b"", True),
    ]
    assert {each.media.media_type for each in outputs} == {"audio/ogg"}


def test_fragments_do_not_retain_the_engines_memory() -> None:
    tensor = np.zeros(4, np.float32)
    (output,) = _outputs("tensor", [tensor])
    tensor[:] = 1
    assert not read_inline(output.tensor).any()


def test_an_empty_tensor_makes_no_fragment() -> None:
    assert _outputs("audio", [np.zeros(0, np.float32)]) == []


def test_a_tensor_larger_than_a_message_is_rejected() -> None:
    with raises(UnsupportedError, reason="OUTPUT_TOO_LARGE", match="output x has 9437184 bytes"):
        _outputs("tensor", [np.zeros(9 << 20, np.uint8)])


def test_each_name_has_its_own_position() -> None:
    emits = {name: Emitted(TensorSpec("uint8", ("bytes",)), kind="text") for name in "ab"}
    outputs = StreamedOutputs(["a", "b"], emits)
    emission = Emission(Packet({"a": _bytes(b"x"), "b": _bytes(b"y"), "c": _bytes(b"z")}))
    numbered = [(piece.output.name, piece.output.position) for _ in range(2) for piece in outputs.push(emission)]
    assert numbered == [("a", 0), ("b", 0), ("a", 1), ("b", 1)]


def test_text_and_tokens_have_their_own_logprobs() -> None:
    scored = [TokenLogprobs(TokenLogprob(5, "é", -0.5), (TokenLogprob(6, "e", -1.0),), position) for position in (3, 4)]
    emits = {
        "text": Emitted(TensorSpec("uint8", ("bytes",)), kind="text"),
        "codes": Emitted(TensorSpec("int32", ("n",)), kind="tokens"),
    }
    packet = Packet({"text": _bytes("é".encode()), "codes": np.array([5, 5], np.int32)})
    emission = Emission(packet, tuple(scored), tuple(scored[:1]))
    text, codes = [event.output for event in StreamedOutputs(["text", "codes"], emits).push(emission)]
    assert [(each.position, each.sampled.text) for each in text.logprobs] == [(3, "é")]
    assert [each.position for each in codes.logprobs] == [3, 4]
    assert codes.logprobs[0].top[0] == request_pb2.TokenLogprob(id=6, text="e", logprob=-1.0)


def test_parts_have_the_numbers_of_tokens_that_the_engine_reports() -> None:
    outputs = StreamedOutputs(["a"], {"a": Emitted(TensorSpec("uint8", ("bytes",)), kind="text")})
    parts = outputs.push(Emission(Packet({"a": _bytes(b"raw")}), counts=(5, 2)))
    rest = Position({("a", 0): 1}).remainder(parts[0].output)
    assert rest is not None
    counted = [*(part.output for part in (*parts, *outputs.finish(END))), rest]
    assert [(each.prompt_tokens, each.output_tokens) for each in counted] == [(5, 2)] * 3
    ends = EventDecoder().decode(
        GenerateResponse(output=request_pb2.Output(name="a", finish=request_pb2.Finish(), prompt_tokens=5))
    )
    assert [getattr(event, "counts", None) for event in ends] == [(5, 0)]


def test_a_message_replaces_the_text_of_parsed_outputs() -> None:
    emits = {name: Emitted(TensorSpec("uint8", ("bytes",)), kind="text") for name in "ab"}
    call = MessageDelta("tool_call", '{"x": 1}', call=1, id="c", name="é")
    message = [MessageDelta("reasoning", "hm"), call, MessageDelta("text", "!")]
    outputs = StreamedOutputs(["a", "b"], emits, parsed=["a"])
    parts = outputs.push(Emission(Packet({"a": _bytes(b"raw"), "b": _bytes(b"raw")}), message=message))
    assert [part.output.position for part in parts] == [0, 2, 12, 0]
    assert [part.output.WhichOneof("content") for part in parts] == ["message"] * 3 + ["text"]
    sent = parts[1].output.message.tool_call
    assert (sent.index, sent.id, sent.name, sent.arguments) == (1, "c", "é", '{"x": 1}')
    # A receiver may have any number of whole characters of it.
    rests = [Position({("a", 0): received}).remainder(parts[1].output) for received in (2, 4, 7, 11)]
    assert [(each.message.tool_call.name, each.message.tool_call.arguments) for each in rests if each] == [
        ("é", '{"x": 1}'),
        ("", '{"x": 1}'),
        ("", '": 1}'),
        ("", "}"),
    ]
    assert Position({("a", 0): 12}).remainder(parts[1].output) is None


def _bytes(data: bytes) -> Array:
    return np.frombuffer(data, np.uint8)


def _outputs(kind: OutputKind, tensors: list[Array]) -> list[request_pb2.Output]:
    """Returns all fragments of an output, in order."""
    emitted = Emitted(TensorSpec("uint8", ("n",)), kind=kind, sample_rate_hz=24_000, media_type="audio/ogg")
    outputs = StreamedOutputs(["x"], {"x": emitted})
    events = [event for tensor in tensors for event in outputs.push(Emission(Packet({"x": tensor})))]
    events += outputs.finish(END)
    parts = [event.output for event in events]
    assert [part.position for part in parts] == list(accumulate(map(length_of, parts[:-1]), initial=0))
    assert [part.HasField("finish") for part in parts] == [False] * (len(parts) - 1) + [True]
    # The last part has no content, unless a text ends within a character.
    return parts if parts[-1].WhichOneof("content") else parts[:-1]


RATE_HZ = 24_000
TONE = (0.3 * np.sin(np.arange(2 * RATE_HZ) / 8)).astype(np.float32)
FRAMES = np.linspace(0, 1, 50 * 3 * 32 * 48, dtype=np.float32).reshape(50, 3, 32, 48)


def encode(media_type: str, tensors: list[Array], **options: Any) -> bytes:
    encoder = make_encoder(media_type, **options)
    return b"".join([*(bytes(encoder.push(tensor)) for tensor in tensors), bytes(encoder.finish())])


@pytest.mark.parametrize("media_type", AUDIO_ENCODINGS)
@pytest.mark.parametrize("channels", [1, 2])
def test_audio_is_readable_and_does_not_depend_on_its_division(media_type: str, channels: int) -> None:
    samples = TONE if channels == 1 else np.stack([TONE, TONE], axis=1)
    file = encode(media_type, [samples[:100], samples[100:]], sample_rate_hz=RATE_HZ)
    assert file == encode(media_type, np.array_split(samples, 7), sample_rate_hz=RATE_HZ)
    with av.open(io.BytesIO(file), "r") as container:
        stream = container.streams.audio[0]
        decoded = list(container.decode(stream))
        assert sum(frame.samples for frame in decoded) / stream.rate == pytest.approx(2, abs=0.1)
        assert stream.layout.nb_channels == channels


@pytest.mark.parametrize("media_type", VIDEO_ENCODINGS)
def test_video_is_readable_and_does_not_depend_on_its_division(media_type: str) -> None:
    file = encode(media_type, np.array_split(FRAMES, 3), frame_rate=24)
    pixels = (FRAMES.transpose(0, 2, 3, 1) * 255).round().astype(np.uint8)
    assert file == encode(media_type, np.array_split(pixels, 5), frame_rate=24)
    with av.open(io.BytesIO(file), "r") as container:
        decoded = np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])
        assert container.streams.video[0].average_rate == 24
    assert decoded.shape == pixels.shape
    assert np.abs(decoded.astype(np.int16) - pixels).mean() < 8


def test_a_video_is_made_while_its_frames_arrive() -> None:
    encoder = make_encoder("video/mp4", frame_rate=10)
    made = [len(encoder.push(part)) for part in np.array_split(FRAMES, 5)]
    assert sum(size > 0 for size in made) >= 3
    assert len(encoder.finish())


def test_raw_bytes_are_not_copied() -> None:
    tensor = np.arange(6, dtype=np.int16).reshape(2, 3)
    data = make_encoder("application/octet-stream").push(tensor)
    tensor[0, 0] = 9
    assert bytes(data) == tensor.tobytes()


@pytest.mark.parametrize(
    ("media_type", "tensors", "said"),
    [
        ("video/mp4", [np.zeros((1, 31, 48, 3), np.uint8)], "48 by 31 pixels, but both must be even"),
        ("video/mp4", [FRAMES[:1], FRAMES[:1, :, :16]], "change from"),
        ("audio/ogg", [np.zeros((9, 3), np.float32)], "3 channels, but one or two"),
        ("audio/wav", [TONE, TONE[:, None].repeat(2, 1)], "begins with 1 channels"),
    ],
)
def test_what_a_format_cannot_contain_is_rejected(media_type: str, tensors: list[Array], said: str) -> None:
    with raises(UnsupportedError, reason="OUTPUT_NOT_ENCODABLE", match=said):
        encode(media_type, tensors, sample_rate_hz=RATE_HZ, frame_rate=24)


@pytest.mark.parametrize(("total_steps", "interval_s"), [(None, PROGRESS_INTERVAL_S), (9, STEPS_INTERVAL_S)])
def test_progress_is_limited(total_steps: int | None, interval_s: float) -> None:
    times_s = iter([0.0, interval_s / 2, interval_s, 1.2 * interval_s, 3 * interval_s])
    throttle = ProgressThrottle(clock=lambda: next(times_s))
    due = [throttle.is_due(Progress(steps, total_steps=total_steps)) for steps in range(5)]
    assert due == [True, False, True, False, True]


def test_the_last_of_a_known_number_of_steps_is_always_reported() -> None:
    throttle = ProgressThrottle(clock=lambda: 0.0)
    assert [throttle.is_due(Progress(steps, total_steps=3)) for steps in range(1, 4)] == [True, False, True]
