"""`movie.mp4` and `movie.webm`: one file of the frames and the sound that two stages make."""

import io
import tracemalloc
from collections.abc import Iterator, Sequence

import av
import numpy as np
import pytest

from stagemesh.common.errors import InvalidChunkError, InvalidRequestError, UnsupportedError
from stagemesh.connectors.packets import Packet
from stagemesh.services.engines.function.base import Call
from stagemesh.services.models.movies import Mp4, WebM
from tests.rpc.call_errors import raises

RATE_HZ = 24_000
FRAMES = np.linspace(0, 1, 72 * 3 * 32 * 48, dtype=np.float32).reshape(72, 3, 32, 48)
TONE = (0.3 * np.sin(np.arange(3 * RATE_HZ) / 8)).astype(np.float32)[:, None]


def _frames(count: int) -> list[Packet]:
    return [Packet({"frames": part}) for part in np.array_split(FRAMES, count)]


def _sound(count: int, channels: int = 1) -> list[Packet]:
    samples = np.repeat(TONE, channels, axis=1)
    return [Packet({"audio": part}, {"sample_rate_hz": RATE_HZ}) for part in np.array_split(samples, count)]


def _parts(movie: Mp4, packets: Sequence[Packet]) -> Iterator[bytes]:
    state = movie.open(seed=0, options={"frame_rate": 24.0})
    for packet in [*packets, None]:
        for made in movie([Call(state, packet)])[0]:
            yield made.tensors["video"].tobytes()


@pytest.mark.parametrize("kind", [Mp4, WebM])
@pytest.mark.parametrize("channels", [1, 2])
def test_a_file_has_frames_and_sound_and_does_not_depend_on_their_order(kind: type[Mp4], channels: int) -> None:
    preview = Packet({"frames": FRAMES[:1]}, {"preview": True})
    sound = _sound(5, channels)
    orders = (
        [*_frames(1), *sound],
        [*sound, *_frames(7)],
        [preview, *(packet for pair in zip(_frames(5), sound, strict=True) for packet in pair)],
    )
    first, *others = [b"".join(_parts(kind(None, {}), order)) for order in orders]
    assert others == [first, first]
    with av.open(io.BytesIO(first), "r") as container:
        streams = container.streams
        frames, samples = 0, 0
        for frame in container.decode(streams.video[0], streams.audio[0]):
            if isinstance(frame, av.VideoFrame):
                expected = (FRAMES[frames].transpose(1, 2, 0) * 255).round()
                assert np.abs(frame.to_ndarray(format="rgb24") - expected).mean() < 8
                frames += 1
            elif isinstance(frame, av.AudioFrame):
                samples += frame.samples
        assert (frames, streams.audio[0].rate, streams.audio[0].layout.nb_channels) == (72, 48_000, 2)
        assert samples / 48_000 == pytest.approx(3, abs=0.05)


def test_memory_does_not_grow_with_the_length_of_a_video() -> None:
    movie, second = Mp4(None, {}), [*_frames(3)[:1], *_sound(3)[:1]]
    peaks = list[int]()
    for seconds in (5, 50):
        tracemalloc.start()
        assert sum(map(len, _parts(movie, second * seconds))) > 10_000 * seconds
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < peaks[0] * 1.2


def test_bad_input_is_refused() -> None:
    with raises(InvalidRequestError, reason="UNKNOWN_OPTION"):
        Mp4(None, {"x": 1})
    for rate_hz in (None, 0, "fast"):
        metadata = {} if rate_hz is None else {"sample_rate_hz": rate_hz}
        with pytest.raises(InvalidChunkError):
            list(_parts(Mp4(None, {}), [Packet({"audio": TONE}, metadata)]))
    other_rate = Packet({"audio": TONE}, {"sample_rate_hz": RATE_HZ * 2})
    for packets in (
        _sound(1),
        [*_sound(1), other_rate],
        _sound(1, channels=3),
        [Packet({"frames": FRAMES[:, :, :31]})],
    ):
        with raises(UnsupportedError, reason="OUTPUT_NOT_ENCODABLE"):
            list(_parts(Mp4(None, {}), packets))
